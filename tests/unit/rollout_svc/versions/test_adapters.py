"""The registry: commit, choose, pin, alias."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from common.adapter import AdapterRef
from common.errors import (
    AdapterNotFound,
    AlreadyExists,
    Incompatible,
    NotHeld,
    Unavailable,
    WaitExpired,
)
from rollout_svc.engine import BoundReport, EngineAdapter, EngineDead, Mismatch, MismatchReason
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.live import BASE, PRISTINE, Commits, admit, content_of

LATEST = Selector(Rule.LATEST, "default")


def ref(version: int, *, digest: bytes = b"", run_id: str = "run") -> AdapterRef:
    return AdapterRef(run_id, "default", version, digest or bytes([version % 256]) * 32)


async def test_nothing_is_seen_before_the_commit(
    registry: AdapterRegistry, commit: Commits
) -> None:
    """faults.md 25, prime-rl#2391: nothing lists or finds it before the commit."""
    assert registry.listing() == []
    with pytest.raises(AdapterNotFound, match="served here: nothing but the base"):
        async with admit(registry, LATEST, wait_seconds=1):
            pass
    await commit(ref(1))
    assert registry.listing() == [ref(1)]
    async with admit(registry, LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == ref(1)


async def test_an_unknown_version_is_not_found_and_the_base_must_be_asked_for(
    registry: AdapterRegistry, commit: Commits
) -> None:
    """faults.md 2, verl#3821: the base model never answers in place of an adapter."""
    await commit(ref(1))
    for selector in (
        Selector(Rule.EXACT, "default", 2),
        Selector(Rule.LATEST, "other"),
        Selector(Rule.LATEST, "default", run_id="another run"),
    ):
        with pytest.raises(AdapterNotFound):
            async with admit(registry, selector, wait_seconds=1):
                pass
    async with admit(registry, Selector(Rule.BASE), wait_seconds=1) as live:
        assert live is None


async def test_at_least_waits_for_its_version(registry: AdapterRegistry, commit: Commits) -> None:
    """faults.md 5, ART#661: what waits for version 2 is served by it as soon as it is committed."""
    await commit(ref(1))

    async def served() -> AdapterRef:
        async with admit(registry, Selector(Rule.AT_LEAST, "default", 2), wait_seconds=5) as live:
            assert live is not None
            return live.ref

    waiting = asyncio.create_task(served())
    await asyncio.sleep(0)
    assert not waiting.done()
    await commit(ref(2))
    assert await waiting == ref(2)
    assert await served() == ref(2)


async def test_at_least_expires(registry: AdapterRegistry) -> None:
    """faults.md 23, TRL#6797: the wait has a deadline."""
    with pytest.raises(WaitExpired, match="default@>=1 did not arrive"):
        async with admit(registry, Selector(Rule.AT_LEAST, "default", 1), wait_seconds=0.01):
            pass


async def test_a_version_goes_with_its_last_pin(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 25, prime-rl#2391: nothing is removed while pinned, though not found."""
    await commit(ref(1))
    async with admit(registry, LATEST, wait_seconds=1) as live:
        assert live is not None
        await commit(ref(2))
        registry.retire(ref(1), source="trainer")
        assert registry.listing() == [ref(2)]
        with pytest.raises(AdapterNotFound):
            async with admit(registry, Selector(Rule.EXACT, "default", 1), wait_seconds=1):
                pass
        await asyncio.sleep(0.02)
        assert sorted(engine.loaded) == [1, 2]
        assert live.loaded.path.is_dir()
    await eventually(lambda: not live.loaded.path.exists())
    assert sorted(engine.loaded) == [2]


def _missing(tensor: str) -> Mismatch:
    return Mismatch(tensor, MismatchReason.NO_MODULE)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([BoundReport(0, 1, (_missing("a.lora_A.weight"),), "")], "1 tensors found no module: a"),
        (
            [BoundReport(0, 2, (), ""), BoundReport(0, 1, (_missing("b.lora_A.weight"),), "")],
            "1 tensors found no module: b",
        ),
        ([BoundReport(0, 0, (), "ValueError: bad rank")], "the engine refused it: ValueError"),
    ],
)
async def test_an_adapter_that_does_not_bind_on_every_rank_is_refused(
    registry: AdapterRegistry,
    engine: FakeEngine,
    commit: Commits,
    answers: list[BoundReport],
    text: str,
) -> None:
    """faults.md 7, TRL#7017, 8, vllm#55193, 26, dynamo#8630: a tensor one rank lacks is named."""
    await commit(ref(1))
    engine.answers = answers
    with pytest.raises(Incompatible, match=text):
        await commit(ref(2))
    assert registry.listing() == [ref(1)]
    assert [adapter.name[:9] for adapter in engine.loaded.values()] == ["default@1"]
    assert [path.exists() for path in commit.paths] == [True, False]


async def test_pipeline_stages_each_bind_their_own_part(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    engine.answers = [
        BoundReport(0, 1, (_missing("late"),), ""),
        BoundReport(1, 1, (_missing("early"),), ""),
    ]
    await commit(ref(1))
    assert registry.listing() == [ref(1)]


async def test_a_load_waits_for_a_slot_and_never_evicts(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 20, vllm#47724: with every slot in use, the load waits."""
    async with AsyncExitStack() as first, AsyncExitStack() as others:
        for version, stack in ((1, first), (2, others), (3, others)):
            await commit(ref(version))
            await stack.enter_async_context(admit(registry, LATEST, wait_seconds=1))
        with pytest.raises(Unavailable, match="all 3 slots are in use"):
            await commit(ref(4))
        loading = asyncio.create_task(commit(ref(5)))
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
    registry: AdapterRegistry, commit: Commits
) -> None:
    old, new = ref(7), ref(1, run_id="next run")
    await commit(old)
    await commit(new)
    async with admit(registry, LATEST, wait_seconds=1) as live:
        assert live is not None
        assert live.ref == new
    async with admit(
        registry, Selector(Rule.LATEST, "default", run_id="run"), wait_seconds=1
    ) as it:
        assert it is not None
        assert it.ref == old


async def test_a_version_with_another_digest_is_refused(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    await commit(ref(1))
    with pytest.raises(AlreadyExists, match="publish other bytes as a new version"):
        await commit(ref(1, digest=b"x" * 32))
    assert [path.exists() for path in commit.paths] == [True, False]
    assert registry.listing() == [ref(1)]
    assert len(engine.loaded) == 1


async def test_the_same_version_again_is_not_loaded_twice(
    engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 24, SkyRL#2035: a version that comes a second time has one effect."""
    await commit(ref(1))
    assert (await commit(ref(1))).reports == []
    assert len(engine.loaded) == 1
    assert [path.exists() for path in commit.paths] == [True, False]


async def test_an_alias_shares_the_slot_and_the_bytes(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    await commit(ref(1))
    registry_alias = AdapterRef("run", "old", 1, ref(1).digest)
    await registry.alias(registry_alias, source="trainer")
    assert registry.listing() == [ref(1), registry_alias]
    assert sorted(engine.loaded) == [1]
    one, other = registry.contents()
    assert (other.ref, other.finished) == (registry_alias, True)
    assert bytes(other.buffer) == bytes(one.buffer)
    async with admit(registry, Selector(Rule.EXACT, "old", 1), wait_seconds=1) as live:
        assert live is not None
        assert live.loaded is engine.loaded[1]


async def test_a_shared_slot_goes_with_the_last_name(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    await commit(ref(1))
    old = AdapterRef("run", "old", 1, ref(1).digest)
    await registry.alias(old, source="trainer")
    for version in (2, 3):
        await commit(ref(version))
    assert registry.listing() == [old, ref(2), ref(3)]
    assert sorted(engine.loaded) == [1, 2, 3]
    assert commit.paths[0].exists()

    await registry.alias(AdapterRef("run", "old", 2, ref(3).digest), source="trainer")
    registry.retire(old, source="trainer")
    await eventually(lambda: sorted(engine.loaded) == [2, 3])
    await eventually(lambda: not commit.paths[0].exists())


async def test_an_alias_of_what_is_not_here_is_not_held(
    registry: AdapterRegistry, commit: Commits
) -> None:
    await commit(ref(1))
    with pytest.raises(NotHeld, match="no version here has the digest of old@1"):
        await registry.alias(AdapterRef("run", "old", 1, b"x" * 32), source="trainer")
    with pytest.raises(AlreadyExists):
        await registry.alias(ref(1, digest=b"x" * 32), source="trainer")
    await registry.alias(ref(1), source="trainer")
    assert registry.listing() == [ref(1)]


class StuckEngine(FakeEngine):
    """Never finishes a load; `is_dead` by the time that the load is given up."""

    is_dead = False
    unloaded: list[int]

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        self.unloaded = []
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def unload(self, adapter_id: int) -> None:
        self.unloaded.append(adapter_id)
        if self.is_dead:
            raise EngineDead("the engine ended")


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_cancelled_commit_leaves_no_slot_no_directory_and_no_listing(
    tmp_path: Path, is_dead: bool
) -> None:
    """faults.md 22, AReaL#1160: a replica whose engine died during an update must end, too."""
    engine = StuckEngine()
    engine.is_dead = is_dead
    registry = AdapterRegistry(
        engine=engine, base=BASE, pristine=PRISTINE, slots=3, keep_versions=2, slot_wait_seconds=1
    )
    (tmp_path / "adapter").mkdir()
    commit = asyncio.ensure_future(
        registry.commit(content_of(ref(1)), tmp_path / "adapter", source="trainer")
    )
    await asyncio.sleep(0)
    commit.cancel()

    with pytest.raises(asyncio.CancelledError):
        await commit
    assert engine.unloaded == [1]
    assert list(tmp_path.iterdir()) == []
    assert registry.listing() == []
