"""Which version a request asks for."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.errors import InvalidField


class Rule(enum.Enum):
    """How the version of the named adapter is chosen; the value is the proto's number."""

    LATEST = rollout_pb2.VERSION_RULE_LATEST
    EXACT = rollout_pb2.VERSION_RULE_EXACT
    AT_LEAST = rollout_pb2.VERSION_RULE_AT_LEAST
    BASE = rollout_pb2.VERSION_RULE_BASE


@dataclass(frozen=True, slots=True)
class Selector:
    """`version` counts for EXACT and AT_LEAST; an empty `run_id` takes the run committed last."""

    rule: Rule
    adapter: str = ""
    version: int = 0
    run_id: str = ""

    def pick(self, served: Sequence[AdapterRef]) -> AdapterRef | None:
        """The version that answers, of those served, oldest commit first; None when none does."""
        named = [ref for ref in served if ref.adapter == self.adapter]
        run_id = self.run_id or (named[-1].run_id if named else "")
        fitting = [ref for ref in named if ref.run_id == run_id and self._accepts(ref.version)]
        return max(fitting, key=lambda ref: ref.version, default=None)

    def _accepts(self, version: int) -> bool:
        if self.rule is Rule.EXACT:
            return version == self.version
        return self.rule is Rule.LATEST or version >= self.version

    def __str__(self) -> str:
        mark = {Rule.LATEST: "latest", Rule.EXACT: self.version, Rule.AT_LEAST: f">={self.version}"}
        run = f" of run {self.run_id}" if self.run_id else ""
        return f"{self.adapter}@{mark.get(self.rule, 'base')}{run}"


def selector_from_proto(msg: rollout_pb2.AdapterSelector) -> Selector:
    """Raises `InvalidField` where the rule is missing or contradicts the other fields."""
    if msg.rule not in [rule.value for rule in Rule]:
        raise InvalidField(
            f"adapter.rule: {msg.rule}; say which weights answer: "
            f"{', '.join(f'VERSION_RULE_{rule.name}' for rule in Rule)}"
        )
    rule = Rule(msg.rule)
    if rule is Rule.BASE and (msg.adapter or msg.version):
        raise InvalidField(
            f"adapter.adapter: {msg.adapter!r} with VERSION_RULE_BASE; leave name and version out"
        )
    if rule is not Rule.BASE and not msg.adapter:
        raise InvalidField("adapter.adapter: empty; name the adapter, or use VERSION_RULE_BASE")
    if rule in (Rule.EXACT, Rule.AT_LEAST) and msg.version < 1:
        raise InvalidField(f"adapter.version: {msg.version}; versions begin at 1")
    return Selector(rule, msg.adapter, msg.version, msg.run_id)
