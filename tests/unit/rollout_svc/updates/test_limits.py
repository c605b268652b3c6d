"""What a replica takes, by the manifest alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.adapter import Dtype, ExpertLayout, Kind, Layout, Manifest, TensorSpec
from common.errors import Incompatible
from rollout_svc.engine import Capabilities, Merging, MismatchReason
from rollout_svc.updates.limits import Limits, Takes
from rollout_svc.versions.binding import Unbound
from tests.adapters import make_adapter

MANIFEST, _ = make_adapter()
Q_A, Q_B = (spec.name for spec in MANIFEST.tensors if ".q_proj." in spec.name)
K_A, K_B = (spec.name for spec in MANIFEST.tensors if ".k_proj." in spec.name)
MAGNITUDE = Q_A.replace("lora_A.weight", "lora_magnitude_vector")
FACTORS = frozenset(ExpertLayout.PER_EXPERT.factors)


def refusal(limits: Limits, manifest: Manifest, *, merge: bool = False) -> str:
    with pytest.raises(Incompatible) as caught:
        limits.check(manifest, merge=merge)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unbound(
    limits: Limits, manifest: Manifest, *, merge: bool = False
) -> list[tuple[str, MismatchReason, str]]:
    """The mismatches of a refusal."""
    with pytest.raises(Unbound) as caught:
        limits.check(manifest, merge=merge)
    return [(found.tensor, found.reason, found.detail) for found in caught.value.mismatches]


def slots(limits: Limits, **changes: object) -> Limits:
    """The same with other slots."""
    assert limits.slots is not None
    return replace(limits, slots=replace(limits.slots, **changes))  # type: ignore[arg-type]


def changed(which: str, **changes: object) -> Manifest:
    """The manifest with one tensor of it changed."""

    def change(spec: TensorSpec) -> TensorSpec:
        return replace(spec, **changes) if spec.name == which else spec  # type: ignore[arg-type]

    return replace(MANIFEST, tensors=tuple(map(change, MANIFEST.tensors)))


def test_what_is_at_every_limit_is_taken(limits: Limits) -> None:
    bytes_written_out = 64 + 64 + 64 + 32
    exact = replace(
        slots(limits, max_rank=2), max_bytes=bytes_written_out, dtypes=frozenset({Dtype.FLOAT32})
    )
    exact.check(MANIFEST)
    assert refusal(replace(exact, max_bytes=bytes_written_out - 1), MANIFEST) == (
        "manifest.tensors: 224 bytes, this replica takes up to 223; raise max_update_bytes"
    )


def test_a_kind_that_the_replica_cannot_serve_is_refused(limits: Limits) -> None:
    assert refusal(replace(limits, kinds=frozenset({Kind.MERGED})), MANIFEST) == (
        "manifest.kind: LORA, this replica takes MERGED; set the trainer's merge to match"
    )


@pytest.mark.parametrize(
    ("change", "expected", "mismatches"),
    [
        (
            {"max_rank": 1},
            "manifest.lora.rank: 2, this replica takes up to 1; raise max_lora_rank",
            [
                (name, MismatchReason.RANK, "rank 2, a slot takes up to 1")
                for name in (Q_A, K_A, Q_B, K_B)
            ],
        ),
        (
            {"target_modules": frozenset({"q_proj", "o_proj"})},
            "manifest.lora.target_modules: k_proj cannot take an adapter here; "
            "these can: o_proj, q_proj",
            [
                (name, MismatchReason.NOT_ADAPTED, "k_proj cannot take an adapter here")
                for name in (K_A, K_B)
            ],
        ),
    ],
)
def test_what_a_slot_cannot_take_is_refused_with_both_sides_and_every_tensor(
    limits: Limits,
    change: dict[str, object],
    expected: str,
    mismatches: list[tuple[str, MismatchReason, str]],
) -> None:
    assert refusal(slots(limits, **change), MANIFEST) == expected
    assert unbound(slots(limits, **change), MANIFEST) == mismatches


def test_every_tensor_without_a_place_is_named_with_its_own_reason(limits: Limits) -> None:
    """faults.md 8, vllm#55193: all of them at once, before any byte."""
    odd = {
        Q_A: {"name": "base_model.model.model.embed_tokens.lora_embedding_A"},
        Q_B: {"name": "base_model.model.lm_head.lora_B.weight"},
        K_A: {"shape": (9, 8)},
        K_B: {"dtype": Dtype.FLOAT16},
    }
    specs = [replace(spec, **odd[spec.name]) for spec in MANIFEST.tensors]  # type: ignore[arg-type]
    manifest = replace(MANIFEST, tensors=tuple(specs))
    assert unbound(replace(limits, dtypes=frozenset({Dtype.FLOAT32})), manifest) == [
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            MismatchReason.KIND,
            "no factor of a linear layer, as PEFT names them",
        ),
        (K_A, MismatchReason.RANK, "rank 9, a slot takes up to 8"),
        (
            "base_model.model.lm_head.lora_B.weight",
            MismatchReason.NOT_ADAPTED,
            "lm_head cannot take an adapter here",
        ),
        (K_B, MismatchReason.KIND, "dtype F16 is not taken"),
    ]


def test_what_is_merged_has_its_own_limits(limits: Limits) -> None:
    """No bound on the rank, and DoRA where the engine says so; slots still refuse both."""
    merging = Takes(frozenset({"q_proj", "k_proj"}), FACTORS | {Layout.MAGNITUDE})
    both = replace(slots(limits, max_rank=1), merging=merging)
    magnitude = replace(MANIFEST.tensors[0], name=MAGNITUDE, layout=Layout.MAGNITUDE, shape=(8,))
    assert MANIFEST.lora is not None
    dora = replace(
        MANIFEST,
        tensors=(*MANIFEST.tensors, magnitude),
        lora=replace(MANIFEST.lora, use_dora=True),
    )
    both.check(dora, merge=True)
    assert {name for name, _, _ in unbound(both, dora)} == {Q_A, Q_B, K_A, K_B, MAGNITUDE}
    narrow = replace(both, merging=replace(merging, target_modules=frozenset({"q_proj"})))
    assert [name for name, _, _ in unbound(narrow, dora, merge=True)] == [K_A, K_B]


def test_a_merge_rule_that_the_replica_cannot_follow_is_refused(limits: Limits) -> None:
    assert refusal(limits, MANIFEST, merge=True) == (
        "manifest.merge: ROLLOUT, this replica serves NEVER only; send so"
    )
    without_slots = replace(limits, slots=None, merging=limits.slots)
    without_slots.check(MANIFEST, merge=True)
    assert refusal(without_slots, MANIFEST) == (
        "manifest.merge: NEVER, this replica serves ROLLOUT only; send so"
    )


def test_limits_are_those_of_the_engine() -> None:
    capabilities = Capabilities(
        max_rank=8,
        target_modules=("q_proj",),
        dtypes=(Dtype.FLOAT32,),
        max_loras=2,
        max_model_len=16,
        vocab_size=100,
        merging=Merging(("o_proj",), (Layout.LORA_A,)),
    )
    expected = Limits(
        kinds=frozenset({Kind.LORA}),
        dtypes=frozenset({Dtype.FLOAT32}),
        max_bytes=7,
        slots=Takes(frozenset({"q_proj"}), FACTORS, 8),
        merging=Takes(frozenset({"o_proj"}), frozenset({Layout.LORA_A})),
    )
    assert Limits.of(capabilities, max_bytes=7) == expected
    slotless = replace(capabilities, max_loras=0, merging=None)
    assert Limits.of(slotless, max_bytes=7) == replace(expected, slots=None, merging=None)


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


def test_dora_is_refused_by_slots_in_words(limits: Limits) -> None:
    assert MANIFEST.lora is not None
    dora = replace(MANIFEST, lora=replace(MANIFEST.lora, use_dora=True))
    assert refusal(limits, dora) == (
        "manifest.lora.use_dora: set, this replica serves no DoRA so; merge it, here or at the "
        "trainer"
    )


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (changed(Q_A, shape=(4, 4)), "shape (4, 4) has rank 4, the manifest says 2"),
        (changed(Q_B, shape=(2, 8)), "shape (2, 8) has rank 8, the manifest says 2"),
        (
            changed(Q_A, name="x.lora_A.bias"),
            "manifest: 1 tensors found no module: x.lora_A.bias (no",
        ),
        (changed(Q_A, name="lora_A.weight"), "lora_A.weight (no factor of a linear layer, as PEFT"),
        (changed(Q_A, name="__metadata__"), "__metadata__ (no factor of a linear layer, as PEFT"),
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
