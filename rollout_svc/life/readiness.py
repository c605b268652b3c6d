"""Whether this replica's services are ready for traffic, as its health and its metrics tell."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.grpc_server import GrpcServer
from rollout_svc.metrics import Metrics


class Condition(enum.Enum):
    """What a service may need; the value is the replica's state where this is the first to lack."""

    ENGINE = "starting"
    """The engine answers, with all that it was given."""

    AWAKE = "asleep"
    ADAPTER = "empty"
    """A version was committed, or none is waited for."""


@dataclass(slots=True)
class Readiness:
    """Services are SERVING while all their conditions are met; all but AWAKE begin as lost."""

    metrics: Metrics
    needs: Mapping[str, frozenset[Condition]]
    _server: GrpcServer | None = None
    _met: set[Condition] = field(default_factory=lambda: {Condition.AWAKE})

    async def show_at(self, server: GrpcServer) -> None:
        """Have this server's health tell."""
        self._server = server
        await self._tell()

    async def gain(self, condition: Condition) -> None:
        self._met.add(condition)
        await self._tell()

    async def lose(self, condition: Condition) -> None:
        self._met.discard(condition)
        await self._tell()

    async def _tell(self) -> None:
        lacking = [condition.value for condition in Condition if condition not in self._met]
        self.metrics.state.state(lacking[0] if lacking else "serving")
        if self._server is not None:
            for service, needs in self.needs.items():
                await self._server.set_serving(service, needs <= self._met)
