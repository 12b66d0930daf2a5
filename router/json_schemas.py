"""JSON schemas as trees: the schemas within one, and one that is put within another.

Pure; what keywords mean, and which of them can be kept to, is known elsewhere.
"""

from collections import abc
from typing import Any, Final
from urllib.parse import quote, unquote

# What stands behind these words of JSON schema is no schema, or has schemas behind names of the client's own.
_KEYWORDS_OF_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_KEYWORDS_OF_NAMES: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DEFINITIONS: Final = ("$defs", "definitions")

Place = tuple[str | int, ...]
"""The names and numbers that lead to a value."""


def moved(schema: Any, to: str) -> Any:
    """A schema that stands within another at `to`: what it calls its root is there."""
    match schema:
        case {"$id": _}:  # the root of its own references
            return schema
        case dict():
            return {name: _moved_keyword(name, value, to) for name, value in schema.items()}
        case list():
            return [moved(entry, to) for entry in schema]
    return schema


def _moved_keyword(name: str, value: Any, to: str) -> Any:
    if name in _KEYWORDS_OF_DATA:
        return value
    if name in _KEYWORDS_OF_NAMES and isinstance(value, dict):  # the names within are the client's own
        return {own: moved(schema, to) for own, schema in value.items()}
    if name == "$ref" and isinstance(value, str) and value.startswith("#"):
        return to + value[1:]
    return moved(value, to)


def schemas_within(schema: dict[str, Any]) -> abc.Iterator[Place]:
    """Where the schemas are that a schema is made of. Definitions are not: they are what is referred to."""
    for keyword, value in schema.items():
        if keyword in _KEYWORDS_OF_DATA or keyword in _DEFINITIONS:
            continue
        if keyword in _KEYWORDS_OF_NAMES and isinstance(value, dict):
            yield from ((keyword, name) for name in value)
        elif isinstance(value, list):
            yield from ((keyword, i) for i, entry in enumerate(value) if isinstance(entry, dict))
        elif isinstance(value, dict) and keyword not in _KEYWORDS_OF_NAMES:
            yield (keyword,)


def value_at(value: Any, place: Place) -> Any:
    """What stands there; None when nothing does."""
    for step in place:
        match value, step:
            case dict(), str() if step in value:
                value = value[step]
            case list(), int() if step < len(value):
                value = value[step]
            case _:
                return None
    return value


def place_referred_to(schema: Any, root: Any) -> Place | None:
    """The place in `root` that a `$ref` of the schema leads to; None when it has none, or leads elsewhere."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place: list[str | int] = []
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        within = value_at(root, tuple(place))
        place.append(int(name) if isinstance(within, list) and name.isdecimal() else name)
    return tuple(place)


def pointer_to(place: Place) -> str:
    """The place as a JSON pointer within a reference."""
    escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in place)
    return "".join(f"/{quote(step, safe='')}" for step in escaped)
