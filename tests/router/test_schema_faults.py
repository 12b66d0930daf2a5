"""What is said of schemas that the grammar library refuses, the library being asked."""

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import constraint_worker, schema_faults
from router.json_schemas import schemas_within, value_at

TOKENIZER = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(constraint_worker._Bytes()), n_vocab=257, eos_token=256
)
UNIQUE = {"type": "array", "uniqueItems": True}
OVERLAPPING = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
APART = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
]


def said(schema: dict[str, Any]) -> str | None:
    fault = constraint_worker.fault("json_schema", json.dumps(schema), TOKENIZER)
    return None if fault is None else fault[1]


@pytest.mark.parametrize(
    ("schema", "beginning", "advice"),
    [
        (UNIQUE, 'it has "uniqueItems"', "leave it out, and look for equal entries"),
        (
            {"properties": {"a": {"properties": {"b": UNIQUE}}}},
            "properties.a.properties.b has",
            "leave it out",
        ),
        ({"properties": {"a": {"items": UNIQUE}}}, 'properties.a.items has "uniqueItems"', ""),
        ({"anyOf": [{"type": "null"}, UNIQUE]}, "anyOf[1] has", ""),
        ({"patternProperties": {"^x": UNIQUE}}, "patternProperties.^x has", ""),
        ({"prefixItems": [{}, UNIQUE]}, "prefixItems[1] has", ""),
        ({"additionalProperties": UNIQUE}, "additionalProperties has", ""),
        # Named is what is referred to, and no definition that is not.
        (
            {"$defs": {"x": {"not": {}}, "a/b": UNIQUE}, "properties": {"a": {"$ref": "#/$defs/a~1b"}}},
            '$defs.a/b has "uniqueItems"',
            "",
        ),
        (
            {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}, "not": {}}}, "$ref": "#/$defs/t"},
            "$defs.t has",
            "",
        ),
        # A property is called like a keyword.
        (
            {"properties": {"not": {"type": "string", "default": {"not": 1}}, "enum": UNIQUE}},
            "properties.enum",
            "",
        ),
        (OVERLAPPING, 'it has "oneOf"', "use anyOf"),
        ({"properties": {"a": OVERLAPPING, "b": {"oneOf": APART}}}, 'properties.a has "oneOf"', "const"),
        ({"not": {}}, 'it has "not"', "enum, type or anyOf"),
        (
            {"if": {}, "then": {}, "else": {}},
            'it has "else" and "if" and "then"',
            "here; write the cases as anyOf",
        ),
        ({"dependentRequired": {"a": ["b"]}}, 'it has "dependentRequired"', "anyOf"),
        ({"propertyNames": {"pattern": "a"}}, 'it has "propertyNames"', "patternProperties"),
        (
            UNIQUE | {"contains": {}},
            'it has "contains" and "uniqueItems"',
            'for "contains", say what all entries are',
        ),
        ({"unevaluatedProperties": False}, 'it has "unevaluatedProperties"', "use additionalProperties"),
        (
            {"properties": {"a": {"format": "isbn", "type": "string"}}},
            'properties.a has the format "isbn"',
            "pattern",
        ),
        ({"items": {"$ref": "#/$defs/no"}}, 'items has a $ref to "#/$defs/no"', "nothing stands there"),
        ({"$ref": "https://example.com/a"}, 'it has a $ref to "https://example.com/a"', "$defs"),
        ({"properties": {"a": {"type": "int"}}}, 'properties.a has the type "int"', "integer"),
        (
            {"items": {"pattern": "(?=a)", "type": "string"}},
            "items has a pattern that cannot be kept to",
            "look-ahead",
        ),
        ({"items": {"type": "number", "minimum": "3"}}, 'items has "3" as minimum', "must be a number"),
        ({"type": "array", "minItems": -1}, "it has -1 as minItems", "a whole number of at least 0"),
        (
            {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
            "properties.a can be matched by nothing",
            "",
        ),
        ({"enum": "x"}, "it cannot be kept to: enum must be an array", ""),
    ],
)
def test_what_is_at_fault_is_named_with_its_place(
    schema: dict[str, Any], beginning: str, advice: str
) -> None:
    told = said(schema)
    assert told is not None
    assert told.startswith(beginning)
    assert advice in told
    assert "Unimplemented" not in told


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": APART},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"properties": {"uniqueItems": {"type": "boolean"}, "not": {}}},
        {"$defs": {"unused": {"not": {}}}, "type": "string"},
    ],
)
def test_what_can_be_kept_to_is_not_refused(schema: dict[str, Any]) -> None:
    assert said(schema) is None


def test_when_it_is_late_the_whole_is_named() -> None:
    schema = {"properties": {"a": UNIQUE}}
    asked = []

    def refusal(schema: dict[str, Any]) -> str | None:
        asked.append(schema)
        return 'Unimplemented keys: ["uniqueItems"]'

    assert schema_faults.told(schema, refusal(schema) or "", refusal, is_late=lambda: True).startswith(
        "it has"
    )
    assert len(asked) == 2


def test_a_long_place_is_shown_by_its_end() -> None:
    schema: dict[str, Any] = UNIQUE
    for i in range(30):
        schema = {"properties": {f"property{i}": schema}}
    told = said(schema)
    assert told is not None
    assert told.startswith("…")
    assert "properties.property0 has" in told
    assert len(told) < 300


SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "string"}, UNIQUE, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"not": {}}]),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from(["a", "$ref", "~/%"]), inner)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"items": inner, "$defs": st.fixed_dictionaries({"a": inner})}),
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_every_place_that_is_told_leads_to_a_schema(schema: dict[str, Any]) -> None:
    for place in schemas_within(schema):
        assert value_at(schema, place) is not None
    told = said(schema)
    assert told is None or told.startswith(
        ("it ", "properties", "anyOf", "items", "$defs", "nothing", "too", "…")
    )
