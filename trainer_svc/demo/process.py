"""A service as a child process: its lines read, its log kept, its end certain."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import Unavailable
from common.tasks import cancel

_TERM_GRACE_SECONDS = 60.0
_EPITAPH_LINES = 5


class Service:
    """`refit NAME --set …`, running inside the block and ended at its exit.

    async with Service("trainer", settings, log=path, announce=pattern) as trainer:
        address = await trainer.announcement(timeout_seconds=60)
    """

    def __init__(self, name: str, settings: Mapping[str, str], *, log: Path, announce: str) -> None:
        self._name = name
        self._settings = settings
        self._log = log
        self._announce = re.compile(announce)
        self._announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Service:
        sets = [part for item in self._settings.items() for part in ("--set", "=".join(item))]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "common.cli", self._name, *sets),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C reaches the demo alone, which then ends its services one after the other.
            start_new_session=True,
        )
        self._copy = asyncio.ensure_future(self._copy_lines())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(_TERM_GRACE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await cancel(self._copy)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def announcement(self, *, timeout_seconds: float) -> str:
        """What the service said in its `announce` line.

        Raises:
            Unavailable: it ended, or the time did, before such a line.
        """
        either: set[asyncio.Future[Any]] = {self._announced, self._copy}
        await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._announced.done():
            return self._announced.result()
        if self._copy.done():
            await self._process.wait()
            raise Unavailable(self.epitaph())
        raise Unavailable(f"the {self._name} was not up within {timeout_seconds:g} s")

    def epitaph(self) -> str:
        """How it ended, and its last words."""
        last = self._log.read_text(errors="replace").splitlines()[-_EPITAPH_LINES:]
        status = self._process.returncode
        return "\n".join(
            [f"the {self._name} ended (status {status}); {self._log} ends with", *last]
        )

    async def _copy_lines(self) -> None:
        assert self._process.stdout is not None, "made with a pipe"
        with self._log.open("wb", buffering=0) as log:
            async for line in self._process.stdout:
                log.write(line)
                if not self._announced.done() and (match := self._announce.match(line.decode())):
                    self._announced.set_result(match[1])
