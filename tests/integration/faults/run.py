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

_GAP_SECONDS = 5.0


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


@asynccontextmanager
async def called(
    replica: ReplicaProcess,
    published: Iterable[AdapterRef],
    *,
    any_run: bool = False,
) -> AsyncIterator[list[int]]:
    """Call for the latest version all the while, and give the versions that answered.

    Raises where an answer is of no version that was published, or of an older one than the answer
    before, or comes 5 s late.

    Args:
        published: looked at anew for each answer.
    """
    answers: list[int] = []
    task = asyncio.ensure_future(_call(replica, published, answers, any_run))
    try:
        yield answers
        count = len(answers)
        await eventually(lambda: len(answers) > count or task.done(), seconds=_GAP_SECONDS)
    finally:
        if task.done():
            task.result()
        await cancel(task)


async def _call(
    replica: ReplicaProcess,
    published: Iterable[AdapterRef],
    answers: list[int],
    any_run: bool,
) -> None:
    ref = next(iter(published))
    while True:
        run_id = "" if any_run else ref.run_id
        parts = await replica.generate(ref, run_id=run_id, seconds=_GAP_SECONDS)
        [made_by] = {ref_from_proto(part.adapter) for part in parts}
        assert made_by in list(published), f"{made_by} was never published"
        assert any_run or made_by.version >= max(answers, default=0)
        answers.append(made_by.version)
        await asyncio.sleep(0.01)
