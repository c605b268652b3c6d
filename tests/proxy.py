"""A cable between two services that can be slow, cut, dead for a while, or change bytes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from common.tasks import cancel

_READ_BYTES = 64 << 10
_READS_A_SECOND = 50


class Proxy:
    """Forwards TCP connections to `target`, a host:port.

        async with Proxy(trainer.address) as proxy:
            ...  # connect to proxy.address
            proxy.hang()

    `bytes_per_second` limits what comes from the target, None does not; `passed_bytes` counts it.
    """

    def __init__(self, target: str, *, bytes_per_second: float | None = None) -> None:
        self.target = target
        self.bytes_per_second = bytes_per_second
        self.passed_bytes = 0
        self.damaged = asyncio.Event()
        """Set once `corrupt` or `flip_after` has changed a byte."""

        self._needles: tuple[bytes, ...] = ()
        self._flip_at: int | None = None
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Proxy:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._stack.push_async_callback(server.wait_closed)
        self._stack.callback(server.close)
        self._stack.push_async_callback(self._end)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def hang(self) -> None:
        """Nothing passes any more, and no connection ends: a cable that was pulled out."""
        self._forwards.clear()

    def heal(self) -> None:
        """Forward again, what came meanwhile first."""
        self._forwards.set()

    def cut(self) -> None:
        """Reset every connection; new ones work."""
        for writer in self._writers:
            writer.transport.abort()

    def corrupt(self, *needles: bytes) -> None:
        """Change a byte of the first of these that is found in what comes from the target."""
        self.damaged.clear()
        self._needles = needles

    def flip_after(self, count_bytes: int) -> None:
        """Change the byte that comes from the target after so many more."""
        self.damaged.clear()
        self._flip_at = self.passed_bytes + count_bytes

    async def _end(self) -> None:
        self.cut()
        await cancel(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._forwards.wait()
            await self._connect(reader, writer)
        except OSError:
            # The target is not there, or one side reset the connection: the other is told the same.
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        self._writers.add(upstream_writer)
        up = asyncio.ensure_future(self._to_target(reader, upstream_writer))
        down = asyncio.ensure_future(self._from_target(upstream_reader, writer))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(up, down)
            upstream_writer.transport.abort()
            self._writers.discard(upstream_writer)

    async def _to_target(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self._forwards.wait()
            writer.write(data)
            await writer.drain()

    async def _from_target(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(self._read_bytes()):
            if self.bytes_per_second:
                await asyncio.sleep(len(data) / self.bytes_per_second)
            await self._forwards.wait()
            writer.write(self._passed(data))
            await writer.drain()

    def _read_bytes(self) -> int:
        if self.bytes_per_second is None:
            return _READ_BYTES
        return max(1, min(_READ_BYTES, int(self.bytes_per_second / _READS_A_SECOND)))

    def _passed(self, data: bytes) -> bytes:
        """`data` as it goes on, damaged where that was asked for."""
        begin = self.passed_bytes
        self.passed_bytes += len(data)
        at = max((data.find(needle) for needle in self._needles), default=-1)
        if self._flip_at is not None and self._flip_at < self.passed_bytes:
            at = self._flip_at - begin
        if at < 0:
            return data
        self._needles, self._flip_at = (), None
        self.damaged.set()
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
