"""Text that is held to a schema, or calls of tools: the constraint of an answer that may be either.

A model writes calls in a form of its own, which depends on the model and not on the body; so this is put
together once the body has been read. Pure; it must not know how an answer is told.
"""

import json
import re
from collections import abc
from dataclasses import replace
from typing import Any, Final, TypeVar

from router.constraints import JsonOrTagged, JsonSchema, Tagged
from router.http.asked import Asked
from router.http.fields import json_text, shown
from router.http.tools import Function, OfferedTools, call_schema
from router.json_schemas import place_referred_to, value_at
from router.tool_calls import CALL_NAMES, CallWriting
from rpc.errors import invalid

_FIELD: Final = "sampling.json_or_tagged"
_NAME_BEFORE: Final = re.compile(r"[A-Za-z0-9_.-]+")

_AnyAsked = TypeVar("_AnyAsked", bound=Asked)


def with_calls(asked: _AnyAsked, writing: CallWriting | None) -> _AnyAsked:
    """The call, its output held to what it may be when the model writes calls in this way (None: never).

    Raises RequestError when the client's text could not be told from a call, or a call not be told at all.
    """
    use = asked.tool_use
    if not isinstance(use, OfferedTools) or not use.functions:
        return asked
    if writing is None:
        return replace(asked, tool_use=None)
    schema = asked.requests[0].sampling.constraint
    assert isinstance(schema, JsonSchema), "functions are kept beside a schema"
    where = asked.names["sampling.json_schema"]
    if not (writing.begin or writing.opening):
        _check_apart(schema, use.names, where)
    either = JsonOrTagged(
        schema.text,
        tuple(_tagged(function, writing) for function in use.functions),
        writing.opening,
        writing.separator,
        writing.closing,
        use.max_calls,
    )
    names = {_FIELD: where, f"{_FIELD}.json_schema": where}
    for i, function in enumerate(use.functions):
        names |= {f"{_FIELD}.tags[{i}].json_schema": function.where_held}
    requests = tuple(
        replace(one, sampling=replace(one.sampling, constraint=either)) for one in asked.requests
    )
    return replace(asked, requests=requests, names={**asked.names, **names})


def _tagged(function: Function, writing: CallWriting) -> Tagged:
    if not writing.names_first:
        schema = call_schema(function, "#", writing.arguments)
        return Tagged(writing.begin, json_text(schema, function.where_held), writing.end)
    if not _NAME_BEFORE.fullmatch(function.name):
        where = f"tools[{function.position}]"
        raise invalid(
            where,
            f"{where} has the name {shown(function.name)}, which this model cannot write in a call; a name "
            "is made of letters, digits, _, . and -",
        )
    begin = writing.begin.replace("{name}", function.name)
    return Tagged(begin, json_text(function.parameters, function.where_held), writing.end)


# --- a schema of objects that are calls -------------------------------------------------------------


def _check_apart(schema: JsonSchema, names: abc.Container[str], where: str) -> None:
    """Refuses a schema that speaks of what is a call to the letter, in a form that has no tags.

    One that leaves open what else an object may have does not speak of it: what then reads as a call is one.
    """
    try:
        root = json.loads(schema.text)
    except (ValueError, RecursionError):  # refused by whoever looks at its form
        return
    if any(_may_be_call(each, names) for each in _alternatives(root, root, set())):
        raise invalid(
            where,
            f"{where} allows an object with a tool's name as name, and arguments or parameters, which is how "
            "this model writes a call; give one of them another name, or set tool_choice to none",
        )


def _alternatives(schema: Any, root: Any, seen: set[int]) -> abc.Iterator[dict[str, Any]]:
    """The schemas of objects that a value may be valid under, as far as they are written out."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema
    referred = place_referred_to(schema, root)
    if referred is not None:
        yield from _alternatives(value_at(root, referred), root, seen)
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            yield from _alternatives(part, root, seen)


def _may_be_call(schema: dict[str, Any], names: abc.Container[str]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or "name" not in properties:
        return False
    if not {"arguments", "parameters"} & properties.keys():
        return False
    if isinstance(required, list) and not set(map(str, required)) <= set(CALL_NAMES):
        return False
    match properties["name"]:
        case {"const": only}:
            return isinstance(only, str) and only in names
        case {"enum": [*values]}:
            return any(isinstance(value, str) and value in names for value in values)
    return True
