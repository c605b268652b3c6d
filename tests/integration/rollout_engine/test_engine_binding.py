"""Every tensor of an adapter has its module in the live model, or is named with the reason."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rollout_svc.engine import BoundReport, EngineAdapter, MismatchReason
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    RANK,
    VOCAB,
    WIDTHS,
    AdapterMaker,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

NO_MODULE, NOT_ADAPTED = MismatchReason.NO_MODULE, MismatchReason.NOT_ADAPTED
SHAPE, RANK_ABOVE, KIND = MismatchReason.SHAPE, MismatchReason.RANK, MismatchReason.KIND
MODEL = "base_model.model."
LAYER = f"{MODEL}model.layers.0."
Found = dict[str, tuple[MismatchReason, str]]
_ids = itertools.count(9001)


async def load(engine: VllmEngine, path: Path) -> BoundReport:
    """Into a slot that is free again afterwards."""
    adapter_id = next(_ids)
    [report] = await engine.load(EngineAdapter(adapter_id, f"bound-{adapter_id}", path))
    await engine.unload(adapter_id)
    return report


def mismatches(report: BoundReport) -> Found:
    assert report.error == ""
    return {found.tensor: (found.reason, found.detail) for found in report.mismatches}


async def test_each_module_is_bound_once(engine: VllmEngine, adapters: AdapterMaker) -> None:
    _, path = adapters.make(seed=1)
    assert await load(engine, path) == BoundReport(0, LAYERS * len(WIDTHS), (), "")


async def test_names_that_match_nothing_are_listed(
    engine: VllmEngine, adapters: AdapterMaker
) -> None:
    """faults.md 8, vllm#55193, #34186, #48019: other layers, and other projections."""
    odd = f"{LAYER}self_attn.qkv_projection"
    more = {f"{odd}.lora_A.weight": (RANK, HIDDEN), f"{odd}.lora_B.weight": (HIDDEN, RANK)}
    _, path = adapters.make(seed=1, layers=(1, 7), more=more)
    names = [
        f"{MODEL}model.layers.7.{module}.{factor}.weight"
        for module in WIDTHS
        for factor in ("lora_A", "lora_B")
    ]
    report = await load(engine, path)
    assert mismatches(report) == dict.fromkeys([*names, *more], (NO_MODULE, ""))
    assert report.bound_modules == len(WIDTHS)


@pytest.mark.parametrize(
    ("module", "width_in", "width_out"),
    [
        ("model.embed_tokens", VOCAB, HIDDEN),
        ("lm_head", HIDDEN, VOCAB),
        ("model.norm", HIDDEN, HIDDEN),
        ("model.layers.0.input_layernorm", HIDDEN, HIDDEN),
        ("model.layers.0.self_attn", HIDDEN, HIDDEN),
    ],
)
async def test_modules_that_are_there_and_not_adapted_are_listed(
    engine: VllmEngine, adapters: AdapterMaker, module: str, width_in: int, width_out: int
) -> None:
    more = {
        f"{MODEL}{module}.lora_A.weight": (RANK, width_in),
        f"{MODEL}{module}.lora_B.weight": (width_out, RANK),
    }
    _, path = adapters.make(seed=1, more=more)
    assert mismatches(await load(engine, path)) == dict.fromkeys(more, (NOT_ADAPTED, ""))


async def test_factors_of_another_width_are_listed(
    engine: VllmEngine, adapters: AdapterMaker
) -> None:
    """Both factors, also of the parts of a packed linear; keys and values have fewer heads."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    wrong = {
        "self_attn.q_proj.lora_A": ((RANK, HIDDEN // 2), "in", HIDDEN // 2, HIDDEN),
        "self_attn.q_proj.lora_B": ((keys, RANK), "out", keys, queries),
        "self_attn.k_proj.lora_B": ((queries, RANK), "out", queries, keys),
        "self_attn.v_proj.lora_B": ((queries, RANK), "out", queries, keys),
        "mlp.up_proj.lora_B": ((2 * INTERMEDIATE, RANK), "out", 2 * INTERMEDIATE, INTERMEDIATE),
        "mlp.down_proj.lora_A": ((RANK, HIDDEN), "in", HIDDEN, INTERMEDIATE),
    }
    _, path = adapters.make(
        seed=1, more={f"{LAYER}{name}.weight": shape for name, (shape, *_) in wrong.items()}
    )
    assert mismatches(await load(engine, path)) == {
        f"{LAYER}{name}.weight": (SHAPE, f"{width} {side}_features, the module has {expected}")
        for name, (_, side, width, expected) in wrong.items()
    }


async def test_ranks_over_the_limit_are_listed(engine: VllmEngine, adapters: AdapterMaker) -> None:
    name = f"{LAYER}self_attn.o_proj"
    more = {
        f"{name}.lora_A.weight": (2 * RANK, HIDDEN),
        f"{name}.lora_B.weight": (HIDDEN, 2 * RANK),
    }
    _, path = adapters.make(seed=1, more=more)
    detail = f"rank {2 * RANK}, a slot takes up to {RANK}"
    assert mismatches(await load(engine, path)) == dict.fromkeys(more, (RANK_ABOVE, detail))


async def test_tensors_of_other_kinds_are_listed(
    engine: VllmEngine, adapters: AdapterMaker
) -> None:
    odd: dict[str, tuple[int, ...]] = {
        f"{MODEL}model.embed_tokens.lora_embedding_A": (RANK, VOCAB),
        f"{MODEL}model.embed_tokens.lora_embedding_B": (HIDDEN, RANK),
        f"{MODEL}lm_head.weight": (VOCAB, HIDDEN),
        f"{LAYER}self_attn.q_proj.lora_B.bias": (HIDDEN,),
        f"{LAYER}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    }
    magnitude = f"{LAYER}self_attn.q_proj.lora_magnitude_vector"
    _, path = adapters.make(seed=1, more={**odd, magnitude: (HIDDEN,)})
    assert mismatches(await load(engine, path)) == {
        **dict.fromkeys(odd, (KIND, "no factor of a linear layer")),
        magnitude: (KIND, "a LoRA slot takes no DoRA"),
    }


async def test_an_adapter_with_a_mismatch_takes_no_slot(
    engine: VllmEngine, adapters: AdapterMaker
) -> None:
    """faults.md 26: what is refused was not there at any time."""
    before = await engine.llm.list_loras()
    _, path = adapters.make(seed=1, narrower=2)
    adapter_id = next(_ids)
    [report] = await engine.load(EngineAdapter(adapter_id, "refused", path))
    assert len(report.mismatches) == LAYERS * len(WIDTHS)
    assert await engine.llm.list_loras() == before


async def test_a_directory_that_cannot_be_read_is_the_engines_refusal(
    engine: VllmEngine, tmp_path: Path
) -> None:
    report = await load(engine, tmp_path / "absent")
    assert report.error.startswith("FileNotFoundError: No such file or directory: ")
