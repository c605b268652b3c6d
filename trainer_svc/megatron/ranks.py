"""The Megatron ranks of one machine, as processes that take commands; imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Self

from common.errors import WaitExpired, WorkerGone, WorkerLost
from trainer_svc.megatron.protocol import (
    MAX_LINE_BYTES,
    Json,
    decode,
    encode,
    error_from_json,
)

_ENVIRONMENT = {
    # Threads that wait for each other sleep; spinning, they would take a neighbour's cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Megatron-core warns at every import of what is not installed; the log is for the run.
    "PYTHONWARNINGS": "ignore",
}

_NEED_NO_MODEL = ("init", "stop")
"""Commands for ranks that were not initialised."""


class Ranks:
    """The processes under torchrun, and the socket to rank 0.

    One command runs at a time. When ranks die, the running command raises WorkerLost and torchrun
    starts them anew, at most `max_restarts` times; they then need `init` and `load` again, and
    until `init` every other command raises WorkerLost too. After WaitExpired what the ranks hold
    is unknown: close, and start others.
    """

    def __init__(self, *, num_ranks: int, max_restarts: int, grace_seconds: float = 15.0) -> None:
        self._num_ranks = num_ranks
        self._max_restarts = max_restarts
        self._grace_seconds = grace_seconds
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._connected = asyncio.Event()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._generation = 0
        self._initialised = 0
        self._busy = False

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="refit-worker-"))
        socket_path = self._directory / "worker.sock"
        self._server = await asyncio.start_unix_server(
            self._on_connect, socket_path, limit=MAX_LINE_BYTES
        )
        self._process = await asyncio.create_subprocess_exec(
            *self._command(socket_path),
            stdin=asyncio.subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """Process id of torchrun, which is also that of its group."""
        return self._process.pid

    async def wait_connected(self, *, deadline_seconds: float) -> None:
        """Wait until fresh ranks take commands.

        Raises:
            WorkerGone: torchrun gave up.
            WaitExpired: they did not come in time.
        """
        if self._connected.is_set() and self._reader.at_eof():
            self._connected.clear()
        connected = asyncio.ensure_future(self._connected.wait())
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait(
                (connected, ended),
                timeout=deadline_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            connected.cancel()
            ended.cancel()
        if self._connected.is_set():
            return
        if self._process.returncode is not None:
            raise WorkerGone(
                f"worker: torchrun ended with status {self._process.returncode}; "
                "its reason stands in the log"
            )
        raise WaitExpired(f"worker: no ranks connected within {deadline_seconds} s; see the log")

    async def stop(self, *, deadline_seconds: float) -> None:
        """Let the ranks end by themselves."""
        await self.call("stop", {}, deadline_seconds=deadline_seconds)
        async with asyncio.timeout(deadline_seconds):
            await self._process.wait()

    async def close(self) -> None:
        """End all processes, and remove the socket.

        Idle ranks end by themselves; others get SIGTERM, and SIGKILL after the grace.
        """
        try:
            await self._end_idle()
        finally:
            await self._end()
            self._server.close()
            if self._writer is not None:
                self._writer.close()
            shutil.rmtree(self._directory)

    async def _end_idle(self) -> None:
        """Stop ranks that wait for a command: torchrun prints a traceback when signalled."""
        if not self._connected.is_set() or self._busy:
            return
        with contextlib.suppress(WorkerLost, TimeoutError):
            async with asyncio.timeout(self._grace_seconds):
                await self.stop(deadline_seconds=self._grace_seconds)

    async def _end(self) -> None:
        """Signal whatever still runs until it has ended."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._process.wait()
        except TimeoutError:
            # The ranks go with torchrun: each asked the kernel to be killed when it dies.
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _command(self, socket_path: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self._num_ranks)),
            *("--max-restarts", str(self._max_restarts)),
            *("-m", "trainer_svc.megatron.worker", "--socket", str(socket_path)),
        ]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader, self._writer = reader, writer
        self._generation += 1
        self._busy = False
        self._connected.set()

    async def call(self, command: str, args: Json, *, deadline_seconds: float) -> Json:
        """Run one command; its result.

        Raises:
            WorkerLost: the ranks ended, or have no model.
            WaitExpired: they did not answer in time.
            RefitError: what the command raised.
        """
        try:
            async with asyncio.timeout(deadline_seconds), self._turn:
                return await self._exchange(command, args)
        except TimeoutError as error:
            raise WaitExpired(
                f"worker: {command} took longer than {deadline_seconds} s; restart the worker"
            ) from error

    async def _exchange(self, command: str, args: Json) -> Json:
        if not self._connected.is_set():
            raise WorkerLost(f"worker: no ranks to run {command}; wait until they are back")
        generation = self._generation
        if command not in _NEED_NO_MODEL and generation != self._initialised:
            raise WorkerLost(f"worker: new ranks cannot run {command}; init and load them first")
        if command == "init":
            self._initialised = 0
        reply = await self._request(command, args)
        if reply is None:
            if generation == self._generation:
                self._connected.clear()
            raise WorkerLost(f"worker: the ranks ended during {command}; init and load them again")
        if "error" in reply:
            raise error_from_json(reply["error"])
        if command == "init":
            self._initialised = generation
        result: Json = reply["result"]
        return result

    async def _request(self, command: str, args: Json) -> Json | None:
        """Send one command; its reply, or None when the ranks ended."""
        number = next(self._ids)
        reader, writer = self._reader, self._writer
        assert writer is not None
        self._busy = True
        try:
            writer.write(encode({"id": number, "command": command, "args": args}))
            await writer.drain()
            reply = await _reply_to(number, reader)
        except ConnectionError:
            reply = None
        self._busy = False
        return reply


async def _reply_to(number: int, reader: asyncio.StreamReader) -> Json | None:
    """The reply with this id, past those that nobody waits for any more; None at the end."""
    while line := await reader.readline():
        reply = decode(line)
        if reply["id"] == number:
            return reply
    return None
