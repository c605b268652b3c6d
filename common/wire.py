"""Translation between the messages of refit.v1 and the values of `common.adapter`.

Everything that arrives is checked here once; past this module a manifest is known to be sound.
"""

from __future__ import annotations

import google_crc32c
from refit.v1 import adapter_pb2, tensor_pb2, version_pb2

from common.adapter import AdapterRef, Dtype, Layout, LoraConfig, Manifest, TensorSpec
from common.errors import CorruptUpdate, InvalidField

CHUNK_BYTES = 1 << 20
"""Measured optimum for grpc.aio streams, and well under gRPC's default message limit of 4 MiB."""

_DTYPES = {
    Dtype.FLOAT32: tensor_pb2.DTYPE_FLOAT32,
    Dtype.BFLOAT16: tensor_pb2.DTYPE_BFLOAT16,
    Dtype.FLOAT16: tensor_pb2.DTYPE_FLOAT16,
}
_LAYOUTS = {
    Layout.LORA_A: tensor_pb2.TENSOR_LAYOUT_LORA_A,
    Layout.LORA_B: tensor_pb2.TENSOR_LAYOUT_LORA_B,
}
_DTYPES_IN = {value: key for key, value in _DTYPES.items()}
_LAYOUTS_IN = {value: key for key, value in _LAYOUTS.items()}


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of a chunk."""
    return int(google_crc32c.value(data))


def dtype_to_proto(dtype: Dtype) -> tensor_pb2.Dtype:
    return _DTYPES[dtype]


def dtype_from_proto(dtype: tensor_pb2.Dtype, *, field: str) -> Dtype:
    if dtype not in _DTYPES_IN:
        raise InvalidField(f"{field}: {dtype} is no known dtype; send one of {sorted(_DTYPES_IN)}")
    return _DTYPES_IN[dtype]


def ref_to_proto(ref: AdapterRef) -> version_pb2.AdapterRef:
    return version_pb2.AdapterRef(
        run_id=ref.run_id, adapter=ref.adapter, version=ref.version, digest=ref.digest
    )


def ref_from_proto(msg: version_pb2.AdapterRef) -> AdapterRef:
    """Raises `InvalidField` where a part of the name is missing or malformed."""
    if not msg.run_id or not msg.adapter:
        raise InvalidField("ref: run_id and adapter are both needed; one is empty")
    if msg.version < 1:
        raise InvalidField(f"ref.version: {msg.version}; versions begin at 1")
    if len(msg.digest) != 32:
        raise InvalidField(f"ref.digest: {len(msg.digest)} bytes; a digest has 32")
    return AdapterRef(msg.run_id, msg.adapter, msg.version, msg.digest)


def manifest_to_proto(ref: AdapterRef, manifest: Manifest) -> adapter_pb2.AdapterManifest:
    lora = manifest.lora
    return adapter_pb2.AdapterManifest(
        ref=ref_to_proto(ref),
        kind=adapter_pb2.ADAPTER_KIND_LORA,
        base_fingerprint=manifest.base_fingerprint,
        lora=adapter_pb2.LoraConfig(
            rank=lora.rank,
            alpha=lora.alpha,
            target_modules=lora.target_modules,
            use_rslora=lora.use_rslora,
        ),
        tensors=[_spec_to_proto(spec) for spec in manifest.tensors],
        total_bytes=manifest.total_bytes,
    )


def _spec_to_proto(spec: TensorSpec) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(
        name=spec.name,
        dtype=_DTYPES[spec.dtype],
        shape=spec.shape,
        layout=_LAYOUTS[spec.layout],
        offset_bytes=0 if spec.alias_of else spec.offset_bytes,
        size_bytes=spec.size_bytes,
        alias_of=spec.alias_of,
        digest=spec.digest,
    )


def manifest_from_proto(msg: adapter_pb2.AdapterManifest) -> tuple[AdapterRef, Manifest]:
    """Check a manifest whole and return it as a value.

    Raises:
        InvalidField: a field is missing, malformed or contradicts another.
        CorruptUpdate: the content's digest is not the one that `ref` names.
    """
    ref = ref_from_proto(msg.ref)
    if msg.kind != adapter_pb2.ADAPTER_KIND_LORA:
        raise InvalidField(f"manifest.kind: {msg.kind}; this version takes ADAPTER_KIND_LORA only")
    manifest = Manifest(msg.base_fingerprint, _lora_from_proto(msg.lora), _specs_from_proto(msg))
    if manifest.total_bytes != msg.total_bytes:
        raise InvalidField(
            f"manifest.total_bytes: {msg.total_bytes}, but the tensors sum to "
            f"{manifest.total_bytes}"
        )
    if manifest.digest() != ref.digest:
        raise CorruptUpdate(
            f"manifest of {ref}: its content has digest {manifest.digest().hex()[:12]}; "
            "publish it again as a new version"
        )
    return ref, manifest


def _lora_from_proto(msg: adapter_pb2.LoraConfig) -> LoraConfig:
    if msg.rank < 1:
        raise InvalidField(f"manifest.lora.rank: {msg.rank}; a LoRA rank is at least 1")
    if not 0 < msg.alpha < float("inf"):
        raise InvalidField(f"manifest.lora.alpha: {msg.alpha}; it must be above 0 and finite")
    if not msg.target_modules:
        raise InvalidField("manifest.lora.target_modules: empty; name the adapted projections")
    return LoraConfig(msg.rank, msg.alpha, tuple(msg.target_modules), msg.use_rslora)


def _specs_from_proto(msg: adapter_pb2.AdapterManifest) -> tuple[TensorSpec, ...]:
    if not msg.tensors:
        raise InvalidField("manifest.tensors: empty; an adapter has at least one tensor")
    specs: dict[str, TensorSpec] = {}
    end_bytes = 0
    for tensor in msg.tensors:
        spec = _spec_from_proto(tensor, specs, end_bytes)
        specs[spec.name] = spec
        end_bytes += 0 if spec.alias_of else spec.size_bytes
    return tuple(specs.values())


def _spec_from_proto(
    msg: tensor_pb2.TensorSpec, earlier: dict[str, TensorSpec], end_bytes: int
) -> TensorSpec:
    field = f"manifest.tensors[{len(earlier)}] ({msg.name!r})"
    if not msg.name or msg.name in earlier:
        raise InvalidField(f"{field}: every tensor needs a name of its own")
    if msg.layout not in _LAYOUTS_IN:
        raise InvalidField(f"{field}: layout {msg.layout} is none this version knows")
    if len(msg.shape) != 2 or min(msg.shape) < 1:
        raise InvalidField(f"{field}: shape {list(msg.shape)}; LoRA factors have two dimensions")
    if len(msg.digest) != 32:
        raise InvalidField(f"{field}: digest has {len(msg.digest)} bytes instead of 32")
    dtype, source = dtype_from_proto(msg.dtype, field=field), earlier.get(msg.alias_of)
    if msg.alias_of and source is None:
        raise InvalidField(f"{field}: alias_of {msg.alias_of!r} names no earlier tensor")
    spec = TensorSpec(
        name=msg.name,
        dtype=dtype,
        shape=tuple(msg.shape),
        layout=_LAYOUTS_IN[msg.layout],
        offset_bytes=source.offset_bytes if source else msg.offset_bytes,
        digest=msg.digest,
        alias_of=msg.alias_of,
    )
    if spec.size_bytes != msg.size_bytes:
        raise InvalidField(
            f"{field}: size_bytes {msg.size_bytes}; its shape says {spec.size_bytes}"
        )
    if source is None and msg.offset_bytes != end_bytes:
        raise InvalidField(
            f"{field}: offset_bytes {msg.offset_bytes}; the tensor before it ends at {end_bytes}"
        )
    if source and (source.alias_of or _content(source) != _content(spec)):
        raise InvalidField(f"{field}: differs from {msg.alias_of!r}, whose alias it claims to be")
    return spec


def _content(spec: TensorSpec) -> tuple[Dtype, tuple[int, ...], bytes]:
    return spec.dtype, spec.shape, spec.digest
