"""Manifests across the wire, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from refit.v1 import adapter_pb2, tensor_pb2

from common.adapter import (
    AdapterRef,
    Canary,
    CanarySequence,
    Dtype,
    Kind,
    Layout,
    LoraConfig,
    Manifest,
    TensorSpec,
)
from common.errors import CorruptUpdate, InvalidField
from common.wire import ManifestReader, crc32c, manifest_to_proto, ref_to_proto
from tests.adapters import make_adapter, make_ref
from tests.whole_weights import make_weights

MANIFEST, _ = make_adapter()
REF = make_ref(MANIFEST)
CANARY = Canary((CanarySequence((5, 6, 7), (-0.25, -2.0)),), max_difference=0.125)

Message: TypeAlias = adapter_pb2.AdapterManifest
Page: TypeAlias = adapter_pb2.ManifestTensors


def _message(manifest: Manifest = MANIFEST, *, ref: AdapterRef = REF) -> Message:
    return manifest_to_proto(ref, manifest, canary=CANARY)[0]


def _read(message: Message, *pages: Page) -> Manifest:
    reader = ManifestReader(message)
    for page in pages:
        assert not reader.complete
        reader.add(page)
    assert reader.complete
    return reader.manifest()


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("page_tensors", [1, 3, 4])
def test_manifest_survives_the_wire(dtype: Dtype, page_tensors: int) -> None:
    """faults.md 17, verl#3675: each dtype arrives as it left."""
    manifest, _ = make_adapter(dtype=dtype)
    first, pages = manifest_to_proto(make_ref(manifest), manifest, page_tensors=page_tensors)
    received = [Page.FromString(page.SerializeToString()) for page in pages]

    assert len(received) == -(-4 // page_tensors) - 1
    assert _read(Message.FromString(first.SerializeToString()), *received) == manifest


SHAPES = {1: (6,), 2: (2, 3), 3: (1, 2, 3)}
FACTORS = [layout for layout in Layout if layout is not Layout.WEIGHT]
FULL = LoraConfig(
    *(2, 0.5, ("q_proj",), True, True),
    rank_pattern=(("model.layers.0.x", 1), ("x", 3)),
    alpha_pattern=(("x", 1.5),),
)


def _full() -> Manifest:
    """A manifest with every layout, and with every field of its configuration set."""
    specs = [
        TensorSpec(layout.name, Dtype.FLOAT16, SHAPES[dimensions], layout, 12 * n, bytes(32))
        for n, layout in enumerate(FACTORS)
        if (dimensions := layout.dimensions)
    ]
    return Manifest("base", FULL, tuple(specs))


def test_every_layout_and_the_whole_configuration_survive_the_wire() -> None:
    manifest = _full()
    message, _ = manifest_to_proto(make_ref(manifest), manifest)
    assert len(message.tensors) == len(FACTORS) == 9
    assert _read(Message.FromString(message.SerializeToString())) == manifest


@pytest.mark.parametrize("layout", FACTORS)
def test_every_layout_has_its_own_number_of_dimensions(layout: Layout) -> None:
    message, _ = manifest_to_proto(make_ref(_full()), _full())
    tensor = next(tensor for tensor in message.tensors if tensor.name == layout.name)
    tensor.shape.append(1)
    expected = rf"{layout.value} has {layout.dimensions} dimensions above 0"
    with pytest.raises(InvalidField, match=expected):
        ManifestReader(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lora: setattr(lora.rank_pattern[0], "rank", 0), "rank: 0; a LoRA rank is"),
        (lambda lora: setattr(lora.alpha_pattern[0], "alpha", -1.0), "alpha: -1.0; it must be"),
    ],
)
def test_patterns_are_checked_as_the_rest_is(
    change: Callable[[adapter_pb2.LoraConfig], object], message: str
) -> None:
    """faults.md 14, verl#5325: alpha <= 0 is refused."""
    full, _ = manifest_to_proto(make_ref(_full()), _full())
    change(full.lora)
    with pytest.raises(InvalidField, match=message):
        ManifestReader(full)


def test_what_is_beside_the_table_survives_too() -> None:
    message = _message()
    base = AdapterRef("run", "default", 7, b"x" * 32)
    message.delta_base.CopyFrom(ref_to_proto(base))
    reader = ManifestReader(Message.FromString(message.SerializeToString()))

    assert (reader.ref, reader.canary, reader.delta_base) == (REF, CANARY, base)


@pytest.mark.parametrize("kind", [Kind.MERGED, Kind.BASE])
def test_whole_weights_survive_the_wire(kind: Kind) -> None:
    """Of any shape and type, without a LoRA configuration."""
    content = make_weights(kind=kind)
    message = _message(content.manifest, ref=content.ref)
    assert not message.HasField("lora")
    assert _read(Message.FromString(message.SerializeToString())) == content.manifest


def test_kinds_have_different_digests() -> None:
    merged, base = (make_weights(kind=kind).manifest for kind in (Kind.MERGED, Kind.BASE))
    assert merged.tensors == base.tensors
    assert merged.digest() != base.digest()


def test_factors_and_weights_do_not_mix() -> None:
    content = make_weights()
    with_lora = _message(content.manifest, ref=content.ref)
    with_lora.lora.CopyFrom(_message().lora)
    with pytest.raises(InvalidField, match="lora: set with kind MERGED; leave it out"):
        ManifestReader(with_lora)
    for message, kind in (
        (_message(), adapter_pb2.ADAPTER_KIND_MERGED),
        (_message(content.manifest, ref=content.ref), adapter_pb2.ADAPTER_KIND_LORA),
    ):
        lora = _message().lora
        message.kind = kind
        message.ClearField("lora")
        if kind == adapter_pb2.ADAPTER_KIND_LORA:
            message.lora.CopyFrom(lora)
        with pytest.raises(InvalidField, match=r"with kind (MERGED|LORA); a LORA version"):
            ManifestReader(message)


def test_crc32c_has_the_check_value_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def _alias(message: Message) -> tensor_pb2.TensorSpec:
    return next(tensor for tensor in message.tensors if tensor.alias_of)


MUTATIONS: dict[str, tuple[Callable[[Message], object], str]] = {
    "no run": (lambda m: m.ref.ClearField("run_id"), "run_id"),
    "version 0": (lambda m: setattr(m.ref, "version", 0), "version: 0"),
    "short digest": (lambda m: setattr(m.ref, "digest", b"x"), "digest: 1 bytes"),
    "bad base": (lambda m: setattr(m.delta_base, "version", 1), "ref: run_id"),
    "no kind": (lambda m: m.ClearField("kind"), "kind"),
    "rank 0": (lambda m: setattr(m.lora, "rank", 0), "lora.rank: 0"),
    "alpha 0": (lambda m: setattr(m.lora, "alpha", 0.0), "lora.alpha: 0"),
    "alpha nan": (lambda m: setattr(m.lora, "alpha", float("nan")), "lora.alpha: nan"),
    "no targets": (lambda m: m.lora.ClearField("target_modules"), "target_modules"),
    "no tensors": (lambda m: m.ClearField("tensors"), "tensors: empty"),
    "no count": (lambda m: m.ClearField("tensor_count"), "tensor_count: 0"),
    "count of a flood": (lambda m: setattr(m, "tensor_count", 1 << 30), "tensor_count: 10737"),
    "more than counted": (lambda m: setattr(m, "tensor_count", 3), "tensor_count: 3, but 4"),
    "twice": (lambda m: m.tensors.append(m.tensors[0]), "name of its own"),
    "no layout": (lambda m: m.tensors[0].ClearField("layout"), "layout"),
    "no dtype": (lambda m: m.tensors[0].ClearField("dtype"), "dtype"),
    "negative": (lambda m: m.tensors[0].shape.__setitem__(0, -2), "shape"),
    "one dimension": (lambda m: m.tensors[0].shape.pop(), "shape"),
    "huge": (lambda m: m.tensors[0].shape.__setitem__(0, 1 << 60), "size_bytes"),
    "short tensor digest": (lambda m: setattr(m.tensors[0], "digest", b"x"), "has 1 bytes"),
    "hole": (lambda m: setattr(m.tensors[2], "offset_bytes", 1), "offset_bytes 1"),
    "alias of nobody": (lambda m: setattr(_alias(m), "alias_of", "x"), "no earlier tensor"),
    "alias differs": (lambda m: setattr(_alias(m), "digest", b"x" * 32), "differs from"),
    "total": (lambda m: setattr(m, "total_bytes", 1), "total_bytes: 1"),
    "canary of none": (lambda m: m.canary.ClearField("sequences"), "sequences: empty"),
    "canary of any": (lambda m: setattr(m.canary, "max_difference", 0.0), "max_difference: 0"),
    "canary short": (lambda m: m.canary.sequences[0].logprobs.pop(), "3 token_ids with 1"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_malformed_manifest_is_refused_naming_the_field(name: str) -> None:
    mutate, expected = MUTATIONS[name]
    message = _message()
    mutate(message)

    with pytest.raises(InvalidField, match=expected):
        _read(message)


def test_a_page_too_many_is_refused() -> None:
    reader = ManifestReader(_message())
    extra = tensor_pb2.TensorSpec()
    extra.CopyFrom(_message().tensors[0])
    extra.name, extra.offset_bytes = "extra", MANIFEST.total_bytes

    with pytest.raises(InvalidField, match="tensor_count: 4, but 5 tensors came"):
        reader.add(Page(tensors=[extra]))


def test_content_that_is_not_what_the_digest_says_is_corrupt() -> None:
    """faults.md 14, prime-rl#1729: another run's alpha cannot slip under a digest."""
    message = _message()
    message.lora.alpha *= 2

    with pytest.raises(CorruptUpdate, match="its content has digest"):
        _read(message)
