"""What becomes of running requests when a version is committed: finish, abort and continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from common.adapter import AdapterRef, Canary, CanarySequence
from common.errors import AdapterNotFound, CanaryRefused, Incompatible
from common.rules import Merge, Rules, Swap
from common.stream.content import Content
from common.tasks import cancel
from rollout_svc.engine import BoundReport, EngineDead, FinishReason, Generation
from rollout_svc.generation.sampling import Sampling
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.fake_engine import FakeEngine

LATEST = Selector(Rule.LATEST, "default")
BASE_RULE = Selector(Rule.BASE)
TOKENS = 6
MANIFEST, BUFFER = make_adapter()


def ref(version: int, *, adapter: str = "default") -> AdapterRef:
    return AdapterRef("run", adapter, version, adapter.encode()[:1] * 31 + bytes([version]))


@dataclass(slots=True)
class Request:
    """A request of one completion, which the engine steps through once a time."""

    registry: AdapterRegistry
    engine: FakeEngine
    name: str
    selector: Selector = LATEST
    made_by: list[AdapterRef | None] = field(default_factory=list)
    """Of each token."""

    reason: FinishReason | None = None
    salt: str = ""

    async def run(self) -> None:
        while True:
            async with (
                self.registry.admit(
                    self.selector, request_id=self.name, wait_seconds=5
                ) as admitted,
                aclosing(
                    self.engine.generate(self._generation(admitted.adapter, admitted.cache_salt))
                ) as deltas,
            ):
                self.salt = admitted.cache_salt
                async for delta in deltas:
                    if not admitted.goes_on():
                        break
                    kept, made_by = await admitted.attribute(delta)
                    self.made_by += [made_by] * len(kept.token_ids)
                    self.reason = kept.finish_reason
                else:
                    return

    def _generation(self, adapter: object, salt: str) -> Generation:
        return Generation(
            request_id=self.name,
            prompt_token_ids=(1, 2, 3),
            sampling=Sampling(n=1, max_tokens=TOKENS),
            adapter=adapter,  # type: ignore[arg-type]
            cache_salt=salt,
        )


@dataclass(slots=True)
class Stage:
    """A registry, its engine, and what commits to the one and steps the other."""

    registry: AdapterRegistry
    engine: FakeEngine
    parent: Path
    _running: AsyncExitStack

    async def commit(
        self,
        ref: AdapterRef,
        swap: Swap | None = None,
        *,
        merge: Merge = Merge.NEVER,
        canary: Canary | None = None,
    ) -> None:
        path = self.parent / f"{ref.adapter}-{ref.version}-{len(list(self.parent.iterdir()))}"
        path.mkdir()
        rules = Rules(swap, merge)
        content = Content.whole(ref, MANIFEST, BUFFER, rules=rules, canary=canary)
        await self.registry.commit(content, path, source="trainer")

    async def start(self, name: str, selector: Selector = LATEST) -> Request:
        """Begin a request and let it have one token."""
        request = Request(self.registry, self.engine, name, selector)
        task = asyncio.create_task(request.run())
        self._running.push_async_callback(cancel, task)
        self.step()
        await eventually(lambda: len(request.made_by) == 1 and not self.engine.gate.is_set())
        return request

    async def queue(self, name: str, selector: Selector = LATEST) -> Request:
        """Give the engine a request that it does not begin."""
        request = Request(self.registry, self.engine, name, selector)
        task = asyncio.create_task(request.run())
        self._running.push_async_callback(cancel, task)
        await eventually(lambda: name in self.engine.running)
        return request

    def step(self) -> None:
        self.engine.one_step = True
        self.engine.gate.set()

    async def run_out(self, *requests: Request) -> None:
        self.engine.one_step = False
        self.engine.gate.set()
        await eventually(lambda: all(request.reason for request in requests))


@pytest.fixture
async def stage(
    registry: AdapterRegistry, engine: FakeEngine, tmp_path: Path
) -> AsyncIterator[Stage]:
    engine.gate.clear()
    (tmp_path / "staged").mkdir()
    async with AsyncExitStack() as running:
        yield Stage(registry, engine, tmp_path / "staged", running)


async def test_finish_lets_a_request_end_on_its_version(stage: Stage) -> None:
    """faults.md 20, vllm#47724: as if the newer ones had not come."""
    await stage.commit(ref(1))
    request = await stage.start("long")
    for version in (2, 3, 4):
        await stage.commit(ref(version), Swap.FINISH)
    await stage.run_out(request)
    assert request.made_by == [ref(1)] * TOKENS
    assert request.reason is FinishReason.LENGTH


@pytest.mark.parametrize("merge", Merge)
async def test_abort_ends_older_requests_with_their_tokens(stage: Stage, merge: Merge) -> None:
    await stage.commit(ref(1), merge=merge)
    request = await stage.start("long")
    await stage.commit(ref(2), Swap.ABORT, merge=merge)
    assert request.made_by == [ref(1)]
    assert request.reason is FinishReason.ABORT
    newer = await stage.start("new")
    await stage.run_out(newer)
    assert newer.made_by == [ref(2)] * TOKENS


async def test_abort_leaves_the_base_and_other_adapters_alone(stage: Stage) -> None:
    await stage.commit(ref(1))
    await stage.commit(ref(1, adapter="other"))
    base = await stage.start("base", BASE_RULE)
    other = await stage.start("other", Selector(Rule.LATEST, "other"))
    await stage.commit(ref(2), Swap.ABORT)
    await stage.run_out(base, other)
    assert base.made_by == [None] * TOKENS
    assert other.made_by == [ref(1, adapter="other")] * TOKENS


@pytest.mark.parametrize("merge", Merge)
async def test_continue_tags_each_token_with_the_version_that_made_it(
    stage: Stage, merge: Merge
) -> None:
    await stage.commit(ref(1), merge=merge)
    request = await stage.start("long")
    await stage.commit(ref(2), Swap.CONTINUE, merge=merge)
    stage.step()
    await eventually(lambda: len(request.made_by) == 2 and not stage.engine.gate.is_set())
    await stage.commit(ref(3), Swap.CONTINUE, merge=merge)
    await stage.run_out(request)
    assert request.made_by == [ref(1), ref(2), *[ref(3)] * (TOKENS - 2)]
    assert request.reason is FinishReason.LENGTH
    assert stage.registry.listing() == [ref(3)]


@pytest.mark.parametrize("merge", Merge)
async def test_continue_never_serves_what_was_cached_under_other_weights(
    stage: Stage, merge: Merge
) -> None:
    """faults.md 19, vllm#42125: no new request reads what a request computed that went on, not even
    one of a version with the same bytes."""
    await stage.commit(ref(1), merge=merge)
    request = await stage.start("long")
    await stage.commit(ref(2), Swap.CONTINUE, merge=merge)
    second = await stage.start("second")
    await stage.commit(replace(ref(3), digest=ref(1).digest), Swap.CONTINUE, merge=merge)
    third = await stage.start("third")
    await stage.run_out(request, second, third)
    assert len({request.salt, second.salt, third.salt}) == 3


async def test_abort_ends_requests_also_where_the_new_versions_bytes_are_here(
    stage: Stage,
) -> None:
    stage.registry.rules = Rules(Swap.ABORT, Merge.NEVER)
    await stage.commit(ref(1))
    await stage.commit(ref(2))
    request = await stage.start("long")
    await stage.registry.alias(replace(ref(1), version=3), source="trainer")
    assert request.made_by == [ref(2)]
    assert request.reason is FinishReason.ABORT


@pytest.mark.parametrize("merge", [Merge.NEVER, Merge.ROLLOUT])
async def test_continue_admits_anew_what_the_engine_has_not_begun(
    stage: Stage, merge: Merge
) -> None:
    """faults.md 19, vllm#42125: it would read the old weights' prefix, and name the new alone."""
    await stage.commit(ref(1), merge=merge)
    running, queued = await stage.start("running"), await stage.queue("queued")
    of_version = await stage.queue("of_version", Selector(Rule.EXACT, "default", 1))
    salt = queued.salt
    assert salt == running.salt == of_version.salt
    await stage.commit(ref(2), Swap.CONTINUE, merge=merge)
    await eventually(lambda: queued.salt != salt)
    await stage.run_out(running, queued)
    assert running.made_by == [ref(1), *[ref(2)] * (TOKENS - 1)]
    assert queued.made_by == [ref(2)] * TOKENS
    assert of_version.made_by == []


async def test_requests_that_outlast_many_versions_take_two_slots(stage: Stage) -> None:
    """faults.md 27, AReaL#1385."""
    await stage.commit(ref(1))
    requests = [await stage.start("1")]
    for version in range(2, 12):
        await stage.commit(ref(version), Swap.CONTINUE)
        requests.append(await stage.start(str(version)))
        assert len(stage.engine.loaded) == 1
    await stage.run_out(*requests)


async def test_a_request_for_an_older_version_is_no_longer_served_after_continue(
    stage: Stage,
) -> None:
    await stage.commit(ref(1))
    request = await stage.start("long")
    await stage.commit(ref(2), Swap.CONTINUE)
    with pytest.raises(AdapterNotFound, match="default@1 is not served"):
        async with stage.registry.admit(
            Selector(Rule.EXACT, "default", 1), request_id="late", wait_seconds=1
        ):
            pass
    await stage.run_out(request)


async def test_a_slot_that_took_no_new_bytes_gives_its_version_up_to_be_loaded_anew(
    stage: Stage,
) -> None:
    """faults.md 26, dynamo#8630: a refused update changes no listing; what it met half-way ends."""
    await stage.commit(ref(1))
    request = await stage.start("long")
    good = stage.engine.answers

    async def load(adapter: object, *, in_place: bool = False) -> list[BoundReport]:
        return [BoundReport(0, 0, (), "OSError: damaged")] if in_place else good

    original = FakeEngine.load
    FakeEngine.load = staticmethod(load)  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(Incompatible, match="OSError: damaged"):
            await stage.commit(ref(2), Swap.CONTINUE)
    finally:
        FakeEngine.load = original  # type: ignore[method-assign]
    assert request.made_by == [ref(1)]
    assert request.reason is FinishReason.ABORT
    assert not stage.engine.paused
    assert stage.registry.listing() == [ref(1)]
    again = await stage.start("again")
    await stage.run_out(again)
    assert again.made_by == [ref(1)] * TOKENS
    assert again.salt != request.salt


async def test_tokens_of_merged_weights_that_a_canary_refuses_are_cut_off(stage: Stage) -> None:
    await stage.commit(ref(1), merge=Merge.ROLLOUT)
    request = await stage.start("long")
    canary = Canary((CanarySequence((1, 2, 3), (-2.0, -2.0)),), max_difference=0.1)
    refused = asyncio.create_task(
        stage.commit(ref(2), Swap.CONTINUE, merge=Merge.ROLLOUT, canary=canary)
    )
    await eventually(lambda: stage.engine.mark == 1)
    stage.step()
    await asyncio.sleep(0.01)
    assert request.made_by == [ref(1)], "a token waits until its version is known to stand"
    stage.step()
    with pytest.raises(CanaryRefused):
        await refused
    assert request.made_by == [ref(1)]
    assert request.reason is FinishReason.ABORT
    again = await stage.start("again")
    await stage.run_out(again)
    assert again.made_by == [ref(1)] * TOKENS
    assert again.salt != request.salt


async def test_the_bases_requests_end_where_weights_are_merged_under_them(stage: Stage) -> None:
    base = await stage.start("base", BASE_RULE)
    await stage.commit(ref(1), Swap.CONTINUE, merge=Merge.ROLLOUT)
    assert base.reason is FinishReason.ABORT
    assert base.made_by == [None]


async def test_merged_weights_start_from_the_base_each_time(stage: Stage) -> None:
    """faults.md 16, TRL#6688; what is merged is never taken out again by subtraction."""
    for version in (1, 2):
        await stage.commit(ref(version), merge=Merge.ROLLOUT)
    await stage.commit(ref(3))
    assert stage.registry.listing() == [ref(3)]
    assert [path is None for path in stage.engine.merges] == [False, False, True]


async def test_another_adapter_with_the_same_bytes_is_left_alone_by_continue(stage: Stage) -> None:
    """A reference that equals the policy's first version shares its slot."""
    other = Selector(Rule.LATEST, "other")
    twin = replace(ref(1, adapter="other"), digest=ref(1).digest)
    await stage.commit(ref(1))
    await stage.registry.alias(twin, source="trainer")
    requests = [await stage.start("policy"), await stage.start("reference", other)]
    await stage.commit(ref(2), Swap.CONTINUE)
    assert stage.registry.listing() == [ref(1), twin, ref(2)]
    await stage.run_out(*requests)
    assert [request.made_by for request in requests] == [[ref(1)] * TOKENS, [twin] * TOKENS]


@pytest.mark.parametrize("merge", Merge)
async def test_an_engine_that_dies_in_a_swap_begins_anew_with_what_was_served(
    stage: Stage, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md 26, dynamo#8630: what is listed and loaded again is the old version."""
    await stage.commit(ref(1), merge=merge)
    await stage.start("long")
    loaded = stage.registry.weights.loaded

    async def mark_weights(_: int) -> None:
        stage.engine.kill()
        raise EngineDead("the engine ended")

    monkeypatch.setattr(FakeEngine, "mark_weights", staticmethod(mark_weights))
    with pytest.raises(EngineDead):
        await stage.commit(ref(2), Swap.CONTINUE, merge=merge)
    monkeypatch.undo()
    assert stage.registry.weights.loaded == loaded
    async with stage.registry.stopped(grace_seconds=1, because="restart", is_dead=True):
        await stage.engine.restart()
        await stage.registry.reload()
    assert stage.registry.listing() == [ref(1)]
    again = await stage.start("again")
    await stage.run_out(again)
    assert again.made_by == [ref(1)] * TOKENS


async def test_an_adapter_gets_no_second_name_where_weights_are_merged(stage: Stage) -> None:
    await stage.commit(ref(1), merge=Merge.ROLLOUT)
    twin = replace(ref(1, adapter="other"), digest=ref(1).digest)
    with pytest.raises(Incompatible, match=r"default@1 .* is served as merged weights, alone"):
        await stage.registry.alias(twin, source="trainer")
    newer = replace(ref(2), digest=ref(1).digest)
    await stage.registry.alias(newer, source="trainer")
    assert stage.registry.listing() == [ref(1), newer]


async def test_a_dead_engine_is_started_anew_though_a_request_does_not_end(stage: Stage) -> None:
    await stage.commit(ref(1))
    async with stage.registry.admit(LATEST, request_id="stuck", wait_seconds=1):
        stage.engine.kill()
        async with stage.registry.stopped(grace_seconds=0.01, because="restart", is_dead=True):
            await stage.engine.restart()
            await stage.registry.reload()
        assert len(stage.engine.loaded) == 1


@pytest.mark.parametrize("swap", Swap)
async def test_latest_finds_a_version_at_every_moment_of_a_swap(
    stage: Stage, swap: Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.commit(ref(1))
    request = await stage.start("long")
    seen: list[list[AdapterRef]] = []

    def watched(name: str) -> None:
        original = getattr(FakeEngine, name)

        async def call(self: FakeEngine, *args: Any, **options: Any) -> Any:
            seen.append(stage.registry.listing())
            return await original(self, *args, **options)

        monkeypatch.setattr(FakeEngine, name, call)

    for name in ("load", "unload", "pause", "resume", "mark_weights"):
        watched(name)
    await stage.commit(ref(2), swap)
    assert seen and all(seen)
    await stage.run_out(request)
