"""Translation between the messages of refit.v1 and the values of `common.adapter`.

Everything that arrives is checked here once; past this module a manifest is known to be sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, TypeAlias

import crc32c as _crc32c
from refit.v1 import adapter_pb2, tensor_pb2, version_pb2

from common.adapter import (
    AdapterRef,
    Canary,
    Dtype,
    Kind,
    Layout,
    LoraConfig,
    Manifest,
    TensorSpec,
)
from common.canary_wire import canary_from_proto, canary_to_proto
from common.errors import CorruptUpdate, InvalidField
from common.lora_wire import lora_from_proto, lora_to_proto
from common.rules import (
    Rules,
    merge_from_proto,
    merge_to_proto,
    swap_from_proto,
    swap_to_proto,
)

CHUNK_BYTES = 1 << 20
"""Measured optimum for grpc.aio streams, and well under gRPC's default message limit of 4 MiB."""

MAX_CHUNK_BYTES = 4 << 20

PAGE_TENSORS = 1024
"""Tensors in one message of a manifest: some 200 KiB, and 10 ms of the event loop."""

MAX_TENSORS = 1 << 18
"""More than any adapter has, and few enough to be held."""

_DTYPES = {
    Dtype.FLOAT32: tensor_pb2.DTYPE_FLOAT32,
    Dtype.BFLOAT16: tensor_pb2.DTYPE_BFLOAT16,
    Dtype.FLOAT16: tensor_pb2.DTYPE_FLOAT16,
}
_LAYOUTS: dict[Layout, tensor_pb2.TensorLayout] = {
    layout: getattr(tensor_pb2, f"TENSOR_LAYOUT_{layout.name}") for layout in Layout
}
_KINDS = {
    Kind.LORA: adapter_pb2.ADAPTER_KIND_LORA,
    Kind.MERGED: adapter_pb2.ADAPTER_KIND_MERGED,
    Kind.BASE: adapter_pb2.ADAPTER_KIND_BASE,
}
_DTYPES_IN = {value: key for key, value in _DTYPES.items()}
_LAYOUTS_IN = {value: key for key, value in _LAYOUTS.items()}
_KINDS_IN = {value: key for key, value in _KINDS.items()}


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of a chunk."""
    return int(_crc32c.crc32c(data))


def dtype_to_proto(dtype: Dtype) -> tensor_pb2.Dtype:
    return _DTYPES[dtype]


def dtype_from_proto(dtype: tensor_pb2.Dtype, *, field: str) -> Dtype:
    if dtype not in _DTYPES_IN:
        raise InvalidField(f"{field}: {dtype} is no known dtype; send one of {sorted(_DTYPES_IN)}")
    return _DTYPES_IN[dtype]


def layout_to_proto(layout: Layout) -> tensor_pb2.TensorLayout:
    return _LAYOUTS[layout]


def layout_from_proto(layout: tensor_pb2.TensorLayout, *, field: str) -> Layout:
    if layout not in _LAYOUTS_IN:
        raise InvalidField(f"{field}: {layout} is no known layout; send one of its enum")
    return _LAYOUTS_IN[layout]


def kind_to_proto(kind: Kind) -> adapter_pb2.AdapterKind:
    return _KINDS[kind]


def kind_from_proto(kind: adapter_pb2.AdapterKind, *, field: str) -> Kind:
    if kind not in _KINDS_IN:
        raise InvalidField(f"{field}: {kind} is no known kind; send one of {sorted(_KINDS_IN)}")
    return _KINDS_IN[kind]


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


ManifestMessage: TypeAlias = adapter_pb2.AdapterManifest | adapter_pb2.ManifestTensors


def manifest_to_proto(
    ref: AdapterRef,
    manifest: Manifest,
    *,
    canary: Canary | None = None,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    page_tensors: int = PAGE_TENSORS,
) -> tuple[adapter_pb2.AdapterManifest, Iterator[adapter_pb2.ManifestTensors]]:
    """A manifest with the first page of its table; the other pages, each made when asked for."""
    lora, specs = manifest.lora, manifest.tensors
    message = adapter_pb2.AdapterManifest(
        ref=ref_to_proto(ref),
        kind=_KINDS[manifest.kind],
        base_fingerprint=manifest.base_fingerprint,
        lora=lora_to_proto(lora) if lora else None,
        tensors=map(_spec_to_proto, specs[:page_tensors]),
        total_bytes=manifest.total_bytes,
        tensor_count=len(specs),
        canary=canary_to_proto(canary) if canary else None,
        swap=swap_to_proto(rules.swap),
        merge=merge_to_proto(rules.merge),
    )
    pages = (
        adapter_pb2.ManifestTensors(tensors=map(_spec_to_proto, specs[at : at + page_tensors]))
        for at in range(page_tensors, len(specs), page_tensors)
    )
    return message, pages


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


class ManifestReader:
    """A manifest that arrives in pages, each checked as it comes.

        reader = ManifestReader(message)
        while not reader.complete:
            reader.add(next_page)
        manifest = reader.manifest()

    Raises:
        InvalidField: a field is missing, malformed or contradicts another.
    """

    def __init__(self, msg: adapter_pb2.AdapterManifest) -> None:
        self.ref = ref_from_proto(msg.ref)
        self.kind = kind_from_proto(msg.kind, field="manifest.kind")
        if not 0 < msg.tensor_count <= MAX_TENSORS:
            raise InvalidField(
                f"manifest.tensor_count: {msg.tensor_count}; give 1 to {MAX_TENSORS}"
            )
        self.canary = canary_from_proto(msg.canary) if msg.HasField("canary") else None
        self.delta_base = ref_from_proto(msg.delta_base) if msg.HasField("delta_base") else None
        self.base_fingerprint = msg.base_fingerprint
        self._lora = self._read_lora(msg)
        self.rules = self._read_rules(msg)
        self._tensor_count, self._total_bytes = msg.tensor_count, msg.total_bytes
        self._specs: dict[str, TensorSpec] = {}
        self._end_bytes = 0
        self.add(msg)

    @property
    def complete(self) -> bool:
        return len(self._specs) == self._tensor_count

    def add(self, page: ManifestMessage) -> None:
        """Take more of the table."""
        if not page.tensors:
            raise InvalidField("manifest.tensors: empty; every page has at least one tensor")
        for tensor in page.tensors:
            spec = _spec_from_proto(tensor, self._specs, self._end_bytes)
            self._check_layout(spec)
            self._specs[spec.name] = spec
            self._end_bytes += 0 if spec.alias_of else spec.size_bytes
        if len(self._specs) > self._tensor_count:
            raise InvalidField(
                f"manifest.tensor_count: {self._tensor_count}, but {len(self._specs)} tensors came"
            )

    def _read_rules(self, msg: adapter_pb2.AdapterManifest) -> Rules:
        merge = merge_from_proto(msg.merge, field="manifest.merge")
        if merge and self.kind is not Kind.LORA:
            raise InvalidField(
                f"manifest.merge: set with {self.kind.name}; leave it out, it is for adapters"
            )
        return Rules(swap_from_proto(msg.swap, field="manifest.swap"), merge)

    def _read_lora(self, msg: adapter_pb2.AdapterManifest) -> LoraConfig | None:
        if self.kind is Kind.LORA:
            return lora_from_proto(msg.lora)
        if msg.HasField("lora"):
            raise InvalidField(f"manifest.lora: set with kind {self.kind.name}; leave it out")
        return None

    def _check_layout(self, spec: TensorSpec) -> None:
        if (spec.layout is Layout.WEIGHT) is (self.kind is Kind.LORA):
            raise InvalidField(
                f"manifest.tensors ({spec.name!r}): layout {spec.layout.name} with kind "
                f"{self.kind.name}; a LORA version holds factors, any other whole weights"
            )

    def manifest(self) -> Manifest:
        """The whole of it.

        Raises:
            InvalidField: the sizes do not add up.
            CorruptUpdate: the content's digest is not the one that `ref` names.
        """
        specs = tuple(self._specs.values())
        manifest = Manifest(self.base_fingerprint, self._lora, specs, self.kind)
        if self._end_bytes != self._total_bytes:
            raise InvalidField(
                f"manifest.total_bytes: {self._total_bytes}, but the tensors sum to "
                f"{self._end_bytes}"
            )
        if (found := manifest.digest()) != self.ref.digest:
            raise CorruptUpdate(
                f"manifest of {self.ref}: its content has digest {found.hex()[:12]}; "
                "publish it again as a new version"
            )
        return manifest


def _spec_from_proto(
    msg: tensor_pb2.TensorSpec, earlier: dict[str, TensorSpec], end_bytes: int
) -> TensorSpec:
    def fail(problem: str) -> NoReturn:
        raise InvalidField(f"manifest.tensors[{len(earlier)}] ({msg.name!r}): {problem}")

    name, shape, alias_of, digest = msg.name, tuple(msg.shape), msg.alias_of, msg.digest
    dtype, layout = _DTYPES_IN.get(msg.dtype), _LAYOUTS_IN.get(msg.layout)
    if not name or name in earlier:
        fail("every tensor needs a name of its own")
    if dtype is None:
        fail(f"{msg.dtype} is no known dtype; send one of {sorted(_DTYPES_IN)}")
    if layout is None:
        fail(f"layout {msg.layout} is none this version knows")
    if min(shape, default=1) < 1 or layout.dimensions not in (None, len(shape)):
        fail(f"shape {list(shape)}; {layout.value} has {layout.dimensions} dimensions above 0")
    if len(digest) != 32:
        fail(f"digest has {len(digest)} bytes instead of 32")
    source = earlier.get(alias_of)
    if alias_of and source is None:
        fail(f"alias_of {alias_of!r} names no earlier tensor")
    offset_bytes = source.offset_bytes if source else msg.offset_bytes
    spec = TensorSpec(name, dtype, shape, layout, offset_bytes, digest, alias_of)
    if spec.size_bytes != msg.size_bytes:
        fail(f"size_bytes {msg.size_bytes}; its shape says {spec.size_bytes}")
    if source is None and offset_bytes != end_bytes:
        fail(f"offset_bytes {offset_bytes}; the tensor before it ends at {end_bytes}")
    if source and (source.alias_of or _content(source) != _content(spec)):
        fail(f"differs from {alias_of!r}, whose alias it claims to be")
    return spec


def _content(spec: TensorSpec) -> tuple[Dtype, tuple[int, ...], bytes]:
    return spec.dtype, spec.shape, spec.digest
