"""What a message would cost to parse, estimated from its bytes, so that none blocks the event loop.

The protobuf library parses a message in one go and holds the GIL until it is done, in whatever thread. Bytes
that are only copied are cheap, but parts are not: two bytes can become an empty message of a hundred. So the
parts are counted first, along the encoded bytes, in slices that let other threads run: fields at every depth,
and numbers of packed lists. A message with too many of them is refused before any object of it is made.

Pure. It must not know what a message means, or whether it is valid: where the bytes stop being a message,
the count ends, and the parser reports the fault.
"""

from collections import Counter
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from rpc.errors import invalid

MAX_FIELDS: Final = 65_536
LIGHT_FIELDS: Final = 512
LIGHT_BYTES: Final = 256 * 1024
MAX_NUMBERS: Final = 1_048_576
MAX_NUMBER_BYTES: Final = 4 * MAX_NUMBERS
"""Of one list: what is longer need not be counted. Ids of any vocabulary take three bytes at most."""

_LENGTH: Final = 2
_MORE: Final = 0x7F  # a byte above it goes on
_MAX_SHIFT: Final = 63
_CONTINUED: Final = bytes(range(0x80, 0x100))
_UNPACKED: Final = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})


def is_light(raw: bytes, descriptor: Descriptor) -> bool:
    """Whether a message is short and has few parts, so that it is parsed within a millisecond or so."""
    if len(raw) > LIGHT_BYTES:
        return False
    num_fields, num_numbers = _counted(raw, descriptor, LIGHT_FIELDS)
    return num_fields <= LIGHT_FIELDS and num_numbers <= MAX_NUMBERS


def check_weight(raw: bytes, descriptor: Descriptor) -> None:
    """Refuses a message of too many parts; may take a while. Raises RequestError, INVALID_ARGUMENT."""
    num_fields, num_numbers = _counted(raw, descriptor, MAX_FIELDS)
    if num_fields > MAX_FIELDS:
        by_field: Counter[str] = Counter()
        _counted(raw, descriptor, MAX_FIELDS, by_field)
        [(most, _)] = by_field.most_common(1)
        raise invalid(
            most,
            f"the message has more than {MAX_FIELDS} fields and entries, most in {most}; send fewer",
        )
    if num_numbers > MAX_NUMBERS:
        raise invalid("", f"the lists of the message have more than {MAX_NUMBERS} numbers; send fewer")


def _counted(
    raw: bytes, descriptor: Descriptor, max_fields: int, by_field: Counter[str] | None = None
) -> tuple[int, int]:
    """Fields, and numbers of packed lists, up to where there are too many or the bytes are no message.

    `by_field` is told how often each field came.
    """
    num_fields = num_numbers = 0
    inner = [(0, len(raw), descriptor, "")]  # messages still to be looked into: where, of what type, its path
    while inner:
        position, end, kind, path = inner.pop()
        parts = _parts(kind)
        try:
            while position < end:
                num_fields += 1
                if num_fields > max_fields or num_numbers > MAX_NUMBERS:
                    return num_fields, num_numbers
                tag, position = _varint(raw, position)
                if by_field is not None:
                    by_field[_path(kind, tag >> 3, path)] += 1
                if tag & 7 != _LENGTH:
                    position = _behind(raw, position, tag & 7)
                    continue
                length, position = _varint(raw, position)
                if length > end - position:
                    break
                part = parts.get(tag >> 3)
                if isinstance(part, Descriptor):
                    below = path if by_field is None else f"{_path(kind, tag >> 3, path)}."
                    inner.append((position, position + length, part, below))
                elif part is not None:
                    num_numbers += _num_numbers(raw, position, length)
                position += length
        except IndexError:  # no message any more: what stands before it counts all the same
            pass
    return num_fields, num_numbers


def _path(kind: Descriptor, number: int, path: str) -> str:
    field = kind.fields_by_number.get(number)
    return path + (str(number) if field is None else field.name)


def _behind(raw: bytes, position: int, wire_type: int) -> int:
    """Where a field without a length ends. Raises IndexError where it does not."""
    match wire_type:
        case 0:  # a varint
            return _varint(raw, position)[1]
        case 1:
            return position + 8
        case 5:
            return position + 4
        case 3 | 4:  # a group begins or ends; what stands in it counts as if it stood outside
            return position
    raise IndexError(f"there is no wire type {wire_type}")


class _Numbers:
    """Marks a field whose bytes are a list of numbers."""


@cache
def _parts(kind: Descriptor) -> dict[int, Descriptor | _Numbers]:
    """Fields whose bytes may be many parts."""
    parts: dict[int, Descriptor | _Numbers] = {}
    for field in kind.fields:
        if field.message_type is not None:
            parts[field.number] = field.message_type
        elif field.is_repeated and field.type not in _UNPACKED:
            parts[field.number] = _Numbers()
    return parts


def _num_numbers(raw: bytes, position: int, length: int) -> int:
    """Numbers of a packed list of varints, or as many as are too many."""
    if length > MAX_NUMBER_BYTES:
        return length
    return len(raw[position : position + length].translate(None, _CONTINUED))


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """The number that begins there, and where it has ended."""
    if (byte := raw[position]) <= _MORE:
        return byte, position + 1
    value = shift = 0
    while (byte := raw[position]) > _MORE:
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if shift > _MAX_SHIFT:
            raise IndexError("a varint has ten bytes at most")
    return value | byte << shift, position + 1
