"""Fields of a request that this version does not know."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import InvalidField


def refuse_unknown_fields(message: Message) -> None:
    """Raises `InvalidField` for the first one, in the message itself or in one inside it."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidField(
            f"{message.DESCRIPTOR.name}: this replica knows no field of number "
            f"{unknown[0].field_number}; leave it out, or ask a newer replica"
        )
    for field, value in message.ListFields():
        if field.type is FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for inner in value if field.is_repeated else (value,):
                refuse_unknown_fields(inner)


def _is_map(field: FieldDescriptor) -> bool:
    """None of ours has messages for values."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry
