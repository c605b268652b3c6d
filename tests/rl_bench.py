"""A GRPO loop over replicas, ranks and a publisher that do as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef, Canary, Manifest
from common.errors import AdapterNotFound
from common.grpc_server import Context, GrpcServer
from common.model_dir import BaseModel
from common.peft_dir import PeftAdapter
from common.rules import Rules
from common.wire import ref_to_proto
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.fake_fleet import FakeFleet, FakeReplica, fake_fleet
from trainer_svc.config import TrainerConfig
from trainer_svc.control import RunControl
from trainer_svc.fleet import Fleet
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.node import Node
from trainer_svc.publisher import Publisher
from trainer_svc.rl.loop import GrpoLoop, Parts
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.records import Records, read_rows
from trainer_svc.run_dir import RunDir


class Servicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers at the newest version of its replica, which every log-probability names."""

    def __init__(self) -> None:
        self.replica: FakeReplica
        self.requests: list[str] = []
        self.answered = 0

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.requests.append(request.request_id.split("-", 1)[1])
        _, ref = max(self.replica.committed.items(), key=lambda item: item[0][1])
        if ref.version < request.adapter.version:
            raise AdapterNotFound(f"{ref}")
        for index in range(request.n):
            yield rollout_pb2.GenerateResponse(
                index=index,
                token_ids=[index],
                logprobs=[-ref.version],
                adapter=ref_to_proto(ref),
                finish_reason=rollout_pb2.FINISH_REASON_STOP,
            )
        self.answered += 1


async def _at_once(step: int) -> None: ...


@dataclass
class Ranks:
    """A worker that trains nothing; `before_step` may wait or fail, `trained` is what it saw."""

    before_step: Callable[[int], Awaitable[None]] = _at_once
    trained: list[list[int]] = field(default_factory=list)
    settings: list[WorkerSettings] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    averages: list[tuple[str, float, int]] = field(default_factory=list)
    """Adapter, decay and steps done, of each time it followed."""

    async def wait_connected(self, *, deadline_seconds: float) -> None: ...
    async def load(self, path: Path, *, deadline_seconds: float) -> None: ...

    async def add_adapter(self, name: str, *, deadline_seconds: float) -> None:
        self.adapters.append(name)

    async def ema_update_adapter(
        self, *, target: str, decay: float, deadline_seconds: float
    ) -> None:
        self.averages.append((target, decay, len(self.trained)))

    async def init(self, settings: WorkerSettings, *, deadline_seconds: float) -> None:
        self.settings.append(settings)

    async def save(self, path: Path, *, state: object, deadline_seconds: float) -> None:
        path.mkdir(parents=True)

    async def logprobs(self, batch: Batch, *, deadline_seconds: float) -> list[list[float]]:
        return [[-1.0] * len(sample.completion_ids) for sample in batch.samples]

    async def step(self, batch: Batch, *, deadline_seconds: float) -> dict[str, float]:
        await self.before_step(len(self.trained) + 1)
        self.trained.append([-int(sample.rollout_logprobs[0]) for sample in batch.samples])
        return {"loss": 0.5, "tokens": 4.0, "seconds": 0.1}


class Source:
    async def read(self) -> PeftAdapter:
        return PeftAdapter(*make_adapter())


class Encoder:
    def encode(self, example: dict[str, Any]) -> list[int]:
        return [example["number"], 1]


class Server:
    async def set_serving(self, service: str, serving: bool) -> None: ...


@dataclass
class FakePublisher:
    """`commits(replica, version)` says who takes a version of the policy at once."""

    run_id: str
    fleet: FakeFleet
    commits: Callable[[str, int], bool]
    canaries: list[Canary | None] = field(default_factory=list)
    sides: list[tuple[str, int]] = field(default_factory=list)
    """Other adapters than the policy, and their versions."""

    rules: list[Rules] = field(default_factory=list)

    def publish(
        self,
        adapter: str,
        manifest: Manifest,
        buffer: memoryview,
        *,
        version: int,
        canary: Canary | None = None,
        rules: Rules = Rules(),  # noqa: B008 - frozen
    ) -> AdapterRef:
        self.rules.append(rules)
        ref = AdapterRef(self.run_id, adapter, version, manifest.digest())
        if adapter != "default":
            self.sides.append((adapter, version))
            return ref
        self.canaries.append(canary)
        for replica in self.fleet.replicas:
            if self.commits(replica.id, version):
                replica.committed[adapter, version] = ref
        self.fleet.changed.notify()
        return ref


@dataclass
class Run:
    """What a run did."""

    rows: list[dict[str, Any]]
    trained: list[list[int]]
    requests: list[list[str]]
    publisher: FakePublisher
    node: Node

    @property
    def ids(self) -> list[list[str]]:
        """Request ids without the run's, each replica's in order of name."""
        return [sorted(ids) for ids in self.requests]

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows]


def _always(replica: str, version: int) -> bool:
    return True


@dataclass
class Bench:
    """One run of a loop over fake parts; two prompts a step, two completions each."""

    path: Path
    replicas: int = 1
    ranks: Ranks = field(default_factory=Ranks)
    commits: Callable[[str, int], bool] = _always
    lessons: Sequence[Sample] = ()
    steps: int = 0
    servicers: list[Servicer] = field(default_factory=list)
    make_servicer: Callable[[], Servicer] = Servicer
    top: dict[str, Any] = field(default_factory=dict)
    """Keys of the configuration outside `rl`."""

    async def ahead(self, step: int, *, earlier: int = 0) -> None:
        """Before a step trains: wait until all there is to generate meanwhile was."""
        answers = earlier + 2 * min(step + 1, self.steps)
        await eventually(lambda: sum(s.answered for s in self.servicers) >= answers)

    async def run(self, *, sides: Sequence[str] = (), **rl: Any) -> Run:
        self.steps = rl["steps"]
        if rl.get("async_steps") and self.ranks.before_step is _at_once:
            self.ranks.before_step = self.ahead
        self.servicers = [self.make_servicer() for _ in range(self.replicas)]
        async with fake_fleet(*self.servicers) as fleet:
            for servicer, replica in zip(self.servicers, fleet.replicas, strict=True):
                servicer.replica = replica
            self.fleet = fleet
            with contextlib.ExitStack() as stack:
                parts = self._parts(stack, sides)
                await GrpoLoop(self._config(rl), parts).train()
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not [task for task in left if "GroupMaker" in repr(task)]
        return Run(
            read_rows(self.path / "metrics.jsonl"),
            self.ranks.trained,
            [servicer.requests for servicer in self.servicers],
            cast(FakePublisher, parts.node.publisher),
            parts.node,
        )

    def _config(self, rl: dict[str, Any]) -> TrainerConfig:
        values = {"data": "d", "reward": "r", "prompts_per_step": 2, "group_size": 2, **rl}
        given = {"model": "m", "run_dir": self.path, "rl": values, **self.top}
        return TrainerConfig.model_validate(given)

    def _parts(self, stack: contextlib.ExitStack, sides: Sequence[str]) -> Parts:
        run_dir = stack.enter_context(
            contextlib.closing(RunDir.create(self.path, base_fingerprint="f"))
        )
        records = stack.enter_context(contextlib.closing(Records(self.path)))
        node = Node(
            BaseModel("m", "f"),
            RunControl(run_dir.run_id, steps_total=self.steps),
            cast(Publisher, FakePublisher(run_dir.run_id, self.fleet, self.commits)),
            cast(Fleet, self.fleet),
            cast(GrpcServer, Server()),
        )
        return Parts(
            run_dir=run_dir,
            node=node,
            worker=cast(MegatronWorker, self.ranks),
            source=Source(),
            side_sources={name: Source() for name in sides},
            examples=_numbers,
            reward=lambda example, text: 0.0,
            encoder=cast(PromptEncoder, Encoder()),
            records=records,
            lessons=self.lessons,
        )


def _numbers(start: int) -> Iterator[dict[str, Any]]:
    return ({"number": number} for number in itertools.count(start))
