"""A JSON body, read strictly: every value has the right type or is refused by name, and nothing is ignored.

  - null is the same as absent, except inside lists and as the value of a name that the client chose.
  - A field that nobody has read by the time `close` is called is refused by name.
  - A name that appears twice in one object is refused: one of its values would be ignored.
  - NaN, Infinity, numbers beyond a double or 64 bits, and lone surrogates are refused.

Pure. It must not know which fields there are, or what they mean.
"""

import json
import math
import re
from typing import Any, Final, NoReturn, TypeVar

import grpc

from rpc.errors import RequestError, invalid

MIN_INT: Final = -(1 << 63)
MAX_INT: Final = (1 << 63) - 1
_MAX_SHOWN_CHARACTERS: Final = 64
_MAX_PATH_CHARACTERS: Final = 256
# Only an escape can put a surrogate into text that came as UTF-8.
_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")

_T = TypeVar("_T")


def parsed(body: bytes) -> "Fields":
    """The body's one object. Raises RequestError, INVALID_ARGUMENT, saying where it is no JSON object."""
    try:
        text = body.decode()
        value = json.loads(
            text, object_pairs_hook=_object
        )  # NaN and 1e999 come through it, and are refused where they stand
    except UnicodeDecodeError as error:
        raise invalid("", f"the body is not UTF-8: byte {error.start} is wrong") from error
    except RecursionError as error:
        raise invalid("", "the body is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        raise invalid("", f"the body is not valid JSON: {error}") from error
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value, "")
    if not isinstance(value, dict):
        raise invalid("", f"the body is {shown(value)}; it must be a JSON object")
    return Fields(value)


class Fields:
    """One object, taken apart field by field. `path` says where in the body it stands."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._given = values
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._read: set[str] = set()

    def close(self) -> None:
        """Refuses what nobody has read. Raises RequestError, INVALID_ARGUMENT naming it."""
        for name in self._values:
            if name not in self._read:
                where = self.path_of(name[:_MAX_SHOWN_CHARACTERS])
                raise invalid(where, f"{where} is not supported here")

    @property
    def names(self) -> list[str]:
        """All that stand in it, null or not, in its order: where names are a client's own."""
        return list(self._given)

    def path_of(self, name: str) -> str:
        """Where a field of this object stands in the body."""
        return f"{self._path}.{name}" if self._path else name

    def value(self, name: str) -> Any:
        """Whatever stands there; None when it is absent. The caller answers for its type."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        return self._typed(name, str, "a string")

    def flag(self, name: str) -> bool | None:
        """True or false."""
        return self._typed(name, bool, "true or false")

    def whole(self, name: str) -> int | None:
        """A whole number that fits into 64 bits."""
        value = self.value(name)
        return None if value is None else whole(value, self.path_of(name))

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            _wrong(self.path_of(name), value, "a number")
        try:
            number = None if value is None else float(value)
        except OverflowError:
            number = math.inf
        if number is not None and not math.isfinite(number):
            _wrong(self.path_of(name), value, "a finite number")
        return number

    def entries(self, name: str) -> list[Any] | None:
        """A list, of whatever."""
        return self._typed(name, list, "a list")

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings."""
        values = self.entries(name)
        if values is None:
            return None
        return tuple(
            checked(value, str, "a string", f"{self.path_of(name)}[{i}]") for i, value in enumerate(values)
        )

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers that fit into 64 bits."""
        values = self.entries(name)
        return None if values is None else wholes(values, self.path_of(name))

    def fields(self, name: str) -> "Fields | None":
        """An object within this one."""
        value = self._typed(name, dict, "an object")
        return None if value is None else Fields(value, self.path_of(name))

    def _typed(self, name: str, kind: type[_T], expected: str) -> _T | None:
        value = self.value(name)
        return None if value is None else checked(value, kind, expected, self.path_of(name))


def checked(value: object, kind: type[_T], expected: str, path: str) -> _T:
    """The value, if it is of this kind. Raises RequestError, INVALID_ARGUMENT naming where it stands."""
    if not isinstance(value, kind):
        _wrong(path, value, expected)
    return value


def whole(value: object, path: str) -> int:
    """The value, if it is a whole number of 64 bits. Raises RequestError, INVALID_ARGUMENT."""
    if isinstance(value, bool) or not isinstance(value, int):
        _wrong(path, value, "a whole number")
    if not MIN_INT <= value <= MAX_INT:
        raise invalid(path, f"{path} is {shown(value)}; whole numbers go from {MIN_INT} to {MAX_INT}")
    return value


def wholes(values: list[Any], path: str) -> tuple[int, ...]:
    """The values, if all are whole numbers of 64 bits. Raises RequestError naming the first that is none."""
    if not all(type(value) is int and MIN_INT <= value <= MAX_INT for value in values):
        for position, value in enumerate(values):
            whole(value, f"{path}[{position}]")
    return tuple(values)


def json_text(value: dict[str, Any], path: str) -> str:
    """An object as JSON text again. Raises RequestError, INVALID_ARGUMENT, when it cannot be."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise invalid(path, f"{path} is nested too deeply") from error
    except ValueError as error:
        raise invalid(path, f"{path} holds a number that is not finite") from error


def only(name: str, value: object, served: object) -> None:
    """Refuses any value but the one that is served; absent is too. Raises RequestError, UNIMPLEMENTED."""
    if value is not None and value != served:
        raise unserved(name, f"{name} is supported as {json.dumps(served)} alone")


def unserved(field: str, message: str) -> RequestError:
    """The refusal of what is known and not served."""
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, message, field=field)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise invalid("", f"{shown(name)} stands twice in one object of the body; say it once")
            seen.add(name)
    return values


def _wrong(path: str, value: object, expected: str) -> NoReturn:
    raise invalid(path, f"{path} is {shown(value)}; it must be {expected}")


def shown(value: object) -> str:
    """A client's value in an error sentence: as JSON writes it, cut when long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str):
        value = value[:_MAX_SHOWN_CHARACTERS]
    return json.dumps(value, ensure_ascii=False)[:_MAX_SHOWN_CHARACTERS]


def _refuse_lone_surrogates(value: object, path: str) -> None:
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                where = path or "the body"
                raise invalid(path, f"{where} holds half a character (a lone surrogate)") from error
        case list():
            for position, entry in enumerate(value):
                _refuse_lone_surrogates(entry, _within(path, f"[{position}]"))
        case dict():
            for name, entry in value.items():
                _refuse_lone_surrogates(name, path)
                known = name[:_MAX_SHOWN_CHARACTERS]
                _refuse_lone_surrogates(entry, _within(path, f".{known}" if path else known))


def _within(path: str, step: str) -> str:
    """Where something stands; what lies too deep is told by where that begins."""
    return path + step if len(path) < _MAX_PATH_CHARACTERS else path
