"""The flat buffer in pieces."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.adapter import Dtype, Layout, Manifest
from common.stream.pieces import Piece, plan_pieces
from tests.adapters import make_adapter
from tests.large_adapters import make_large, stepped

OLD, BUFFER = make_large(tensors=6, width=16)
SIZE = 8 * 16 * 2
NEW, _ = stepped(OLD, BUFFER)


def test_without_anything_held_the_buffer_is_one_piece() -> None:
    assert plan_pieces(NEW, held=(), base=None) == [Piece(0, 6 * SIZE)]


def test_held_tensors_are_left_out_and_the_rest_is_a_difference_by_layout() -> None:
    unchanged = stepped(OLD, BUFFER, unchanged=[0, 1])[0]

    pieces = plan_pieces(unchanged, held={spec.digest for spec in OLD.tensors}, base=OLD)

    assert pieces == [
        Piece(0, 2 * SIZE, held=True),
        Piece(2 * SIZE, 3 * SIZE, False, 2, 2 * SIZE, Layout.LORA_A),
        Piece(3 * SIZE, 6 * SIZE, False, 2, 3 * SIZE, Layout.LORA_B),
    ]


def test_a_tensor_that_the_base_has_not_or_otherwise_is_sent_raw() -> None:
    first, *others = OLD.tensors
    base = replace(OLD, tensors=(replace(first, dtype=Dtype.FLOAT16), *others[1:]))

    pieces = plan_pieces(NEW, held=(), base=base)

    assert pieces == [
        Piece(0, 2 * SIZE),
        Piece(2 * SIZE, 3 * SIZE, False, 2, 2 * SIZE, Layout.LORA_A),
        Piece(3 * SIZE, 6 * SIZE, False, 2, 3 * SIZE, Layout.LORA_B),
    ]


def test_a_piece_ends_where_the_base_has_its_tensors_in_another_order() -> None:
    zero, one, *rest = OLD.tensors
    moved = replace(zero, offset_bytes=SIZE), replace(one, offset_bytes=0)
    pieces = plan_pieces(NEW, held=(), base=replace(OLD, tensors=(*moved, *rest)))

    assert [(p.begin, p.end, p.base_begin) for p in pieces[:3]] == [
        (0, SIZE, SIZE),
        (SIZE, 2 * SIZE, 0),
        (2 * SIZE, 3 * SIZE, 2 * SIZE),
    ]


def test_aliases_have_no_piece_of_their_own() -> None:
    manifest, buffer = make_adapter()

    assert plan_pieces(manifest, held=(), base=None) == [Piece(0, len(buffer))]


@given(held=st.sets(st.integers(0, 5)), in_base=st.sets(st.integers(0, 5)))
def test_pieces_cover_the_buffer_in_order(held: set[int], in_base: set[int]) -> None:
    base = Manifest("base", OLD.lora, tuple(OLD.tensors[i] for i in sorted(in_base)))

    pieces = plan_pieces(NEW, held={NEW.tensors[i].digest for i in held}, base=base)

    assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])]
    assert pieces[-1].end == 6 * SIZE
    kinds = {
        byte // SIZE: (p.held, bool(p.itemsize))
        for p in pieces
        for byte in range(p.begin, p.end, SIZE)
    }
    assert kinds == {i: (i in held, i in in_base and i not in held) for i in range(6)}
