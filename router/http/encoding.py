"""Values as JSON: strictly valid, in UTF-8, and long ones in pieces.

The encoder of `json` holds the GIL from the first byte to the last, in whatever thread. So a value that may
be long is put together from pieces that take a millisecond or two each.

Pure. It must not know what the values mean.
"""

import json
from collections import abc
from dataclasses import dataclass
from typing import Any, Final

_ENTRIES: Final = 32
_CHARACTERS: Final = 64 * 1024
_TOP: Final = 2  # choices of an answer, items of one within an event
_FEW: Final = 4  # parts of an item


@dataclass(frozen=True, slots=True)
class Written:
    """A value that is JSON already. It may stand in objects that are said to be long."""

    text: str


def encoded(value: Any, *, is_long: bool = False) -> bytes:
    """The value; the same bytes whether it is said to be long or not."""
    return b"".join(_pieces(value)) if is_long else _text(value).encode(errors="replace")


def event(value: Any, *, kind: str = "", is_long: bool = False) -> bytes:
    """The value as one server-sent event, of a kind if one is given."""
    named = f"event: {kind}\n".encode() if kind else b""
    return named + b"data: " + encoded(value, is_long=is_long) + b"\n\n"


def _pieces(value: Any, depth: int = 0) -> abc.Iterator[bytes]:
    """Objects are opened, and so are those in short lists and in lists near the top; other lists are cut."""
    match value:
        case dict() if value:
            before = b"{"
            for name, inner in value.items():
                yield before + encoded(name) + b":"
                yield from _pieces(inner, depth + 1)
                before = b","
            yield b"}"
        case [dict(), *_] if depth <= _TOP or len(value) <= _FEW:
            before = b"["
            for inner in value:
                yield before
                yield from _pieces(inner, depth + 1)
                before = b","
            yield b"]"
        case list() | tuple() if len(value) > _ENTRIES:
            before = b"["
            for first in range(0, len(value), _ENTRIES):
                yield before + encoded(value[first : first + _ENTRIES])[1:-1]
                before = b","
            yield b"]"
        case str() if len(value) > _CHARACTERS:
            yield b'"'
            for first in range(0, len(value), _CHARACTERS):
                yield encoded(value[first : first + _CHARACTERS])[1:-1]
            yield b'"'
        case Written(text):
            yield text.encode(errors="replace")
        case _:
            yield encoded(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
