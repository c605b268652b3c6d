"""How a flat buffer falls into pieces that are sent, left out, or sent as a difference."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from common.adapter import Layout, Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `begin` to `end` of a flat buffer.

    `held`: the receiver has every tensor of it. Otherwise, with an `itemsize`, a delta base has
    these tensors as well, in the same order, from its byte `base_begin` on.
    """

    begin: int
    end: int
    held: bool = False
    itemsize: int = 0
    base_begin: int = 0
    layout: Layout | None = None


class _Kind(NamedTuple):
    """What two neighbours have in common when they are one piece."""

    held: bool = False
    itemsize: int = 0
    shift: int = 0
    """From a byte of the buffer to that of the base."""

    layout: Layout | None = None


_RAW = _Kind()
_HELD = _Kind(held=True)


def plan_pieces(
    manifest: Manifest, *, held: Collection[bytes], base: Manifest | None
) -> list[Piece]:
    """The whole buffer in ascending pieces, each as long as it can be.

    Args:
        held: digests of tensors that the receiver has.
        base: what a difference may be taken to, tensor by tensor; None for nothing.
    """
    in_base = {spec.name: spec for spec in base.tensors} if base else {}
    specs = [spec for spec in manifest.tensors if not spec.alias_of]
    runs: list[tuple[int, _Kind]] = []
    for spec in specs if held or base else specs[:1]:
        kind = _HELD if spec.digest in held else _beside(spec, in_base.get(spec.name))
        if not runs or runs[-1][1] != kind:
            runs.append((spec.offset_bytes, kind))
    # Tensors lie back to back: a piece ends where the next one begins.
    ends = [*(begin for begin, _ in runs[1:]), specs[-1].end_bytes] if specs else []
    return [
        Piece(begin, end, kind.held, kind.itemsize, _base_begin(begin, kind), kind.layout)
        for (begin, kind), end in zip(runs, ends, strict=True)
    ]


def _beside(spec: TensorSpec, base: TensorSpec | None) -> _Kind:
    if base is None or base.dtype is not spec.dtype or base.shape != spec.shape:
        return _RAW
    shift = base.offset_bytes - spec.offset_bytes
    return _Kind(False, spec.dtype.itemsize, shift, spec.layout)


def _base_begin(begin: int, kind: _Kind) -> int:
    return begin + kind.shift if kind.itemsize else 0
