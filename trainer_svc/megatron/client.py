"""The service's end of the Megatron ranks: starts them, sends commands; imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from common.adapter import Dtype, Manifest
from common.errors import WaitExpired, WorkerGone, WorkerLost
from trainer_svc.megatron.protocol import (
    MAX_LINE_BYTES,
    Batch,
    Json,
    decode,
    encode,
    error_from_json,
    manifest_from_json,
)
from trainer_svc.megatron.settings import WorkerSettings

_ENVIRONMENT = {
    # Threads that wait for each other sleep; spinning, they would take a neighbour's cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Megatron-core warns at every import of what is not installed; the log is for the run.
    "PYTHONWARNINGS": "ignore",
}

_NEED_NO_MODEL = ("init", "stop")
"""Commands for ranks that were not initialised."""


class MegatronWorker:
    """The ranks of one machine under torchrun.

        async with MegatronWorker(num_ranks=1, max_restarts=3) as worker:
            await worker.init(settings, deadline_seconds=300)
            metrics = await worker.step(batch, deadline_seconds=600)

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

    async def __aenter__(self) -> MegatronWorker:
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    async def init(self, settings: WorkerSettings, *, deadline_seconds: float) -> None:
        """Build model, adapter and optimizer; drops what the ranks held.

        Raises:
            ConfigError, Incompatible: the settings do not fit the model, adapter or ranks.
        """
        args = {"settings": settings.model_dump(mode="json")}
        self._initialised = 0
        await self._call("init", args, deadline_seconds=deadline_seconds)

    async def step(self, batch: Batch, *, deadline_seconds: float) -> dict[str, float]:
        """One policy update; its metrics (see `MegatronTrainer.step`)."""
        args = {"batch": batch.to_json()}
        return await self._call("step", args, deadline_seconds=deadline_seconds)

    async def logprobs(self, batch: Batch, *, deadline_seconds: float) -> list[list[float]]:
        """Log-probability of every completion token under the trainer's policy."""
        args = {"batch": batch.to_json()}
        reply = await self._call("logprobs", args, deadline_seconds=deadline_seconds)
        values: list[list[float]] = reply["logprobs"]
        return values

    async def export(
        self,
        path: Path,
        *,
        base_fingerprint: str,
        deadline_seconds: float,
        dtype: Dtype | None = None,
        adapter: str = "default",
        merged: bool = False,
    ) -> Manifest:
        """Have the adapter's flat buffer written to `path`; None keeps the adapter's own type.

        With `merged` it is the whole model's, the adapter in its weights and in their type.

        Raises:
            StagingFull: no room for it.
        """
        args = {
            "path": str(path),
            "base_fingerprint": base_fingerprint,
            "dtype": dtype.value if dtype else None,
            "adapter": adapter,
            "merged": merged,
        }
        reply = await self._call("export", args, deadline_seconds=deadline_seconds)
        return manifest_from_json(reply["manifest"])

    async def add_adapter(self, name: str, *, deadline_seconds: float) -> None:
        """Add an adapter that is a copy of the one that trains.

        Raises:
            AlreadyExists: the name is taken.
        """
        await self._call("add_adapter", {"name": name}, deadline_seconds=deadline_seconds)

    async def ema_update_adapter(
        self, *, target: str, decay: float, deadline_seconds: float
    ) -> None:
        """target = decay * target + (1 - decay) * the adapter that trains.

        Raises:
            AdapterNotFound, InvalidField: there is no such adapter, or `decay` is not in [0, 1].
        """
        args = {"target": target, "decay": decay}
        await self._call("ema_update_adapter", args, deadline_seconds=deadline_seconds)

    async def save(self, path: Path, *, state: Mapping[str, Any], deadline_seconds: float) -> None:
        """Write a checkpoint directory, whole or not at all; `state` is plain JSON values.

        Raises:
            CheckpointFailed: a rank could not write; what lay under `path` still does.
        """
        args = {"path": str(path), "state": dict(state)}
        await self._call("save", args, deadline_seconds=deadline_seconds)

    async def load(self, path: Path, *, deadline_seconds: float) -> Json:
        """Go on from a checkpoint; the `state` it was saved with.

        Raises:
            ConfigError: no whole checkpoint lies there.
            Incompatible: its adapter is not that of the settings.
        """
        reply = await self._call("load", {"path": str(path)}, deadline_seconds=deadline_seconds)
        state: Json = reply["state"]
        return state

    async def stop(self, *, deadline_seconds: float) -> None:
        """Let the ranks end by themselves."""
        await self._call("stop", {}, deadline_seconds=deadline_seconds)
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

    async def _call(self, command: str, args: Json, *, deadline_seconds: float) -> Json:
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
