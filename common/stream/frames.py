"""The stream's messages on the wire: chunks by hand, everything else by protobuf.

A chunk is what a stream consists of. Through protobuf's classes each of its bytes is copied three
times on either side; here once to send it and never to receive it. What travels is, byte for byte,
the `AdapterUpdateResponse` of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.errors import CorruptUpdate

Event = adapter_pb2.AdapterUpdateResponse
Request = adapter_pb2.AdapterUpdateRequest

_SERVICE = "refit.v1.AdapterService"

# Tags: the field's number, and how its value is written.
_CHUNK = b"\x12"
_OFFSET, _DATA, _CRC32C, _ENCODING, _DECODED = b"\x08", b"\x12", b"\x1d", b"\x20", b"\x28"
_CRC32C_BYTES = 4
_LONGEST_VARINT = 9
"""Bytes of the largest whole number that is not negative, in 64 bits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`AdapterChunk` of the contract; `data` may be a view of a larger buffer."""

    offset_bytes: int
    data: bytes | memoryview
    crc32c: int
    encoding: int = adapter_pb2.ENCODING_UNSPECIFIED
    decoded_bytes: int = 0


AnyChunk: TypeAlias = Chunk | adapter_pb2.AdapterChunk
Message: TypeAlias = Event | Chunk
"""What a subscription carries."""


def kind(message: Message) -> str | None:
    """Which event it is, by the contract's name; None for one from a later version of it."""
    return "chunk" if isinstance(message, Chunk) else message.WhichOneof("event")


def serialize(message: Message) -> bytes:
    """The bytes of an `AdapterUpdateResponse`."""
    if isinstance(message, Event):
        return message.SerializeToString()
    size = len(message.data)
    head = b"".join(
        (
            _OFFSET + _varint(message.offset_bytes),
            _ENCODING + _varint(message.encoding),
            _DECODED + _varint(message.decoded_bytes),
            _CRC32C + message.crc32c.to_bytes(4, "little"),
            _DATA + _varint(size),
        )
    )
    return b"".join((_CHUNK, _varint(len(head) + size), head, message.data))


def parse(raw: bytes) -> Message:
    """Inverse of `serialize`, for whatever protobuf takes as such a message.

    A chunk that is written in an unusual way comes as an event that holds it.

    Raises:
        CorruptUpdate: it does not.
    """
    chunk = _parse_chunk(raw)
    if chunk is not None:
        return chunk
    try:
        return Event.FromString(raw)
    except DecodeError as error:
        raise CorruptUpdate(
            f"AdapterUpdateResponse: {error}; its bytes changed on the way"
        ) from error


def _parse_chunk(raw: bytes) -> Chunk | None:
    """A message that is one chunk, written in the usual way; None is left to protobuf."""
    if raw[:1] != _CHUNK or (at := _end_of_varint(raw, 1)) is None:
        return None
    if at + _varint_value(raw, 1, at) != len(raw):
        return None
    data, numbers = memoryview(b""), dict.fromkeys((_OFFSET, _ENCODING, _DECODED, _CRC32C), 0)
    while at < len(raw):
        tag, begin = raw[at : at + 1], at + 1
        if tag == _CRC32C:
            at = begin + _CRC32C_BYTES
            numbers[tag] = int.from_bytes(raw[begin:at], "little")
        elif tag not in (_DATA, *numbers) or (end := _end_of_varint(raw, begin)) is None:
            return None
        elif tag == _DATA:
            at = end + _varint_value(raw, begin, end)
            data = memoryview(raw)[end:at]
        else:
            at, numbers[tag] = end, _varint_value(raw, begin, end)
    if at != len(raw):
        return None
    return Chunk(numbers[_OFFSET], data, numbers[_CRC32C], numbers[_ENCODING], numbers[_DECODED])


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _end_of_varint(raw: bytes, begin: int) -> int | None:
    """One past its last byte; None where it does not end, or would be negative."""
    for end in range(begin + 1, min(begin + _LONGEST_VARINT, len(raw)) + 1):
        if raw[end - 1] < 0x80:
            return end
    return None


def _varint_value(raw: bytes, begin: int, end: int) -> int:
    number = 0
    for byte in reversed(raw[begin:end]):
        number = number << 7 | byte & 0x7F
    return number


def add_adapter_service(
    servicer: adapter_pb2_grpc.AdapterServiceServicer, server: grpc.aio.Server
) -> None:
    """As the generated function does, but that the stream's messages are written by `serialize`."""
    unary: Any = grpc.unary_unary_rpc_method_handler
    handlers = {
        "AdapterUpdate": grpc.unary_stream_rpc_method_handler(
            servicer.AdapterUpdate,
            request_deserializer=Request.FromString,
            response_serializer=serialize,
        ),
        "ReportAdapter": unary(
            servicer.ReportAdapter,
            request_deserializer=adapter_pb2.ReportAdapterRequest.FromString,
            response_serializer=adapter_pb2.ReportAdapterResponse.SerializeToString,
        ),
        "RenewLease": unary(
            servicer.RenewLease,
            request_deserializer=adapter_pb2.RenewLeaseRequest.FromString,
            response_serializer=adapter_pb2.RenewLeaseResponse.SerializeToString,
        ),
        "ListAdapters": unary(
            servicer.ListAdapters,
            request_deserializer=adapter_pb2.AdapterServiceListAdaptersRequest.FromString,
            response_serializer=adapter_pb2.AdapterServiceListAdaptersResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


def adapter_update(channel: grpc.aio.Channel) -> Callable[[Request], Any]:
    """The stream's stub, whose messages are read by `parse`."""
    return channel.unary_stream(
        f"/{_SERVICE}/AdapterUpdate",
        request_serializer=Request.SerializeToString,
        response_deserializer=parse,
    )
