"""The constraints that an output can be held to, and the forms in which the door takes them.

The executor holds the output to it. Here its form and size are looked at; whether it can be kept to at all
says the library that the executor uses (`constraint_checks`). Pure; it must not know tokens or doors.
"""

import json
from collections import abc
from dataclasses import dataclass, replace
from typing import Final

from rpc.errors import invalid

MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_REGEX_CHARACTERS: Final = 4096
MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARACTERS: Final = 256
MAX_TAGS: Final = 256
MAX_TAG_CHARACTERS: Final = 256
MAX_TAGGED_BYTES: Final = 256 * 1024
# The one character that the library's texts cannot have as it is.
_DELETE: Final = "\x7f"


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is JSON that is valid under `text`, a JSON schema; {} is any object."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches `pattern`."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is one of `values`."""

    values: abc.Sequence[str]


@dataclass(frozen=True, slots=True)
class Tagged:
    """JSON that is valid under `text`, a JSON schema, between two fixed texts."""

    begin: str
    text: str
    end: str


@dataclass(frozen=True, slots=True)
class JsonOrTagged:
    """The output is JSON that is valid under `text`, a JSON schema, or one or more of `tags`.

    `opening` stands before the first of them, `separator` between two, `closing` behind the last; there are
    at most `max_tags` (None: any number).
    """

    text: str
    tags: abc.Sequence[Tagged]
    opening: str = ""
    separator: str = ""
    closing: str = ""
    max_tags: int | None = None


Constraint = JsonSchema | Regex | Choice | JsonOrTagged


def field_of(constraint: Constraint) -> str:
    """The contract's name of what was set."""
    match constraint:
        case JsonSchema():
            return "sampling.json_schema"
        case Regex():
            return "sampling.regex"
        case Choice():
            return "sampling.choice"
        case JsonOrTagged():
            return "sampling.json_or_tagged"


def checked_form(constraint: Constraint) -> Constraint:
    """The constraint, of which nothing was copied before. Raises RequestError, INVALID_ARGUMENT.

    It is refused when it is too big, or no JSON object.
    """
    field = field_of(constraint)
    match constraint:
        case JsonSchema(text):
            _check_schema(field, text)
        case Regex(pattern):
            _check_count(field, field, len(pattern), MAX_REGEX_CHARACTERS, "characters")
        case Choice(values):
            _check_count(field, field, len(values), MAX_CHOICES, "values")
            for position, value in enumerate(values):
                where = f"{field}[{position}]"
                _check_count(field, where, len(value), MAX_CHOICE_CHARACTERS, "characters")
                if _DELETE in value:
                    raise invalid(
                        field,
                        f"{where} holds the control character U+007F, which no choice can have; leave it out",
                    )
            return Choice(tuple(values))
        case JsonOrTagged():
            return _checked_tagged(constraint)
    return constraint


def _checked_tagged(constraint: JsonOrTagged) -> JsonOrTagged:
    field = field_of(constraint)
    _check_count(f"{field}.tags", f"{field}.tags", len(constraint.tags), MAX_TAGS, "entries")
    if constraint.max_tags is not None and not 1 <= constraint.max_tags <= MAX_TAGS:
        where = f"{field}.max_tags"
        raise invalid(where, f"{where} is {constraint.max_tags}; it must be from 1 to {MAX_TAGS}")
    tags = tuple(constraint.tags)
    schemas = {f"{field}.json_schema": constraint.text}
    texts = {f"{field}.{name}": getattr(constraint, name) for name in ("opening", "separator", "closing")}
    for position, tag in enumerate(tags):
        where = f"{field}.tags[{position}]"
        schemas[f"{where}.json_schema"] = tag.text
        texts |= {f"{where}.begin": tag.begin, f"{where}.end": tag.end}
    num_bytes = sum(len(text.encode()) for text in [*schemas.values(), *texts.values()])
    if num_bytes > MAX_TAGGED_BYTES:
        raise invalid(
            field,
            f"{field} has {num_bytes} bytes in its schemas and texts; at most {MAX_TAGGED_BYTES} are allowed",
        )
    for where, text in texts.items():
        if len(text) > MAX_TAG_CHARACTERS:
            raise invalid(
                where, f"{where} has {len(text)} characters; at most {MAX_TAG_CHARACTERS} are allowed"
            )
        if _DELETE in text:
            raise invalid(where, f"{where} holds the control character U+007F, which it cannot; leave it out")
    for where, text in schemas.items():
        _check_schema(where, text)
    return replace(constraint, tags=tags)


def _check_schema(field: str, text: str) -> None:
    if (num_bytes := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise invalid(field, f"{field} has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise invalid(field, f"{field} is nested too deeply") from error
    except ValueError as error:
        raise invalid(field, f"{field} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} must be a JSON object; {{}} stands for any JSON object")


def _check_count(field: str, where: str, count: int, limit: int, of_what: str) -> None:
    if not 1 <= count <= limit:
        raise invalid(field, f"{where} has {count} {of_what}; it must have 1 to {limit}")
