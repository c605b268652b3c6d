"""A trainer in the test's process, and a caller that looks at every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from refit.v1 import trainer_pb2

from common.adapter import AdapterRef
from common.model_dir import base_model
from common.tasks import cancel
from common.wire import ref_from_proto
from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, WIDTH, Processes, ReplicaProcess
from tests.trainer_process import sized_adapter
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet import Replica
from trainer_svc.fleet.status import fleet_status
from trainer_svc.node import Node, serve_node


@dataclass(slots=True)
class Run:
    """What was published, and who serves it."""

    node: Node
    refs: dict[int, AdapterRef] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.node.server.address

    @property
    def newest(self) -> AdapterRef:
        return self.refs[max(self.refs)]

    def publish(self, *, width: int = WIDTH) -> AdapterRef:
        version = len(self.refs) + 1
        manifest, buffer = sized_adapter(self.node.base.fingerprint, seed=version, width=width)
        self.node.fleet.require(manifest)
        ref = AdapterRef(self.node.control.run_id, "default", version, manifest.digest())
        self.refs[version] = ref
        published = self.node.publisher.publish("default", manifest, buffer, version=version)
        assert published == ref
        return ref

    def member(self, process: ReplicaProcess) -> Replica | None:
        """The replica as the fleet has it."""
        return next((r for r in self.node.fleet.replicas if r.address == process.address), None)

    def status(self, process: ReplicaProcess) -> trainer_pb2.ReplicaStatus:
        return next(s for s in fleet_status(self.node.fleet) if s.address == process.address)

    def is_ready(self, process: ReplicaProcess) -> bool:
        """Whether it is READY with the newest version."""
        member = self.member(process)
        if member is None or not member.serves("default", self.newest.version):
            return False
        return self.node.fleet.state(member)[0] == trainer_pb2.REPLICA_STATE_READY

    async def ready(self, *processes: ReplicaProcess, seconds: float = SECONDS) -> None:
        """Wait until these are READY with the newest version."""
        await eventually(lambda: all(map(self.is_ready, processes)), seconds=seconds)

    async def left(self, process: ReplicaProcess, *reasons: str) -> None:
        """Wait until the fleet shows it as LOST, for one of these reasons."""
        await eventually(lambda: self.member(process) is None, seconds=SECONDS)
        status = self.status(process)
        assert status.state == trainer_pb2.REPLICA_STATE_LOST
        assert status.reason in reasons


@asynccontextmanager
async def running(processes: Processes, **settings: object) -> AsyncIterator[Run]:
    """A trainer of this process, without a version yet."""
    server = ServerSettings.model_validate({"port": 0} | settings)
    control = RunControl("run", steps_total=0)
    base = base_model(processes.model)
    async with serve_node(server, base=base, control=control, engine="") as node:
        yield Run(node)


@dataclass(slots=True)
class Answers:
    """What a replica said; `longest_gap_seconds` lies between two answers."""

    versions: list[int] = field(default_factory=list)
    longest_gap_seconds: float = 0.0


@asynccontextmanager
async def called(
    replica: ReplicaProcess,
    published: Iterable[AdapterRef],
    *,
    gap_seconds: float = 5.0,
    any_run: bool = False,
) -> AsyncIterator[Answers]:
    """Call for the latest version all the while.

    Raises where an answer is of no version that was published, or of an older one than the answer
    before, or comes `gap_seconds` late.

    Args:
        published: looked at anew for each answer.
    """
    answers = Answers()
    task = asyncio.ensure_future(_call(replica, published, answers, gap_seconds, any_run))
    try:
        yield answers
        count = len(answers.versions)
        await eventually(lambda: len(answers.versions) > count or task.done(), seconds=gap_seconds)
    finally:
        if task.done():
            task.result()
        await cancel(task)
    assert answers.longest_gap_seconds < gap_seconds


async def _call(
    replica: ReplicaProcess,
    published: Iterable[AdapterRef],
    answers: Answers,
    gap_seconds: float,
    any_run: bool,
) -> None:
    now = asyncio.get_running_loop().time
    ref = next(iter(published))
    while True:
        begun = now()
        run_id = "" if any_run else ref.run_id
        parts = await replica.generate(ref, run_id=run_id, seconds=gap_seconds)
        [made_by] = {ref_from_proto(part.adapter) for part in parts}
        assert made_by in list(published), f"{made_by} was never published"
        assert any_run or made_by.version >= max(answers.versions, default=0)
        answers.versions.append(made_by.version)
        answers.longest_gap_seconds = max(answers.longest_gap_seconds, now() - begun)
        await asyncio.sleep(0.01)
