"""Merged weights and the base's own: one version at a time, replaced while nobody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from common.adapter import Canary, CanarySequence, Kind
from common.errors import (
    AdapterNotFound,
    CanaryRefused,
    Incompatible,
    Unavailable,
    WaitExpired,
)
from common.model_dir import BaseModel
from common.rules import Rules
from common.stream.content import Content
from common.tasks import cancel
from rollout_svc.engine import BoundReport, EngineDead, Mismatch, MismatchReason
from rollout_svc.versions.commits import Committed
from rollout_svc.versions.pristine import PristineBase
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.live import Commits, admit
from tests.receiving import REF
from tests.whole_weights import make_weights, stage

LATEST = Selector(Rule.LATEST, "default")
BASE_RULE = Selector(Rule.BASE)
FIRST, SECOND = make_weights(version=1), make_weights(version=2)
ADAPTER = replace(REF, version=7)
TRAINER = "trainer"
MODEL = Path("tiny")
"""Where the registry reads the base's weights."""


class Stages:
    """Stages and commits weights, each in a directory of its own."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def path(self, content: Content) -> Path:
        return self._parent / f"{content.manifest.kind.value}-{content.ref.version}"

    async def __call__(
        self, registry: AdapterRegistry, content: Content, *, source: str = TRAINER
    ) -> Committed:
        return await registry.commit(content, stage(content, self.path(content)), source=source)


@pytest.fixture
def put(tmp_path: Path) -> Stages:
    return Stages(tmp_path / "staged")


@pytest.fixture
async def bare(engine: FakeEngine) -> AsyncIterator[AdapterRegistry]:
    """A registry whose engine started on random weights."""
    registry = AdapterRegistry(
        engine=engine,
        base=BaseModel("tiny", ""),
        pristine=PristineBase(None),
        slots=3,
        keep_versions=2,
        slot_wait_seconds=0.2,
    )
    unloading = asyncio.create_task(registry.run())
    yield registry
    await cancel(unloading)


async def serves(registry: AdapterRegistry, content: Content) -> bool:
    """Whether its own digest answers LATEST, and no LoRA slot is asked for."""
    async with admit(registry, LATEST, wait_seconds=1) as live:
        return live is not None and live.ref == content.ref and live.lora is None


async def test_a_merged_version_takes_the_place_of_the_one_before(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    """An engine with merged weights serves one version: the older one is NOT_FOUND, and so is no
    base behind it."""
    assert (await put(registry, FIRST)).reports == engine.weights_answers
    assert await serves(registry, FIRST)
    await put(registry, SECOND)
    assert await serves(registry, SECOND)

    assert registry.listing() == [SECOND.ref]
    assert engine.weights == [put.path(FIRST), put.path(SECOND)]
    assert engine.loaded == {}
    with pytest.raises(AdapterNotFound, match="default@1 is not served"):
        async with admit(registry, Selector(Rule.EXACT, "default", 1), wait_seconds=1):
            pass
    with pytest.raises(Incompatible, match="the base is not served: merged weights took"):
        async with admit(registry, BASE_RULE, wait_seconds=1):
            pass
    await eventually(lambda: not put.path(FIRST).exists())
    assert put.path(SECOND).exists()


async def test_requests_end_on_the_weights_they_began_with(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    """Swap rule `finish`: the switch waits for those that run, and new ones wait for the switch."""
    await put(registry, FIRST)
    async with AsyncExitStack() as running:
        live = await running.enter_async_context(admit(registry, LATEST, wait_seconds=1))
        assert live is not None
        switch = asyncio.create_task(put(registry, SECOND))
        await eventually(lambda: not registry.uses.open)
        late = asyncio.create_task(serves(registry, SECOND))
        await asyncio.sleep(0.01)
        assert not (switch.done() or late.done())
        assert (live.ref, engine.weights) == (FIRST.ref, [put.path(FIRST)])
    await switch
    assert await late


async def test_a_switch_that_cannot_wait_longer_is_refused(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    """faults.md 26, dynamo#8630: a refused update changes no listing."""
    async with admit(registry, BASE_RULE, wait_seconds=1):
        with pytest.raises(Unavailable, match="1 requests still ran on the old weights"):
            await put(registry, FIRST)
        with pytest.raises(AdapterNotFound):
            await serves(registry, FIRST)
        async with admit(registry, BASE_RULE, wait_seconds=1) as live:
            assert live is None
    assert (registry.listing(), engine.weights) == ([], [])
    assert not put.path(FIRST).exists()


async def test_a_request_waits_for_a_switch_no_longer_than_its_deadline(
    registry: AdapterRegistry,
) -> None:
    with registry.uses.closed(), pytest.raises(WaitExpired):
        async with admit(registry, BASE_RULE, wait_seconds=0.01):
            pass


@pytest.mark.parametrize("has_older", [False, True])
async def test_after_a_failed_load_the_weights_from_before_are_loaded_again(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages, has_older: bool
) -> None:
    """faults.md 22, AReaL#1160: the last good version serves again."""
    if has_older:
        await put(registry, FIRST)
    engine.bad_weights = {put.path(SECOND)}
    with pytest.raises(Incompatible, match="the engine refused it: OSError: damaged"):
        await put(registry, SECOND)

    before = put.path(FIRST) if has_older else MODEL
    assert engine.weights[-2:] == [put.path(SECOND), before]
    registry.weights.check_whole()
    assert registry.listing() == ([FIRST.ref] if has_older else [])
    assert await serves(registry, FIRST) if has_older else not registry.weights.merged_from
    assert put.path(FIRST).exists() == has_older
    assert not put.path(SECOND).exists()


async def test_an_engine_left_without_weights_answers_nobody(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    engine.bad_weights = {put.path(FIRST), MODEL}
    with pytest.raises(Incompatible, match="damaged"):
        await put(registry, FIRST)
    with pytest.raises(EngineDead, match="weights are incomplete"):
        registry.weights.check_whole()
    with pytest.raises(WaitExpired):
        async with admit(registry, BASE_RULE, wait_seconds=0.01):
            pass


async def test_tensors_without_a_parameter_are_refused_before_anything_changes(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    """faults.md 8, vllm#55193: refused, naming the tensors."""
    engine.weights_answers = [
        BoundReport(0, 2, (Mismatch("model.layers.9.x", MismatchReason.NO_MODULE),), "")
    ]
    with pytest.raises(Incompatible, match=r"1 tensors found no module: model\.layers\.9\.x"):
        await put(registry, FIRST)
    assert engine.weights == []


async def test_a_canary_guards_merged_weights_too(
    registry: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    await put(registry, FIRST)
    canary = Canary((CanarySequence((1, 2, 3), (-2.0, -2.0)),), max_difference=0.1)
    scored = Content.whole(SECOND.ref, SECOND.manifest, SECOND.buffer, canary=canary)
    with pytest.raises(CanaryRefused, match=r"differ by 1\.5"):
        await put(registry, scored)
    assert engine.scored == [(None, (1, 2, 3))]
    assert engine.weights[-1] == put.path(FIRST)
    assert await serves(registry, FIRST)


async def test_a_cancelled_switch_is_seen_through(
    registry: AdapterRegistry, put: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that breaks while the engine loads leaves no half-replaced weights."""
    loading, may_load = asyncio.Event(), asyncio.Event()

    async def load_weights(path: Path) -> list[BoundReport]:
        loading.set()
        await may_load.wait()
        return [BoundReport(stage=0, bound_modules=0, mismatches=(), error="")]

    monkeypatch.setattr(FakeEngine, "load_weights", staticmethod(load_weights))
    switch = asyncio.create_task(put(registry, FIRST))
    await loading.wait()
    switch.cancel()
    await asyncio.sleep(0)
    may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await switch
    assert await serves(registry, FIRST)
    assert put.path(FIRST).exists()


async def test_adapters_and_merged_weights_do_not_go_together(
    registry: AdapterRegistry, commit: Commits, put: Stages
) -> None:
    """faults.md 15, miles#1087: no adapter is applied on top of merged weights."""
    other = replace(ADAPTER, adapter="other")
    await commit(other)
    with pytest.raises(Incompatible, match=r"kind: MERGED, but other@7 .* is served, and merged"):
        await put(registry, FIRST)
    assert registry.listing() == [other]


async def test_an_adapter_changes_between_its_slot_and_the_engines_weights(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits, put: Stages
) -> None:
    """faults.md 15, miles#1087: the slot is empty before weights are merged, and the base is back
    before a slot is used."""
    await commit(ADAPTER)
    await put(registry, FIRST)
    assert (registry.listing(), registry.weights.merged_from) == ([FIRST.ref], TRAINER)
    await eventually(lambda: not engine.loaded)
    newer = replace(ADAPTER, version=8)
    await commit(newer)
    assert (registry.listing(), registry.weights.merged_from) == ([newer], "")
    assert engine.weights == [put.path(FIRST), MODEL]
    async with admit(registry, BASE_RULE, wait_seconds=1) as live:
        assert live is None


async def test_merged_weights_are_one_trainers(
    registry: AdapterRegistry, commit: Commits, put: Stages
) -> None:
    await put(registry, FIRST)
    with pytest.raises(
        Incompatible, match=r"default@1 .* is served, and merged weights would replace it"
    ):
        await put(registry, SECOND, source="another")
    with pytest.raises(Incompatible, match=r"default@1 .* is served as merged weights, alone"):
        await commit(ADAPTER, source="another")
    with pytest.raises(Incompatible, match="has its base's weights; send none"):
        await put(registry, make_weights(kind=Kind.BASE))
    assert registry.listing() == [FIRST.ref]


async def test_a_replica_without_weights_takes_the_base_once_and_then_adapters(
    bare: AdapterRegistry, engine: FakeEngine, put: Stages, tmp_path: Path
) -> None:
    """faults.md 11, vllm#31104: nothing is served on random weights."""
    commit = Commits(bare, tmp_path)
    with pytest.raises(Incompatible, match="started without weights; send ADAPTER_KIND_BASE first"):
        await commit(ADAPTER)
    with pytest.raises(Incompatible, match="the base's have not come yet"):
        async with admit(bare, BASE_RULE, wait_seconds=1):
            pass
    base = make_weights(kind=Kind.BASE)
    await put(bare, base)

    assert bare.listing() == []
    assert (bare.weights.missing, bare.weights.base.fingerprint) == (False, "base")
    assert put.path(base).exists()  # what merges start from
    async with admit(bare, BASE_RULE, wait_seconds=1) as live:
        assert live is None
    await commit(ADAPTER)
    assert bare.listing() == [ADAPTER]
    with pytest.raises(Incompatible, match="send none"):
        await put(bare, make_weights(kind=Kind.BASE, version=2))
    with pytest.raises(Incompatible, match=r"base_fingerprint: other, this replica serves base"):
        bare.check_fits(ADAPTER, Kind.LORA, "other", rules=Rules(), source=TRAINER)


async def test_a_base_that_cannot_be_loaded_leaves_the_replica_waiting(
    bare: AdapterRegistry, engine: FakeEngine, put: Stages
) -> None:
    base = make_weights(kind=Kind.BASE)
    engine.bad_weights = {put.path(base)}
    with pytest.raises(Incompatible, match="damaged"):
        await put(bare, base)
    assert bare.weights.missing
    assert engine.weights == [put.path(base)]
    engine.bad_weights = set()
    await put(bare, base)
    assert not bare.weights.missing


async def test_merged_weights_need_no_base(bare: AdapterRegistry, put: Stages) -> None:
    await put(bare, FIRST)
    assert await serves(bare, FIRST)
    assert not bare.weights.missing


async def test_a_cancelled_base_stays_what_merges_start_from(
    bare: AdapterRegistry, put: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, may_load = asyncio.Event(), asyncio.Event()

    async def load_weights(path: Path) -> list[BoundReport]:
        loading.set()
        await may_load.wait()
        return [BoundReport(stage=0, bound_modules=0, mismatches=(), error="")]

    monkeypatch.setattr(FakeEngine, "load_weights", staticmethod(load_weights))
    base = make_weights(kind=Kind.BASE)
    switch = asyncio.create_task(put(bare, base))
    await loading.wait()
    switch.cancel()
    await asyncio.sleep(0)
    may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await switch
    assert not bare.weights.missing
    assert put.path(base).exists()
    assert await bare.weights.pristine.directory() == put.path(base)
