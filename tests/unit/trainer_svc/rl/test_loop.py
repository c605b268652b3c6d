"""The loop over replicas that lag, answer late or come back: which samples train which step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef, Canary, Manifest
from common.errors import AdapterNotFound, WorkerLost
from common.grpc_server import Context, GrpcServer
from common.model_dir import BaseModel
from common.peft_dir import PeftAdapter
from common.wire import ref_to_proto
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.fake_fleet import FakeFleet, FakeReplica, fake_fleet
from trainer_svc.config import TrainerConfig
from trainer_svc.control import RunControl
from trainer_svc.fleet import Fleet
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch
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

    async def wait_connected(self, *, deadline_seconds: float) -> None: ...
    async def init(self, settings: object, *, deadline_seconds: float) -> None: ...
    async def load(self, path: Path, *, deadline_seconds: float) -> None: ...

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
    """`commits(replica, version)` says who takes a version at once."""

    run_id: str
    fleet: FakeFleet
    commits: Callable[[str, int], bool]
    canaries: list[Canary | None] = field(default_factory=list)

    def publish(
        self,
        adapter: str,
        manifest: Manifest,
        buffer: memoryview,
        *,
        version: int,
        canary: Canary | None = None,
    ) -> AdapterRef:
        ref = AdapterRef(self.run_id, adapter, version, manifest.digest())
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
    steps: int = 0
    servicers: list[Servicer] = field(default_factory=list)

    async def ahead(self, step: int, *, earlier: int = 0) -> None:
        """Before a step trains: wait until all there is to generate meanwhile was."""
        answers = earlier + 2 * min(step + 1, self.steps)
        await eventually(lambda: sum(s.answered for s in self.servicers) >= answers)

    async def run(self, **rl: Any) -> Run:
        self.steps = rl["steps"]
        if rl.get("async_steps") and self.ranks.before_step is _at_once:
            self.ranks.before_step = self.ahead
        self.servicers = [Servicer() for _ in range(self.replicas)]
        async with fake_fleet(*self.servicers) as fleet:
            for servicer, replica in zip(self.servicers, fleet.replicas, strict=True):
                servicer.replica = replica
            self.fleet = fleet
            with contextlib.ExitStack() as stack:
                parts = self._parts(stack)
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
        return TrainerConfig.model_validate({"model": "m", "run_dir": self.path, "rl": values})

    def _parts(self, stack: contextlib.ExitStack) -> Parts:
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
            examples=_numbers,
            reward=lambda example, text: 0.0,
            encoder=cast(PromptEncoder, Encoder()),
            records=records,
        )


def _numbers(start: int) -> Iterator[dict[str, Any]]:
    return ({"number": number} for number in itertools.count(start))


async def test_in_turns_every_sample_is_of_the_version_that_trains(tmp_path: Path) -> None:
    """faults.md 24, SkyRL#2035: one request a (run, step, prompt)."""
    run = await Bench(tmp_path).run(steps=3)

    assert run.trained == [[1] * 4, [2] * 4, [3] * 4]
    assert run.column("staleness") == [{"0": 4}] * 3
    assert run.column("version") == [2, 3, 4]
    assert run.column("samples_stale") == run.column("hedged") == [0, 0, 0]
    assert run.ids == [["1-0-v1", "1-1-v1", "2-0-v2", "2-1-v2", "3-0-v3", "3-1-v3"]]
    assert run.publisher.canaries == [None] * 4
    buckets = run.node.control.gauges.registry
    assert buckets.get_sample_value("refit_trainer_sample_staleness_bucket", {"le": "0.0"}) == 12


async def test_a_step_is_generated_while_the_one_before_trains(tmp_path: Path) -> None:
    """Training waits here for the next step's prompts; taking turns, that would be for ever."""

    bench = Bench(tmp_path)
    run = await bench.run(steps=3, async_steps=1, max_staleness=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 4}]
    assert run.column("staleness_max") == [0, 1, 1]
    assert run.trained == [[1] * 4, [1] * 4, [2] * 4]
    assert run.ids == [["1-0-v1", "1-1-v1", "2-0-v1", "2-1-v1", "3-0-v2", "3-1-v2"]]
    assert bench.fleet.max_staleness == 1


def _r1_stays_at_1(replica: str, version: int) -> bool:
    return replica == "r0" or version == 1


async def test_wait_keeps_prompts_from_a_replica_that_is_too_far_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=3, max_staleness=1)

    assert run.column("staleness") == [{"0": 4}, {"0": 2, "1": 2}, {"0": 4}]
    assert run.column("samples_stale") == [0, 0, 0]
    assert len(run.requests[1]) == 2


async def test_drop_throws_away_what_became_too_old(tmp_path: Path) -> None:
    """Step 3 is asked for at version 2, of r1 at 1 as well; it trains at 3."""
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=4, stale="drop", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 2}, {"1": 4}]
    assert run.column("samples_stale") == [0, 0, 2, 0]
    assert run.column("samples") == [4, 4, 2, 4]
    assert run.trained[2] == [2, 2]


async def test_wait_would_not_have_asked_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=4, stale="wait", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 4}, {"1": 4}]
    assert run.column("samples_stale") == [0, 0, 0, 0]


async def test_a_step_whose_samples_are_all_too_old_is_sampled_again(tmp_path: Path) -> None:
    """The same prompts, under other ids: r1 alone takes prompts until version 3 is out."""

    def commits(replica: str, version: int) -> bool:
        r0 = bench.fleet.replicas[0]
        r0.takes_prompts = version >= 3
        return replica == "r0" or version == 1

    bench = Bench(tmp_path, replicas=2, commits=commits)
    run = await bench.run(steps=3, stale="drop", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"0": 4}]
    assert run.column("samples_stale") == [0, 0, 4]
    assert run.trained[2] == [3] * 4
    assert run.ids[1][-2:] == ["3-0-v1", "3-1-v1"]
    assert run.ids[0] == ["3-0-v3", "3-1-v3"]


async def test_what_was_sampled_before_a_restart_trains_nothing(tmp_path: Path) -> None:
    """Step 2 dies after step 3 was sampled at version 2; the checkpoint is published as 3."""
    lost: list[int] = []

    async def die_once(step: int) -> None:
        await bench.ahead(step, earlier=4 if lost else 0)
        if step == 2 and not lost:
            lost.append(step)
            raise WorkerLost("ranks ended")

    bench = Bench(tmp_path, ranks=Ranks(die_once))
    run = await bench.run(steps=3, async_steps=1, max_staleness=1, checkpoint_every_steps=1)

    assert run.column("step") == [1, 2, 3]
    assert run.column("version") == [2, 4, 5]
    assert run.trained == [[1] * 4, [3] * 4, [3] * 4]
    assert run.column("staleness") == [{"0": 4}, {"0": 4}, {"1": 4}]
    assert run.ids == [
        [
            *("1-0-v1", "1-1-v1", "2-0-v1", "2-0-v3", "2-1-v1", "2-1-v3"),
            *("3-0-v2", "3-0-v3", "3-1-v2", "3-1-v3"),
        ]
    ]


async def test_every_version_carries_the_canary(tmp_path: Path) -> None:
    run = await Bench(tmp_path).run(steps=2, canary_prompts=2)

    assert [canary.sequences[1].token_ids for canary in run.publisher.canaries if canary] == [
        (1, 1)
    ] * 3
    assert all(seconds >= 0 for seconds in run.column("canary_seconds"))


@pytest.mark.parametrize("key", ["wire_bytes", "canary_difference"])
async def test_the_row_shows_the_slowest_replica(tmp_path: Path, key: str) -> None:
    def commits(replica: str, version: int) -> bool:
        slow = bench.fleet.replicas[1]
        slow.timings.wire_seconds, slow.wire_bytes, slow.canary_difference = 3.0, 77, 0.125
        return True

    bench = Bench(tmp_path, replicas=2, commits=commits)
    run = await bench.run(steps=1)
    assert run.rows[0][key] == {"wire_bytes": 77, "canary_difference": 0.125}[key]
