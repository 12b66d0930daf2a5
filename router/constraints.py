"""The constraints that an output can be held to, and the forms in which the door takes them.

The executor holds the output to it. Here its form and size are looked at; whether it can be kept to at all
says the library that the executor uses (`constraint_checks`). Pure; it must not know tokens or doors.
"""

import json
from collections import abc
from dataclasses import dataclass
from typing import Final

from rpc.errors import invalid

MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_REGEX_CHARACTERS: Final = 4096
MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARACTERS: Final = 256
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


Constraint = JsonSchema | Regex | Choice


def field_of(constraint: Constraint) -> str:
    """The contract's name of what was set."""
    match constraint:
        case JsonSchema():
            return "sampling.json_schema"
        case Regex():
            return "sampling.regex"
        case Choice():
            return "sampling.choice"


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
    return constraint


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
