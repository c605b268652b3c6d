"""Whole weights that a real engine cannot take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import Incompatible
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.vllm_engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    AdapterMaker,
    logprobs,
    sample,
    tokens,
)
from tests.integration.weights_engine.weights import (
    staged,
    weights_content,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

TRAINER = "trainer:50051"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)},
            r"1 tensors found no module: model\.layers\.9\.mlp\.up_proj\.weight",
        ),
        (
            lambda w: {name: w[name] for name in w if "layers.1.mlp.down_proj" not in name},
            r"no tensor fills 1 parameters, as model\.layers\.1\.mlp\.down_proj\.base_layer",
        ),
        (lambda w: w | {"model.norm.weight": torch.zeros(7)}, "the engine refused it"),
    ],
)
async def test_weights_that_do_not_fit_leave_the_engine_as_it_was(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    model_dir: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    """faults.md 8 and 26: refused by name; what half a load has changed is loaded again."""
    before = await sample(engine, None)
    adapter, _ = adapters.make(seed=5)
    weights = change(load_file(model_dir / "model.safetensors"))
    bad = weights_content(weights, adapter)
    with pytest.raises(Incompatible, match=message):
        await registry.commit(bad, staged(bad, tmp_path / "bad"), source=TRAINER)
    registry.weights.check_whole()
    after = await sample(engine, None, cache_salt="never used before")
    assert (tokens(after), logprobs(after)) == (tokens(before), logprobs(before))
    assert registry.listing() == []
