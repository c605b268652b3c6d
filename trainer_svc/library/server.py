"""The process behind an `AdapterPublisher`: publisher, fleet and servicers, told what to publish.

It ends on SIGTERM, when the socket is closed, or when the parent dies. An error is the reply to one
request, and never ends the process; the traceback of one that was not foreseen is logged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable
from pathlib import Path

import uvloop

from common.config import validate_config
from common.errors import RefitError
from common.tasks import cancel, first_of, stop_requested
from trainer_svc.config import ServerSettings
from trainer_svc.library.commands import Commands
from trainer_svc.megatron.protocol import MAX_LINE_BYTES, Json, decode, encode, error_to_json
from trainer_svc.node import Node
from trainer_svc.publish import serve_without_run

log = logging.getLogger(__name__)


class Link:
    """The parent's socket: requests run side by side, each is answered once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Link:
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES))

    async def receive(self) -> Json | None:
        """The next request; None when the parent closed the socket."""
        line = await self._reader.readline()
        return decode(line) if line.endswith(b"\n") else None

    async def answer(self, request: Json, work: Awaitable[Json]) -> None:
        """Reply with what the work returns, or with its error."""
        try:
            reply: Json = {"result": await work}
        except RefitError as error:
            reply = {"error": error_to_json(error)}
        except Exception as error:
            # The boundary of the process: the fleet must outlive one command's bug.
            log.exception("a command failed")
            message = f"publisher: its server failed: {error!r}; its log has the traceback"
            reply = {"error": error_to_json(RefitError(message))}
        self._writer.write(encode({"id": request["id"]} | reply))
        await self._writer.drain()

    async def serve(self, commands: Commands) -> None:
        """Run requests until the socket is closed; those that still run then are dropped."""
        async with asyncio.TaskGroup() as group:
            running: set[asyncio.Task[None]] = set()
            while request := await self.receive():
                work = commands.run(request["command"], request["args"])
                task = group.create_task(self.answer(request, work))
                running.add(task)
                task.add_done_callback(running.discard)
            for task in running:
                task.cancel()


async def _serve(connection: socket.socket, parent: int) -> None:
    stop = stop_requested()
    # Not PR_SET_PDEATHSIG, which fires when the *thread* that started this process ends.
    asyncio.get_running_loop().add_reader(os.pidfd_open(parent), stop.set)
    link = await Link.over(connection)
    async with contextlib.AsyncExitStack() as stack:
        if (node := await _start(link, stack)) is None:
            return
        serving = asyncio.ensure_future(link.serve(Commands(node)))
        try:
            await first_of(stop, serving)
        finally:
            await cancel(serving)


async def _start(link: Link, stack: contextlib.AsyncExitStack) -> Node | None:
    """Answer the first request, which says what to serve; None when it cannot be."""
    if (request := await link.receive()) is None:
        return None
    started: list[Node] = []

    async def start(model: str, server: Json) -> Json:
        settings = validate_config(ServerSettings, server, source="server")
        node = await stack.enter_async_context(serve_without_run(Path(model), settings))
        started.append(node)
        return {"address": node.server.address, "run_id": node.control.run_id}

    await link.answer(request, start(**request["args"]))
    return started[0] if started else None


def main() -> None:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket of the parent, inherited")
    parser.add_argument("--parent", type=int, required=True, help="its process id")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    uvloop.run(_serve(socket.socket(fileno=args.fd), args.parent))


if __name__ == "__main__":
    main()
