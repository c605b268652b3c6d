"""The registry: commit, choose, pin, retire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from common.adapter import AdapterRef
from common.errors import AdapterNotFound, AlreadyExists, Incompatible, Unavailable, WaitExpired
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.engine import BoundReport, EngineAdapter, EngineDead
from rollout_svc.selector import Rule, Selector
from tests.eventually import eventually
from tests.fake_engine import FakeEngine

LATEST = Selector(Rule.LATEST, "default")


def ref(version: int, *, digest: bytes = b"", run_id: str = "run") -> AdapterRef:
    return AdapterRef(run_id, "default", version, digest or bytes([version % 256]) * 32)


@pytest.fixture
def staged(tmp_path: Path) -> Callable[[AdapterRef], Path]:
    def make(ref: AdapterRef) -> Path:
        path = tmp_path / f"{ref.run_id}-{ref.adapter}-{ref.version}-{ref.digest.hex()[:4]}"
        path.mkdir(exist_ok=True)
        return path

    return make


async def test_nothing_is_seen_before_the_commit(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 25: no listing and no request finds a version before it is committed."""
    assert registry.listing() == []
    with pytest.raises(AdapterNotFound, match="served here: nothing but the base"):
        async with registry.admit(LATEST, wait_seconds=1):
            pass
    await registry.commit(ref(1), staged(ref(1)))
    assert registry.listing() == [ref(1)]
    async with registry.admit(LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == ref(1)


async def test_an_unknown_version_is_not_found_and_the_base_must_be_asked_for(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 2: the base model never answers in place of an adapter."""
    await registry.commit(ref(1), staged(ref(1)))
    for selector in (
        Selector(Rule.EXACT, "default", 2),
        Selector(Rule.LATEST, "other"),
        Selector(Rule.LATEST, "default", run_id="another run"),
    ):
        with pytest.raises(AdapterNotFound):
            async with registry.admit(selector, wait_seconds=1):
                pass
    async with registry.admit(Selector(Rule.BASE), wait_seconds=1) as live:
        assert live is None


async def test_at_least_waits_for_its_version(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 5: what waits for version 2 is served by it as soon as it is committed."""
    await registry.commit(ref(1), staged(ref(1)))

    async def served() -> AdapterRef:
        async with registry.admit(Selector(Rule.AT_LEAST, "default", 2), wait_seconds=5) as live:
            assert live is not None
            return live.ref

    waiting = asyncio.create_task(served())
    await asyncio.sleep(0)
    assert not waiting.done()
    await registry.commit(ref(2), staged(ref(2)))
    assert await waiting == ref(2)
    assert await served() == ref(2)


async def test_at_least_expires(registry: AdapterRegistry) -> None:
    """Fault 23: the wait has a deadline."""
    with pytest.raises(WaitExpired, match="default@>=1 did not arrive"):
        async with registry.admit(Selector(Rule.AT_LEAST, "default", 1), wait_seconds=0.01):
            pass


async def test_a_version_goes_with_its_last_pin(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 25: nothing is removed while pinned, though no new request finds it."""
    await registry.commit(ref(1), staged(ref(1)))
    async with registry.admit(LATEST, wait_seconds=1) as live:
        assert live is not None
        await registry.commit(ref(2), staged(ref(2)))
        await registry.retire(ref(1))
        assert registry.listing() == [ref(2)]
        with pytest.raises(AdapterNotFound):
            async with registry.admit(Selector(Rule.EXACT, "default", 1), wait_seconds=1):
                pass
        await asyncio.sleep(0.02)
        assert sorted(engine.loaded) == [1, 2]
        assert live.loaded.path.is_dir()
    await eventually(lambda: len(registry._live) == 1)
    assert sorted(engine.loaded) == [2]
    assert not live.loaded.path.exists()


async def test_one_of_two_versions_is_retired_at_once(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    for version in (1, 2):
        await registry.commit(ref(version), staged(ref(version)))
    await registry.retire(ref(2))
    assert registry.listing() == [ref(1)]
    await eventually(lambda: sorted(engine.loaded) == [1])


@pytest.mark.parametrize("newer", [ref(2), ref(1, digest=b"n" * 32, run_id="next run")])
async def test_the_only_version_stays_until_another_is_committed(
    registry: AdapterRegistry,
    engine: FakeEngine,
    staged: Callable[[AdapterRef], Path],
    newer: AdapterRef,
) -> None:
    """faults.md 26, dynamo#8630: who retires the last version leaves the replica serving it."""
    await registry.commit(ref(1), staged(ref(1)))
    await registry.retire(ref(1))
    assert registry.listing() == [ref(1)]
    await registry.commit(newer, staged(newer))
    assert registry.listing() == [newer]
    await eventually(lambda: sorted(engine.loaded) == [2])


async def test_a_refused_update_after_a_retire_leaves_the_old_version_serving(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    """faults.md 26, dynamo#8630: a load that fails must not have unloaded what it replaces."""
    await registry.commit(ref(1), staged(ref(1)))
    await registry.retire(ref(1))
    engine.answers = [BoundReport(0, 0, (), "ValueError: bad rank")]
    with pytest.raises(Incompatible):
        await registry.commit(ref(2), staged(ref(2)))
    assert registry.listing() == [ref(1)]
    async with registry.admit(LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == ref(1)
        assert sorted(engine.loaded) == [1]


async def test_another_adapters_commit_leaves_a_superseded_version(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    other = AdapterRef("run", "other", 1, b"o" * 32)
    await registry.commit(ref(1), staged(ref(1)))
    await registry.retire(ref(1))
    await registry.commit(other, staged(other))
    assert registry.listing() == [ref(1), other]


async def test_a_superseded_version_is_the_first_to_give_up_its_slot(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    others = [AdapterRef("run", name, 1, name.encode() * 32) for name in "ab"]
    await registry.commit(others[0], staged(others[0]))
    await registry.commit(ref(1), staged(ref(1)))
    await registry.retire(ref(1))
    await registry.commit(others[1], staged(others[1]))
    assert registry.listing() == others


async def test_a_superseded_version_that_is_sent_again_counts_as_new(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    await registry.commit(ref(1), staged(ref(1)))
    await registry.retire(ref(1))
    assert await registry.commit(ref(1), staged(ref(2))) == []
    await registry.commit(ref(2), staged(ref(2)))
    assert registry.listing() == [ref(1), ref(2)]


async def test_a_version_with_another_digest_is_refused(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    await registry.commit(ref(1), staged(ref(1)))
    other = ref(1, digest=b"x" * 32)
    with pytest.raises(AlreadyExists, match="publish other bytes as a new version"):
        await registry.commit(other, staged(other))
    assert not staged_path_exists(staged, other)
    assert registry.listing() == [ref(1)]
    assert len(engine.loaded) == 1


def staged_path_exists(staged: Callable[[AdapterRef], Path], which: AdapterRef) -> bool:
    path = staged(which)
    empty_new = not any(path.iterdir())
    path.rmdir()
    return not empty_new


async def test_the_same_version_again_is_not_loaded_twice(
    registry: AdapterRegistry, engine: FakeEngine, tmp_path: Path
) -> None:
    """Fault 24: a version that comes a second time has one effect."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    await registry.commit(ref(1), first)
    assert await registry.commit(ref(1), second) == []
    assert len(engine.loaded) == 1
    assert (first.exists(), second.exists()) == (True, False)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([BoundReport(0, 1, ("a.lora_A.weight (no module)",), "")], "1 tensors found no module: a"),
        (
            [BoundReport(0, 2, (), ""), BoundReport(0, 1, ("b.lora_A.weight (no module)",), "")],
            "1 tensors found no module: b",
        ),
        ([BoundReport(0, 0, (), "ValueError: bad rank")], "the engine refused it: ValueError"),
    ],
)
async def test_an_adapter_that_does_not_bind_on_every_rank_is_refused(
    registry: AdapterRegistry,
    engine: FakeEngine,
    staged: Callable[[AdapterRef], Path],
    answers: list[BoundReport],
    text: str,
) -> None:
    """Faults 7, 8 and 26: refused by name when one rank lacks a tensor; nothing else changes."""
    await registry.commit(ref(1), staged(ref(1)))
    engine.answers = answers
    path = staged(ref(2))
    with pytest.raises(Incompatible, match=text):
        await registry.commit(ref(2), path)
    assert registry.listing() == [ref(1)]
    assert [adapter.name[:9] for adapter in engine.loaded.values()] == ["default@1"]
    assert not path.exists()


async def test_pipeline_stages_each_bind_their_own_part(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    engine.answers = [BoundReport(0, 1, ("late",), ""), BoundReport(1, 1, ("early",), "")]
    await registry.commit(ref(1), staged(ref(1)))
    assert registry.listing() == [ref(1)]


async def test_hundreds_of_versions_level_off(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 27: the newest two stay, and ids are never used again."""
    for version in range(1, 301):
        await registry.commit(ref(version), staged(ref(version)))
    await eventually(lambda: len(registry._live) == 2)
    assert registry.listing() == [ref(299), ref(300)]
    assert sorted(engine.loaded) == [299, 300]


async def test_a_load_waits_for_a_slot_and_never_evicts(
    registry: AdapterRegistry, engine: FakeEngine, staged: Callable[[AdapterRef], Path]
) -> None:
    """Fault 20: with every slot in use by a request, the load waits until one ends."""
    async with AsyncExitStack() as first, AsyncExitStack() as others:
        for version, stack in ((1, first), (2, others), (3, others)):
            await registry.commit(ref(version), staged(ref(version)))
            await stack.enter_async_context(registry.admit(LATEST, wait_seconds=1))
        with pytest.raises(Unavailable, match="all 3 slots are in use"):
            await registry.commit(ref(4), staged(ref(4)))
        loading = asyncio.create_task(registry.commit(ref(5), staged(ref(5))))
        await asyncio.sleep(0.01)
        assert not loading.done()
        await first.aclose()
        await loading
        assert sorted(adapter.name[:9] for adapter in engine.loaded.values()) == [
            "default@2",
            "default@3",
            "default@5",
        ]


async def test_without_a_run_the_one_committed_last_answers(
    registry: AdapterRegistry, staged: Callable[[AdapterRef], Path]
) -> None:
    old, new = ref(7), ref(1, run_id="next run")
    await registry.commit(old, staged(old))
    await registry.commit(new, staged(new))
    async with registry.admit(LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == new
    async with registry.admit(Selector(Rule.LATEST, "default", run_id="run"), wait_seconds=1) as it:
        assert it is not None
        assert it.ref == old


class DyingEngine(FakeEngine):
    """Never finishes a load, and is dead by the time that the load is given up."""

    async def load(self, adapter: EngineAdapter) -> list[BoundReport]:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def unload(self, adapter_id: int) -> None:
        raise EngineDead("the engine ended")


async def test_a_cancelled_commit_stays_cancelled_when_the_engine_is_dead(tmp_path: Path) -> None:
    """faults.md 22, AReaL#1160: a replica whose engine died during an update must end, too."""
    registry = AdapterRegistry(engine=DyingEngine(), slots=3, keep_versions=2, slot_wait_seconds=1)
    commit = asyncio.ensure_future(
        registry.commit(AdapterRef("run", "default", 1, b"d" * 32), tmp_path / "adapter")
    )
    await asyncio.sleep(0)
    commit.cancel()

    with pytest.raises(asyncio.CancelledError):
        await commit
