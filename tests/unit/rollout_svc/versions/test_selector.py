from __future__ import annotations

import pytest
from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.errors import InvalidField
from rollout_svc.versions.selector import Rule, Selector, selector_from_proto

SERVED = [AdapterRef("run", "default", version, bytes(32)) for version in (1, 3, 2)]


@pytest.mark.parametrize(
    ("selector", "version"),
    [
        (Selector(Rule.LATEST, "default"), 3),
        (Selector(Rule.EXACT, "default", 2), 2),
        (Selector(Rule.EXACT, "default", 4), None),
        (Selector(Rule.AT_LEAST, "default", 2), 3),
        (Selector(Rule.AT_LEAST, "default", 4), None),
        (Selector(Rule.LATEST, "other"), None),
        (Selector(Rule.LATEST, "default", run_id="other"), None),
    ],
)
def test_a_rule_picks_one_version(selector: Selector, version: int | None) -> None:
    picked = selector.pick(SERVED)
    assert (picked.version if picked else None) == version


@pytest.mark.parametrize(
    ("msg", "field"),
    [
        ({}, "adapter.rule"),
        ({"rule": rollout_pb2.VERSION_RULE_LATEST}, "adapter.adapter"),
        ({"rule": rollout_pb2.VERSION_RULE_BASE, "adapter": "default"}, "adapter.adapter"),
        ({"rule": rollout_pb2.VERSION_RULE_EXACT, "adapter": "default"}, "adapter.version"),
        ({"rule": rollout_pb2.VERSION_RULE_AT_LEAST, "adapter": "default"}, "adapter.version"),
    ],
)
def test_a_contradiction_is_refused_by_field(msg: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: "):
        selector_from_proto(rollout_pb2.AdapterSelector(**msg))  # type: ignore[arg-type]
