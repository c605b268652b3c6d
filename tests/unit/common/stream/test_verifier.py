"""Digests taken while bytes come."""

from __future__ import annotations

import pytest

from common.errors import WrongDigest
from common.stream.verifier import Verifier
from tests.adapters import make_adapter

MANIFEST, BUFFER = make_adapter()


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 20])
def test_a_damaged_tensor_is_named_as_soon_as_it_is_whole(step: int) -> None:
    """faults.md 4, verl#7327: no size of the pieces hides a wrong byte."""
    spec = MANIFEST.tensors[2]
    damaged = bytearray(BUFFER)
    damaged[spec.end_bytes - 1] ^= 1
    whole, broken = Verifier(MANIFEST), Verifier(MANIFEST)

    for begin in range(0, len(BUFFER), step):
        whole.update(BUFFER[begin : begin + step])
    with pytest.raises(WrongDigest, match=spec.name):
        for begin in range(0, len(BUFFER), step):
            broken.update(bytes(damaged[begin : begin + step]))

    assert begin == (spec.end_bytes - 1) // step * step


def test_a_byte_left_out_is_noticed() -> None:
    """faults.md 4, verl#7327: an adapter that spans pieces is whole or refused."""
    verifier = Verifier(MANIFEST)
    verifier.update(BUFFER[:10])
    with pytest.raises(WrongDigest):
        verifier.update(BUFFER[11:])
