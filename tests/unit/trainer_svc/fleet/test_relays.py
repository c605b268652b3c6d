"""Who takes bytes from whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit.v1 import rollout_pb2_grpc

from trainer_svc.fleet import Replica
from trainer_svc.fleet.lines import Line
from trainer_svc.fleet.relays import choose_parent
from trainer_svc.subscription import Parent, Subscription


@dataclass(slots=True)
class Tree:
    """Replicas as they join one after the other; addresses are ids."""

    fan_out: int
    channel: grpc.aio.Channel
    replicas: list[Replica] = field(default_factory=list)

    def join(self, name: str, *, lost: tuple[str, ...] = (), relays: bool = True) -> str:
        """The parent's id; "" is the trainer."""
        parent = choose_parent(self.replicas, fan_out=self.fan_out, lost=lost)
        self.replicas.append(
            Replica(
                id=name,
                line=Line(name, self.channel, rollout_pb2_grpc.RolloutServiceStub(self.channel)),
                subscription=Subscription(parent=parent),
                relays=relays,
            )
        )
        assert parent is None or parent.address == parent.replica_id
        return parent.replica_id if parent else ""

    def leave(self, name: str) -> None:
        self.replicas = [replica for replica in self.replicas if replica.id != name]

    def parents(self) -> dict[str, str]:
        found = {r.id: r.subscription.parent for r in self.replicas}
        return {name: parent.replica_id if parent else "" for name, parent in found.items()}


@pytest.fixture
async def tree() -> Tree:
    return Tree(2, grpc.aio.insecure_channel("nowhere:1"))


def test_sixteen_replicas_take_two_streams_of_the_trainer(tree: Tree) -> None:
    """The nearest relay with room comes first, so that the tree stays low."""
    parents = [tree.join(f"r{number}") for number in range(16)]

    assert parents == ["", "", *(f"r{number // 2}" for number in range(14))]


def test_without_a_limit_all_take_theirs_of_the_trainer(tree: Tree) -> None:
    tree.fan_out = 0
    assert {tree.join(f"r{number}") for number in range(9)} == {""}


def test_those_who_cannot_relay_get_no_children(tree: Tree) -> None:
    tree.join("plain", relays=False)
    tree.join("relay")
    assert [tree.join(f"r{number}") for number in range(3)] == ["relay", "relay", "r0"]


def test_those_who_drain_get_no_children(tree: Tree) -> None:
    tree.join("drains")
    tree.join("relay")
    tree.replicas[0].line.draining = "SIGTERM"
    assert tree.join("r2") == "relay"


def test_a_lost_parent_is_not_named_again(tree: Tree) -> None:
    tree.join("a")
    tree.join("b")
    assert tree.join("child", lost=("a",)) == "b"


def test_the_trainer_takes_over_its_limit_when_nobody_else_can(tree: Tree) -> None:
    tree.join("a")
    tree.join("b", relays=False)
    assert tree.join("child", lost=("a",)) == ""


def test_a_parent_that_comes_back_is_not_hung_under_its_own_child(tree: Tree) -> None:
    tree.fan_out = 1
    assert [tree.join(name) for name in ("a", "b", "c")] == ["", "a", "b"]
    tree.leave("a")
    assert tree.join("a") == ""


@settings(deadline=None)
@given(data=st.data(), fan_out=st.integers(1, 3))
async def test_bytes_come_from_the_trainer_in_the_end(data: st.DataObject, fan_out: int) -> None:
    """Whoever comes, leaves and comes back: no circles, and no relay over its limit."""
    tree = Tree(fan_out, grpc.aio.insecure_channel("nowhere:1"))
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.sampled_from("abcdefgh"))
        tree.leave(name)
        lost = data.draw(st.sets(st.sampled_from("abcdefgh")))
        if data.draw(st.booleans()):
            parent = tree.join(name, lost=tuple(lost), relays=data.draw(st.booleans()))
            assert parent not in lost
        parents = tree.parents()
        for start in parents:
            seen, at = set(), start
            while at in parents:
                assert at not in seen
                seen.add(at)
                at = parents[at]
        children = Counter(parent for parent in parents.values() if parent in parents)
        assert max(children.values(), default=0) <= fan_out


def test_a_parent_is_named_by_id_and_address(tree: Tree) -> None:
    tree.fan_out = 1
    tree.join("a")
    assert choose_parent(tree.replicas, fan_out=1, lost=()) == Parent("a", "a")
