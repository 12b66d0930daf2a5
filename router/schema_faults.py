"""Where in a JSON schema it is that an output cannot be held to it, and why, in words for a client.

The library that builds grammars says why it does not build one, in its own words, and not where. So it is
asked about the schemas within the schema, each at its place. Pure; it must not know how the library is asked.
"""

import re
from collections import abc
from typing import Any, Final

from router.json_schemas import Place, moved, place_referred_to, pointer_to, schemas_within, value_at

MAX_SHOWN: Final = 100

Refusal = abc.Callable[[dict[str, Any]], str | None]
"""Why the library does not build a schema; None when it does."""

_INSTEAD: Final = {
    "contains": "say what all entries are with items, or the first ones with prefixItems",
    "dependencies": "write the cases as anyOf",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "if": "write the cases as anyOf",
    "not": "say what may be there, with enum, type or anyOf",
    "propertyNames": "put the names into patternProperties, and set additionalProperties false",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "uniqueItems": "leave it out, and look for equal entries in the answer",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_WHOLE: Final = "/$defs/whole"
_GO_WITH: Final = {"then": "if", "else": "if", "maxContains": "contains", "minContains": "contains"}
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (.*)", re.DOTALL)
_NO_POINTER: Final = re.compile(r"Pointer '(.*)' does not exist", re.DOTALL)
_NO_RESOURCE: Final = re.compile(r"Resource '(.*)' is not present in a registry", re.DOTALL)
_UNKNOWN_TYPE: Final = re.compile(r"Invalid type: (.*)", re.DOTALL)
_UNSATISFIABLE: Final = re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL)
_WRONG_VALUE: Final = re.compile(r"Expected (?P<what>.*) for '(?P<keyword>.*)', got (?P<value>.*)", re.DOTALL)
_AS_THE_LIBRARY_SAYS: Final = "cannot be kept to: "
_WHAT_IS_NEEDED: Final = {"f64": "a number", "positive integer": "a whole number of at least 0"}


def told(schema: dict[str, Any], reason: str, refusal: Refusal, *, is_late: abc.Callable[[], bool]) -> str:
    """Why and where, as the rest of a sentence, for a schema that is refused for `reason`.

    When `is_late`, no more questions are asked: it then says of a larger part what is true of a smaller one.
    """
    place: Place = ()
    if refusal(_only(schema, place)) is not None:  # else what it says depends on how it is asked
        place, reason = _culprit(schema, reason, refusal, is_late)
    what = worded(reason)
    if what.startswith(_AS_THE_LIBRARY_SAYS) and isinstance(value_at(schema, (*place, "pattern")), str):
        what = f"has a pattern that {what}"
    return f"{_shown(place) if place else 'it'} {what}"


def worded(reason: str) -> str:
    """What is wrong with a part of a schema, its name standing before."""
    if (found := _UNIMPLEMENTED.search(reason)) is not None:
        keywords = [name.strip().strip('"') for name in found[1].split(",")]
        return f"has {_listed(keywords)}, which no output can be held to here; {_advice(keywords)}"
    if "oneOf constraints are not supported" in reason:
        return (
            'has "oneOf" with schemas that one value may match together, which no output can be kept from; '
            "use anyOf, or tell them apart by a required property that is another const in each"
        )
    if (found := _UNKNOWN_FORMAT.search(reason)) is not None:
        return f'has the format "{found[1]}", which is not known here; leave it out, or use pattern'
    if (found := _NO_POINTER.search(reason)) is not None:
        return f'has a $ref to "#{found[1]}", and nothing stands there'
    if (found := _NO_RESOURCE.search(reason)) is not None:
        return f'has a $ref to "{found[1]}", and nothing is fetched; put it under $defs'
    if (found := _UNKNOWN_TYPE.search(reason)) is not None:
        return (
            f'has the type "{found[1]}"; there are array, boolean, integer, null, number, object and string'
        )
    if (found := _UNSATISFIABLE.search(reason)) is not None:
        return f"can be matched by nothing: {found[1]}"
    if (found := _WRONG_VALUE.search(reason)) is not None:
        what = _WHAT_IS_NEEDED.get(found["what"], found["what"])
        return f"has {found['value']} as {found['keyword']}; it must be {what}"
    return f"{_AS_THE_LIBRARY_SAYS}{reason}"


def _advice(keywords: abc.Sequence[str]) -> str:
    """What to write in their place."""
    named: dict[str, list[str]] = {}
    for name in keywords:
        advice = _INSTEAD.get(_GO_WITH.get(name, name), "leave it out, and look at the answer for it")
        named.setdefault(advice, []).append(name)
    if len(named) == 1:
        return next(iter(named))
    return "; ".join(f"for {_listed(names)}, {advice}" for advice, names in named.items())


def _listed(names: abc.Sequence[str]) -> str:
    return " and ".join(f'"{name}"' for name in names)


def _culprit(
    root: dict[str, Any], reason: str, refusal: Refusal, is_late: abc.Callable[[], bool]
) -> tuple[Place, str]:
    """The smallest part that is refused by itself, and why it is."""
    place: Place = ()
    seen = {place}
    while True:
        for part in _parts(root, place):
            if part in seen or is_late():
                continue
            seen.add(part)
            why = refusal(_only(root, part))
            if why is not None:
                place, reason = part, why.replace(_WHOLE, "")
                break
        else:
            return place, reason


def _parts(root: dict[str, Any], place: Place) -> abc.Iterator[Place]:
    schema = value_at(root, place)
    if not isinstance(schema, dict):
        return
    for part in [(), *schemas_within(schema)]:
        at = (*place, *part)
        within = value_at(root, at)
        referred = place_referred_to(within, root)
        if referred is not None and isinstance(value_at(root, referred), dict):
            yield referred
            if within.keys() == {"$ref"}:  # nothing else can be wrong with it
                continue
        yield at


def _only(root: dict[str, Any], place: Place) -> dict[str, Any]:
    """A schema that is what stands at a place of another, whose references go on leading where they did."""
    head = {"$schema": root["$schema"]} if "$schema" in root else {}
    there = f"#{_WHOLE}"
    return {**head, "$ref": there + pointer_to(place), "$defs": {"whole": moved(root, there)}}


def _shown(place: Place) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")
    return path if len(path) <= MAX_SHOWN else f"…{path[-MAX_SHOWN:]}"
