"""Trainer and replica processes, seen and ended from a test."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from refit.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc

from common.adapter import AdapterRef
from common.grpc_server import connect
from common.model_dir import base_model
from common.signal import Signal
from common.tasks import cancel
from common.wire import ref_from_proto
from tests.integration.services import START_SECONDS
from tests.trainer_process import sized_adapter

SECONDS = 20.0
WIDTH = 32_768
"""2 MiB of tensors."""


@dataclass(slots=True, eq=False)
class Process:
    """A child that said where it listens."""

    process: asyncio.subprocess.Process
    address: str
    channel: grpc.aio.Channel
    lines: list[str]
    changed: Signal

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def said(self, text: str, *, times: int = 1) -> None:
        """Wait until it has printed a text so often."""
        found = await self.changed.wait_until(
            lambda: sum(text in line for line in self.lines) >= times, timeout_seconds=SECONDS
        )
        assert found, f"{text!r} not among {self.lines}"

    async def kill(self) -> None:
        """SIGKILL, which takes it and whoever has its output along."""
        self.process.kill()
        await asyncio.wait_for(self.process.wait(), SECONDS)

    def stop(self) -> None:
        """Freeze it, as a machine that hangs."""
        os.kill(self.process.pid, signal.SIGSTOP)


class ReplicaProcess(Process):
    """`tests.replica_process`."""

    @property
    def stub(self) -> rollout_pb2_grpc.RolloutServiceStub:
        return rollout_pb2_grpc.RolloutServiceStub(self.channel)

    async def listing(self) -> list[AdapterRef]:
        request = rollout_pb2.RolloutServiceListAdaptersRequest()
        response = await self.stub.ListAdapters(request, timeout=SECONDS)
        return [ref_from_proto(ref) for ref in response.adapters]

    async def serves(self, ref: AdapterRef, *, seconds: float = SECONDS) -> None:
        """Wait until a request that wants this version or a newer one is answered by it."""
        parts = await self.generate(ref, rollout_pb2.VERSION_RULE_AT_LEAST, seconds=seconds)
        assert {ref_from_proto(part.adapter) for part in parts} == {ref}

    async def generate(
        self,
        ref: AdapterRef,
        rule: rollout_pb2.VersionRule = rollout_pb2.VERSION_RULE_LATEST,
        *,
        run_id: str | None = None,
        max_tokens: int = 2,
        seconds: float = SECONDS,
    ) -> list[rollout_pb2.GenerateResponse]:
        request = rollout_pb2.GenerateRequest(
            token_ids=rollout_pb2.TokenIds(ids=[5, 6, 7]),
            sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens),
            adapter=rollout_pb2.AdapterSelector(
                run_id=ref.run_id if run_id is None else run_id,
                adapter=ref.adapter,
                rule=rule,
                version=ref.version if rule != rollout_pb2.VERSION_RULE_LATEST else 0,
            ),
        )
        return [part async for part in self.stub.Generate(request, timeout=seconds)]


class TrainerProcess(Process):
    """`tests.trainer_process`."""

    run_id: str
    fingerprint: str
    published: list[AdapterRef]

    async def publish(
        self, version: int, *, seed: int | None = None, width: int = WIDTH
    ) -> AdapterRef:
        """Have it publish; the digest is known here, so that its word for it is not needed."""
        seed = version if seed is None else seed
        manifest, _ = sized_adapter(self.fingerprint, seed=seed, width=width)
        ref = AdapterRef(self.run_id, "default", version, manifest.digest())
        self.published.append(ref)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version} {seed} {width}\n".encode())
        await self.process.stdin.drain()
        return ref

    async def status(self) -> Sequence[trainer_pb2.ReplicaStatus]:
        stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)
        response = await stub.GetStatus(
            trainer_pb2.GetStatusRequest(), timeout=SECONDS, wait_for_ready=True
        )
        return list(response.replicas)

    async def shows(self, states: Sequence[tuple[str, str]], *, seconds: float = SECONDS) -> None:
        """Wait until the replicas are in these states, for reasons that contain these texts."""
        found: Any = None
        try:
            async with asyncio.timeout(seconds):
                while not _agree(found := _states(await self.status()), states):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{found} instead of {states}") from None


def _states(status: Sequence[trainer_pb2.ReplicaStatus]) -> list[tuple[str, str]]:
    prefix = "REPLICA_STATE_"
    return sorted(
        (trainer_pb2.ReplicaState.Name(r.state).removeprefix(prefix), r.reason) for r in status
    )


def _agree(found: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> bool:
    pairs = zip(found, sorted(expected), strict=False)
    return len(found) == len(expected) and all(
        state == wanted and text in reason for (state, reason), (wanted, text) in pairs
    )


@dataclass(slots=True)
class Processes:
    """Starts them; what still runs at the end is killed."""

    model: Path
    root: Path
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def fingerprint(self) -> str:
        return base_model(self.model).fingerprint

    def log(self, name: str) -> str:
        """What the processes of a kind, "trainer" or "replica", logged so far."""
        return (self.root / f"{name}.log").read_text()

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def replica(
        self,
        trainer: str,
        *settings: str,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> ReplicaProcess:
        """A replica that follows a trainer; `prefix` is a command that starts it."""
        arguments = (
            f"model={self.model}",
            f"staging_dir={self.staging}",
            f"trainer_address={trainer}",
            *settings,
        )
        command = (*prefix, sys.executable, "-m", "tests.replica_process", *arguments)
        return ReplicaProcess(*await self._start(command, "replica", env))

    async def trainer(
        self, *settings: str, run_id: str = "run", env: dict[str, str] | None = None
    ) -> TrainerProcess:
        arguments = ("port=0", f"model={self.model}", f"run_id={run_id}", *settings)
        command = (sys.executable, "-m", "tests.trainer_process", *arguments)
        trainer = TrainerProcess(*await self._start(command, "trainer", env))
        trainer.run_id, trainer.fingerprint = run_id, self.fingerprint
        trainer.published = []
        return trainer

    async def refit(self, *arguments: str, name: str) -> Process:
        """`refit ARGUMENTS`, with a real engine."""
        command = (sys.executable, "-m", "common.cli", *arguments)
        return Process(*await self._start(command, name, None))

    async def _start(
        self, command: Sequence[str], name: str, env: dict[str, str] | None
    ) -> tuple[asyncio.subprocess.Process, str, grpc.aio.Channel, list[str], Signal]:
        with (self.root / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | (env or {}),
            )
        lines: list[str] = []
        changed = Signal()
        reader = asyncio.ensure_future(_read(process, lines, changed))
        self._stack.push_async_callback(_end, process, reader)
        there = await changed.wait_until(
            lambda: any("listening on" in line for line in lines) or reader.done(),
            timeout_seconds=START_SECONDS,
        )
        assert there and lines, self.log(name)[-3000:]
        address = next(line for line in lines if "listening on" in line).split()[-1]
        channel = connect(address)
        self._stack.push_async_callback(channel.close)
        return process, address, channel, lines, changed


async def _read(process: asyncio.subprocess.Process, lines: list[str], changed: Signal) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        lines.append(line.decode())
        changed.notify()
    changed.notify()


async def _end(process: asyncio.subprocess.Process, reader: asyncio.Future[None]) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    await cancel(reader)


def staged(staging: Path) -> list[int]:
    """PEFT directories, half ones too, in each replica's folder."""
    folders = [path for path in staging.iterdir() if path.is_dir()]
    return sorted(sum(1 for _ in folder.glob("*/*")) for folder in folders)
