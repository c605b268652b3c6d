"""vLLM's errors and end words at the seam; no engine is started."""

from __future__ import annotations

import pytest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from common.errors import RefitError, Unavailable
from rollout_svc.engine import EngineDead, FinishReason
from rollout_svc.vllm_engine import _finish_reason, _rpc


async def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Exception("Call to refit_load failed"), Unavailable, "engine: Call to refit_load failed"),
        (EngineGenerateError(), Unavailable, "engine: it failed to generate"),
        (EngineDeadError(), EngineDead, "the vLLM engine process ended"),
        (Unavailable("engine: busy"), Unavailable, "engine: busy"),
    ],
)
async def test_whatever_a_call_raises_is_a_domain_error(
    error: Exception, kind: type[RefitError], text: str
) -> None:
    """An update whose load fails is refused; only a dead engine ends the replica."""
    with pytest.raises(RefitError) as caught:
        await _rpc(failing(error))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (None, None),
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
        ("error", FinishReason.ABORT),
        ("repetition", FinishReason.ABORT),
    ],
)
def test_a_completion_that_vllm_gave_up_is_aborted(
    word: str | None, reason: FinishReason | None
) -> None:
    assert _finish_reason(word) is reason
