"""Which versions stay: retired by the trainer, or by the limits of versions and slots."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.adapter import AdapterRef
from common.errors import Incompatible, QueueFull
from rollout_svc.engine import BoundReport
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.live import BASE, PRISTINE, Commits, admit

LATEST = Selector(Rule.LATEST, "default")


def ref(version: int, *, digest: bytes = b"", run_id: str = "run") -> AdapterRef:
    return AdapterRef(run_id, "default", version, digest or bytes([version % 256]) * 32)


def named(adapter: str, *, run_id: str = "run") -> AdapterRef:
    return AdapterRef(run_id, adapter, 1, (adapter + run_id).ljust(32).encode())


async def test_one_of_two_versions_is_retired_at_once(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    for version in (1, 2):
        await commit(ref(version))
    registry.retire(ref(2), source="trainer")
    assert registry.listing() == [ref(1)]
    await eventually(lambda: sorted(engine.loaded) == [1])


@pytest.mark.parametrize("newer", [ref(2), ref(1, digest=b"n" * 32, run_id="next run")])
async def test_the_only_version_stays_until_another_is_committed(
    registry: AdapterRegistry,
    engine: FakeEngine,
    commit: Commits,
    newer: AdapterRef,
) -> None:
    """faults.md 26, dynamo#8630: who retires the last version leaves the replica serving it."""
    await commit(ref(1))
    registry.retire(ref(1), source="trainer")
    assert registry.listing() == [ref(1)]
    await commit(newer)
    assert registry.listing() == [newer]
    await eventually(lambda: sorted(engine.loaded) == [2])


async def test_a_refused_update_after_a_retire_leaves_the_old_version_serving(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 26, dynamo#8630: a load that fails must not have unloaded what it replaces."""
    await commit(ref(1))
    registry.retire(ref(1), source="trainer")
    engine.answers = [BoundReport(0, 0, (), "ValueError: bad rank")]
    with pytest.raises(Incompatible):
        await commit(ref(2))
    assert registry.listing() == [ref(1)]
    async with admit(registry, LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == ref(1)
        assert sorted(engine.loaded) == [1]


async def test_another_adapters_commit_leaves_a_superseded_version(
    registry: AdapterRegistry, commit: Commits
) -> None:
    other = named("other")
    await commit(ref(1))
    registry.retire(ref(1), source="trainer")
    await commit(other)
    assert registry.listing() == [ref(1), other]


async def test_a_superseded_version_that_is_sent_again_counts_as_new(
    registry: AdapterRegistry, commit: Commits
) -> None:
    await commit(ref(1))
    registry.retire(ref(1), source="trainer")
    assert (await commit(ref(1))).reports == []
    await commit(ref(2))
    assert registry.listing() == [ref(1), ref(2)]


async def test_hundreds_of_versions_level_off(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 27, AReaL#1385: slots and directories stay two, and no id is used again."""
    for version in range(1, 301):
        await commit(ref(version))
    await eventually(lambda: len(registry.versions.all) == 2)
    assert registry.listing() == [ref(299), ref(300)]
    assert sorted(engine.loaded) == [299, 300]
    await eventually(lambda: sum(path.exists() for path in commit.paths) == 2)


async def test_two_trainers_keep_their_versions_apart(tmp_path: Path) -> None:
    """One trainer's versions neither push out the other's nor retire them."""
    engine = FakeEngine(slots=6)
    registry = AdapterRegistry(
        engine=engine, base=BASE, pristine=PRISTINE, slots=6, keep_versions=2, slot_wait_seconds=1
    )
    commit = Commits(registry, tmp_path)
    others = [ref(n, run_id="b") for n in (1, 2, 3)]
    for version in (1, 2, 3):
        await commit(ref(version), source="a:1")
        await commit(ref(version, run_id="b"), source="b:1")
    assert registry.listing(source="a:1") == [ref(2), ref(3)]
    assert registry.listing(source="b:1") == others[1:]
    assert registry.listing() == [ref(2), others[1], ref(3), others[2]]
    registry.retire(others[1], source="a:1")
    assert registry.listing(source="b:1") == others[1:]


async def test_a_new_runs_first_version_leaves_the_old_ones_until_they_are_retired(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """A trainer sends the new version first, and then retires what its run does not have."""
    await commit(named("default", run_id="old"))
    async with admit(registry, LATEST, wait_seconds=1) as pinned:
        assert pinned is not None
        await commit(named("other", run_id="new"))
        assert registry.listing() == [named("default", run_id="old"), named("other", run_id="new")]
        registry.retire(named("default", run_id="old"), source="trainer")
        assert registry.listing() == [named("other", run_id="new")]
        await asyncio.sleep(0.01)
        assert sorted(engine.loaded) == [1, 2]
    await eventually(lambda: sorted(engine.loaded) == [2])


async def test_an_old_runs_adapters_make_room_for_the_new_runs(
    registry: AdapterRegistry, commit: Commits
) -> None:
    """With every slot taken by the old run, the new one must not be refused for ever."""
    old = [named("a", run_id="old"), named("b", run_id="old")]
    for version in old:
        await commit(version)
    await commit(named("c", run_id="new"))
    assert registry.listing() == [old[1], named("c", run_id="new")]


async def test_adapters_beyond_the_slots_change_places(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """The one that nobody has used for the longest makes room, and comes back when asked for."""
    for name in "abcd":
        await commit(named(name))
    assert registry.listing() == [named(name) for name in "abcd"]
    assert sorted(engine.loaded) == [2, 3, 4]
    async with (
        admit(registry, Selector(Rule.LATEST, "a"), wait_seconds=1),
        admit(registry, Selector(Rule.LATEST, "d"), wait_seconds=1),
    ):
        assert sorted(engine.loaded) == [1, 4]
        with pytest.raises(QueueFull, match="running requests used all 2 slots"):
            async with admit(registry, Selector(Rule.LATEST, "b"), wait_seconds=0.01):
                pass
        await commit(named("e"))
        assert sorted(engine.loaded) == [1, 4, 5]
    async with admit(registry, Selector(Rule.LATEST, "b"), wait_seconds=1) as live:
        assert live is not None
        assert (live.ref, engine.loaded[2].path) == (named("b"), commit.paths[1])
    assert [path.exists() for path in commit.paths] == [True] * 5


async def test_an_alias_takes_no_slot_and_so_makes_nothing_go(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    await commit(ref(1))
    await commit(ref(2))
    alias = AdapterRef("run", "old", 1, ref(1).digest)
    await registry.alias(alias, source="trainer")
    assert registry.listing() == [ref(1), ref(2), alias]
    await commit(ref(3))
    assert registry.listing() == [ref(2), alias, ref(3)]
    assert sorted(engine.loaded) == [1, 2, 3]
