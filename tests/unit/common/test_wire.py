"""Manifests across the wire, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from refit.v1 import adapter_pb2, tensor_pb2

from common.adapter import Dtype
from common.errors import CorruptUpdate, InvalidField
from common.wire import crc32c, manifest_from_proto, manifest_to_proto
from tests.adapters import make_adapter, make_ref


@pytest.mark.parametrize("dtype", list(Dtype))
def test_manifest_survives_the_wire(dtype: Dtype) -> None:
    """faults.md 17, verl#3675: each dtype arrives as it left."""
    manifest, _ = make_adapter(dtype=dtype)
    ref = make_ref(manifest)
    data = manifest_to_proto(ref, manifest).SerializeToString()

    assert manifest_from_proto(adapter_pb2.AdapterManifest.FromString(data)) == (ref, manifest)


def test_crc32c_has_the_check_value_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def _alias(message: adapter_pb2.AdapterManifest) -> tensor_pb2.TensorSpec:
    return next(tensor for tensor in message.tensors if tensor.alias_of)


MUTATIONS: dict[str, tuple[Callable[[adapter_pb2.AdapterManifest], object], str]] = {
    "no run": (lambda m: m.ref.ClearField("run_id"), "run_id"),
    "version 0": (lambda m: setattr(m.ref, "version", 0), "version: 0"),
    "short digest": (lambda m: setattr(m.ref, "digest", b"x"), "digest: 1 bytes"),
    "no kind": (lambda m: m.ClearField("kind"), "kind"),
    "rank 0": (lambda m: setattr(m.lora, "rank", 0), "lora.rank: 0"),
    "alpha 0": (lambda m: setattr(m.lora, "alpha", 0.0), "lora.alpha: 0"),
    "alpha nan": (lambda m: setattr(m.lora, "alpha", float("nan")), "lora.alpha: nan"),
    "no targets": (lambda m: m.lora.ClearField("target_modules"), "target_modules"),
    "no tensors": (lambda m: m.ClearField("tensors"), "tensors: empty"),
    "twice": (lambda m: m.tensors.append(m.tensors[0]), "name of its own"),
    "no layout": (lambda m: m.tensors[0].ClearField("layout"), "layout"),
    "no dtype": (lambda m: m.tensors[0].ClearField("dtype"), "dtype"),
    "negative": (lambda m: m.tensors[0].shape.__setitem__(0, -2), "shape"),
    "huge": (lambda m: m.tensors[0].shape.__setitem__(0, 1 << 60), "size_bytes"),
    "hole": (lambda m: setattr(m.tensors[2], "offset_bytes", 1), "offset_bytes 1"),
    "alias of nobody": (lambda m: setattr(_alias(m), "alias_of", "x"), "no earlier tensor"),
    "alias differs": (lambda m: setattr(_alias(m), "digest", b"x" * 32), "differs from"),
    "total": (lambda m: setattr(m, "total_bytes", 1), "total_bytes: 1"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_malformed_manifest_is_refused_naming_the_field(name: str) -> None:
    mutate, expected = MUTATIONS[name]
    manifest, _ = make_adapter()
    message = manifest_to_proto(make_ref(manifest), manifest)
    mutate(message)

    with pytest.raises(InvalidField, match=expected):
        manifest_from_proto(message)


def test_content_that_is_not_what_the_digest_says_is_corrupt() -> None:
    """faults.md 14, prime-rl#1729: another run's alpha cannot slip under a digest."""
    manifest, _ = make_adapter()
    message = manifest_to_proto(make_ref(manifest), manifest)
    message.lora.alpha *= 2

    with pytest.raises(CorruptUpdate, match="its content has digest"):
        manifest_from_proto(message)
