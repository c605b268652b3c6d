"""Ways in which a stream of events can be wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from refit.v1 import adapter_pb2

from common.wire import crc32c

Event = adapter_pb2.AdapterUpdateResponse
Stream = list[Event]
Mutation = Callable[[Stream, random.Random], None]

_INTS = (0, 1, -1, 2, 3, 7, 64, 1 << 20, (4 << 30) - 1, 4 << 30, (1 << 31) - 1, -(1 << 31))
_LONG_INTS = (*_INTS, 1 << 40, (1 << 63) - 1, -(1 << 63))
_DOUBLES = (0.0, -1.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
_STRINGS = ("", "x", "../../x", "__metadata__", "\0", "n" * 100_000, "base.lora_A.weight", "é" * 99)
_BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))


def mutate(stream: Stream, rng: random.Random, *, other: Stream) -> Stream:
    """A copy with one to three faults; some come from `other`, another sound stream."""
    spoilt = [Event.FromString(event.SerializeToString()) for event in stream]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if spoilt:
            rng.choice(_MUTATIONS)(spoilt, rng)
        if other and not rng.randrange(8):
            _graft(spoilt, other, rng)
    return spoilt


def _drop(stream: Stream, rng: random.Random) -> None:
    del stream[rng.randrange(len(stream))]


def _repeat(stream: Stream, rng: random.Random) -> None:
    at = rng.randrange(len(stream))
    stream.insert(rng.randrange(len(stream) + 1), stream[at])


def _swap(stream: Stream, rng: random.Random) -> None:
    one, other = rng.randrange(len(stream)), rng.randrange(len(stream))
    stream[one], stream[other] = stream[other], stream[one]


def _cut_short(stream: Stream, rng: random.Random) -> None:
    del stream[rng.randrange(len(stream)) :]


def _graft(stream: Stream, other: Stream, rng: random.Random) -> None:
    stream.insert(rng.randrange(len(stream) + 1), rng.choice(other))


def _flip_bits(stream: Stream, rng: random.Random) -> None:
    """On the wire; what does not parse any more never reaches the decoder."""
    at = rng.randrange(len(stream))
    data = bytearray(stream[at].SerializeToString())
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    try:
        stream[at] = Event.FromString(bytes(data))
    except DecodeError:
        del stream[at:]


def _wild_field(stream: Stream, rng: random.Random) -> None:
    """Any field of a message gets a value of its type."""
    fields = list(_scalars(rng.choice(stream)))
    if fields:
        message, field = rng.choice(fields)
        _set(message, field, rng)


def _scalars(message: Message) -> list[tuple[Message, Any]]:
    found: list[tuple[Message, Any]] = []
    for field in message.DESCRIPTOR.fields:
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            found.append((message, field))
        elif _is_repeated(message, field):
            for item in getattr(message, field.name):
                found += _scalars(item)
        elif message.HasField(field.name):
            found += _scalars(getattr(message, field.name))
    return found


def _is_repeated(message: Message, field: Any) -> bool:
    """Of the versions of protobuf that are in use, some lack `label` and some `is_repeated`."""
    return hasattr(getattr(message, field.name), "append")


def _set(message: Message, field: Any, rng: random.Random) -> None:
    old = getattr(message, field.name)
    if not _is_repeated(message, field):
        setattr(message, field.name, _wild(field, old, rng))
    elif old and rng.randrange(3):
        at = rng.randrange(len(old))
        old[at] = _wild(field, old[at], rng)
    else:
        old.append(_wild(field, None, rng))


def _wild(field: Any, old: Any, rng: random.Random) -> Any:
    near = old + rng.choice((-4, -1, 1, 4)) if isinstance(old, int) else 1
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return _fitting(rng.choice((*_INTS, near)), bits=32)
        case FieldDescriptor.CPPTYPE_INT64:
            return _fitting(rng.choice((*_LONG_INTS, near)))
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return rng.getrandbits(32)
        case FieldDescriptor.CPPTYPE_BOOL:
            return not old
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(_DOUBLES)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return _wild_bytes(old or b"", rng)
        case _:
            return rng.choice(_STRINGS)


def _fitting(value: int, *, bits: int = 64) -> int:
    return max(-(1 << bits - 1), min(value, (1 << bits - 1) - 1))


def _wild_bytes(old: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(old) + 1)
    return rng.choice((b"", old[:cut], old + b"\0" * 4, rng.randbytes(len(old)), old[cut:]))


def _lying_chunk(stream: Stream, rng: random.Random) -> None:
    """Wrong beneath a checksum that is right."""
    chunks = [event.chunk for event in stream if event.HasField("chunk")]
    if not chunks:
        return
    chunk = rng.choice(chunks)
    match rng.randrange(5):
        case 0:
            chunk.encoding = rng.choice((0, 1, 2, 3, 4, -1))  # type: ignore[assignment]
        case 1:
            chunk.decoded_bytes = rng.choice((*_LONG_INTS, _fitting(chunk.decoded_bytes + 4)))
        case 2:
            _bomb(chunk, rng)
        case 3:
            chunk.offset_bytes = _fitting(chunk.offset_bytes + rng.choice((-1, 1, 4, -4, 1 << 40)))
        case _:
            chunk.data = _wild_bytes(chunk.data, rng)
    chunk.crc32c = crc32c(chunk.data)


def _bomb(chunk: adapter_pb2.AdapterChunk, rng: random.Random) -> None:
    """A few bytes that claim to be many."""
    chunk.data = rng.choice((_BOMB, _BOMB[: len(_BOMB) // 2]))
    chunk.encoding = adapter_pb2.ENCODING_DELTA_ZSTD
    chunk.decoded_bytes = rng.choice((chunk.decoded_bytes, 256 << 20, 1 << 40))


def _split_table(stream: Stream, rng: random.Random) -> None:
    """No fault by itself: the same table in more pages."""
    at = next((n for n, event in enumerate(stream) if len(event.manifest.tensors) > 1), None)
    if at is not None:
        tensors = stream[at].manifest.tensors
        cut = rng.randrange(1, len(tensors))
        stream.insert(at + 1, Event(tensors=adapter_pb2.ManifestTensors(tensors=tensors[cut:])))
        del tensors[cut:]


_MUTATIONS: tuple[Mutation, ...] = (
    *(_drop, _repeat, _swap, _cut_short, _flip_bits, _flip_bits),
    *(_wild_field, _wild_field, _wild_field, _lying_chunk, _lying_chunk, _split_table),
)
