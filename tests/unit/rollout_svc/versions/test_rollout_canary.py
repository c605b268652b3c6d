from __future__ import annotations

from pathlib import Path

import pytest

from common.adapter import AdapterRef, Canary, CanarySequence
from common.errors import CanaryRefused, InvalidField, Unavailable
from rollout_svc.engine import EngineAdapter
from rollout_svc.versions import canary as canary_module
from rollout_svc.versions.canary import check_canary
from tests.fake_engine import FakeEngine

REF = AdapterRef("run", "default", 3, b"3" * 32)
ADAPTER = EngineAdapter(1, "default@3", Path("unused"))
CANARY = Canary(
    (CanarySequence((1, 2, 3), (-0.5, -0.75)), CanarySequence((4, 5), (-0.5,))),
    max_difference=0.1,
)


@pytest.fixture
async def engine() -> FakeEngine:
    """The adapter loaded, and -0.5 for every token."""
    engine = FakeEngine()
    await engine.load(ADAPTER)
    return engine


async def test_the_difference_is_the_mean_over_all_tokens_under_the_adapter(
    engine: FakeEngine,
) -> None:
    assert await check_canary(engine, ADAPTER, CANARY, ref=REF) == pytest.approx(0.25 / 3)
    assert engine.scored == [(ADAPTER, (1, 2, 3)), (ADAPTER, (4, 5))]


async def test_the_bound_itself_is_let_in(engine: FakeEngine) -> None:
    bound = Canary((CanarySequence((1, 2), (-0.75,)),), max_difference=0.25)
    assert await check_canary(engine, ADAPTER, bound, ref=REF) == 0.25


async def test_a_larger_difference_is_refused_with_both_figures(engine: FakeEngine) -> None:
    engine.score_logprob = -1.0
    with pytest.raises(CanaryRefused) as caught:
        await check_canary(engine, ADAPTER, CANARY, ref=REF)
    assert str(caught.value) == (
        "canary of default@3 (run run, 333333333333): log-probabilities differ by 0.4167 in the "
        "mean, at most 0.1 is let in; check that trainer and replica have the same base model and "
        "dtype, or raise the canary's bound"
    )


@pytest.mark.parametrize("score", [float("nan"), float("-inf")])
async def test_a_difference_that_is_no_number_is_refused(engine: FakeEngine, score: float) -> None:
    engine.score_logprob = score
    with pytest.raises(CanaryRefused, match=r"differ by (nan|inf)"):
        await check_canary(engine, ADAPTER, CANARY, ref=REF)


@pytest.mark.parametrize("token", [-1, 100])
async def test_a_token_the_model_lacks_never_reaches_the_engine(
    engine: FakeEngine, token: int
) -> None:
    bad = Canary((CanarySequence((1, token), (-0.5,)),), max_difference=0.1)
    with pytest.raises(CanaryRefused, match=f"token id {token}; the model's ids are 0 to 99"):
        await check_canary(engine, ADAPTER, bad, ref=REF)
    assert engine.scored == []


async def test_a_sequence_the_engine_cannot_take_is_refused() -> None:
    class Short(FakeEngine):
        async def score(
            self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]
        ) -> list[float]:
            raise InvalidField("request: 3 tokens are too many")

    with pytest.raises(CanaryRefused, match="3 tokens are too many; send shorter sequences"):
        await check_canary(Short(), ADAPTER, CANARY, ref=REF)


async def test_an_engine_that_does_not_score_is_waited_for_only_so_long(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md 23: every wait has a deadline."""
    monkeypatch.setattr(canary_module, "_DEADLINE_SECONDS", 0.05)
    engine.gate.clear()
    with pytest.raises(Unavailable, match="not scored within"):
        await check_canary(engine, ADAPTER, CANARY, ref=REF)
