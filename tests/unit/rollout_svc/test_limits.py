"""What a replica takes, by the manifest alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.adapter import Dtype, Kind, Layout, Manifest, TensorSpec
from common.errors import Incompatible
from rollout_svc.limits import Limits
from tests.adapters import make_adapter

MANIFEST, _ = make_adapter()
Q_A, Q_B = (spec.name for spec in MANIFEST.tensors if ".q_proj." in spec.name)


def refusal(limits: Limits, manifest: Manifest) -> str:
    with pytest.raises(Incompatible) as caught:
        limits.check(manifest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(which: str, **changes: object) -> Manifest:
    """The manifest with one tensor of it changed."""

    def change(spec: TensorSpec) -> TensorSpec:
        return replace(spec, **changes) if spec.name == which else spec  # type: ignore[arg-type]

    return replace(MANIFEST, tensors=tuple(map(change, MANIFEST.tensors)))


def test_what_is_at_every_limit_is_taken(limits: Limits) -> None:
    bytes_written_out = 64 + 64 + 64 + 32
    exact = replace(
        limits, max_rank=2, max_bytes=bytes_written_out, dtypes=frozenset({Dtype.FLOAT32})
    )
    exact.check(MANIFEST)
    assert refusal(replace(exact, max_bytes=bytes_written_out - 1), MANIFEST) == (
        "manifest.tensors: 224 bytes, this replica takes up to 223; raise max_update_bytes"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"kinds": frozenset({Kind.MERGED})},
            "manifest.kind: LORA, this replica takes MERGED; set the trainer's merge to match",
        ),
        (
            {"max_rank": 1},
            "manifest.lora.rank: 2, this replica takes up to 1; raise max_lora_rank",
        ),
        (
            {"target_modules": frozenset({"q_proj", "o_proj"})},
            "manifest.lora.target_modules: k_proj cannot take an adapter here; "
            "these can: o_proj, q_proj",
        ),
        ({"dtypes": frozenset({Dtype.FLOAT16})}, f"tensor {Q_A}: dtype F32 is not taken"),
    ],
)
def test_what_the_replica_cannot_serve_is_refused_with_both_sides(
    limits: Limits, change: dict[str, object], expected: str
) -> None:
    assert refusal(replace(limits, **change), MANIFEST) == expected  # type: ignore[arg-type]


def test_an_adapter_may_have_modules_of_smaller_ranks(limits: Limits) -> None:
    """One scale holds for all: what a module's own is lies in its B."""
    small: dict[str, tuple[int, ...]] = {Q_A: (1, 8), Q_B: (8, 1)}
    limits.check(_reshaped(small))
    small.pop(Q_B)
    assert "q_proj: {'lora_A': 1, 'lora_B': 2} differ in rank" in refusal(limits, _reshaped(small))


def _reshaped(shapes: dict[str, tuple[int, ...]]) -> Manifest:
    tensors = [replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in MANIFEST.tensors]
    return replace(MANIFEST, tensors=tuple(tensors))


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_scales_of_modules_are_refused(limits: Limits, field: str) -> None:
    assert MANIFEST.lora is not None
    lora = replace(MANIFEST.lora, **{field: (("q_proj", 2),)})  # type: ignore[arg-type]
    message = f"manifest.lora.{field}: set, replicas know one scale an adapter"
    assert message in refusal(limits, replace(MANIFEST, lora=lora))


def test_a_layout_that_the_engine_has_not_is_refused(limits: Limits) -> None:
    magnitude = replace(
        MANIFEST.tensors[0],
        name=Q_A.replace("lora_A.weight", "lora_magnitude_vector"),
        layout=Layout.MAGNITUDE,
        shape=(8,),
    )
    dora = replace(MANIFEST, tensors=(*MANIFEST.tensors, magnitude))
    message = "lora_magnitude_vector: layout magnitude, this replica takes lora_A, lora_B; send"
    assert message in refusal(limits, dora)
    replace(limits, layouts=frozenset(Layout)).check(dora)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (changed(Q_A, shape=(4, 4)), "shape (4, 4) has rank 4, the manifest says 2"),
        (changed(Q_B, shape=(2, 8)), "shape (2, 8) has rank 8, the manifest says 2"),
        (changed(Q_A, name="x.lora_A.bias"), "tagged lora_A, but not named so; use PEFT's names"),
        (changed(Q_A, name="lora_A.weight"), "tagged lora_A, but not named so; use PEFT's names"),
        (changed(Q_A, name="__metadata__"), "tagged lora_A, but not named so; use PEFT's names"),
        (changed(Q_A, layout=Layout.LORA_B, shape=(8, 2)), "tagged lora_B, but not named so"),
        (
            replace(MANIFEST, tensors=MANIFEST.tensors[:-1]),
            "module base_model.model.model.layers.0.self_attn.k_proj: has only one of lora_A and "
            "lora_B; send both",
        ),
    ],
)
def test_a_table_that_is_no_plain_adapter_is_refused(
    limits: Limits, manifest: Manifest, expected: str
) -> None:
    """faults.md 8, vllm#55193: what would find no place is refused by its name."""
    assert expected in refusal(limits, manifest)
