"""The description says what the readers read: the same fields, of the same kinds, within the same limits."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from router.http import asked, description, responses, schemas
from router.http.asked import Asked
from router.http.fields import Fields, parsed
from router.validation import Limits, checked, checked_prompt
from rpc.errors import RequestError

LIMITS = Limits(
    max_total_tokens=1000,
    vocab_size=1 << 62,
    features=frozenset({"prompt_logprobs", "penalties", "logit_bias", "token_lists", "constraints"}),
)
HI = [{"role": "user", "content": "Hi"}]
READERS: dict[str, Callable[[Fields], Any]] = {
    "CompletionRequest": asked.completion,
    "ChatRequest": asked.chat,
    "ResponseRequest": responses.response,
    "TokenizeRequest": asked.tokenizing,
    "DetokenizeRequest": asked.detokenizing,
}
RIGHT: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "Hi"},
    "ChatRequest": {"messages": HI},
    "ResponseRequest": {"input": "Hi"},
    "TokenizeRequest": {"messages": HI},
    "DetokenizeRequest": {"tokens": [1]},
}
# What a value must go with, to be right.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "messages[0].tool_call_id": {"role": "tool"},
    "messages[0].tool_calls": {"role": "assistant"},
}
BESIDE_IN_A_RESPONSE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"include": [responses.LOGPROBS]},
    "tool_choice": {"tools": [{"type": "function", "name": "f"}]},
}
# Where the door looks at more than a schema can say: at a schema's own form, at one value beside another.
SAYS_MORE = {"json_schema", "response_format", "tools", "tool_choice", "messages"}


def resolved(schema: schemas.Schema) -> schemas.Schema:
    while "$ref" in schema:
        schema = schemas.SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def branches(schema: schemas.Schema) -> Iterator[schemas.Schema]:
    schema = resolved(schema)
    if "type" in schema or "anyOf" not in schema:
        yield schema
        return
    for branch in schema["anyOf"]:
        yield from branches(branch)


def take(name: str, body: dict[str, Any]) -> None:
    """As far as the door looks before a model does. Raises RequestError."""
    read = READERS[name](parsed(json.dumps(body).encode()))
    match read:
        case Asked(requests=requests):
            for request in requests:
                checked(request, model="xxx", limits=LIMITS)
        case asked.Tokenizing(prompt=prompt):
            checked_prompt(prompt, LIMITS)


def is_valid(name: str, body: dict[str, Any]) -> bool:
    document = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas.SCHEMAS}}
    return bool(jsonschema.Draft202012Validator(document).is_valid(body))


class Recording(Fields):
    """Notes what is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked_for: set[str] = set()

    def value(self, name: str) -> Any:
        self.asked_for.add(name)
        return super().value(name)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in schemas.SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(schemas.SCHEMAS)
    text = json.dumps(description.described())
    assert {piece.partition('"')[0] for piece in text.split("#/components/schemas/")[1:]} == names


@pytest.mark.parametrize("name", READERS)
def test_the_fields_described_are_those_that_are_read(name: str) -> None:
    body = Recording({**RIGHT[name], **({"logprobs": True} if name == "ChatRequest" else {})})
    READERS[name](body)
    assert body.asked_for == set(schemas.BODIES[name]["properties"])


def edges(schema: schemas.Schema) -> list[tuple[Any, bool]]:
    """Values at the limits of a schema, and whether they are within."""
    match schema:
        case {"const": value}:
            return [(value, True), (f"{value}?", False)]
        case {"enum": values}:
            return [*((value, True) for value in values), ("nothing of the kind", False)]
        case {"type": "boolean"}:
            return [(True, True), (False, True), (0, False), ("true", False)]
        case {"type": "integer" | "number"}:
            return number_edges(schema)
        case {"type": "string"}:
            few, most = schema.get("minLength", 0), schema.get("maxLength", 3)
            beyond = [("x" * (most + 1), False)] if "maxLength" in schema else []
            return [("x" * most, True), (1, False), (["x"], False), ("", not few), *beyond]
        case {"type": "array", "items": items}:
            return list_edges(schema, items)
        case {"type": "object", "properties": fields}:
            whole = {name: a_right(fields[name]) for name in schema["required"]}
            lacking = [({k: v for k, v in whole.items() if k != name}, False) for name in whole]
            return [(whole, True), (whole | {"unheard_of": 1}, False), ([], False), *lacking]
    return [({}, True), ([], False), (1, False)] if schema["type"] == "object" else []


def number_edges(schema: schemas.Schema) -> list[tuple[Any, bool]]:
    is_whole = schema["type"] == "integer"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
    step = 1 if is_whole else 0.001
    wrong = [low - step, high + step, "1", True, *([0.5] if is_whole else [])]
    return [(low, "minimum" in schema), (high, True), *((value, False) for value in wrong)]


def list_edges(schema: schemas.Schema, items: schemas.Schema) -> list[tuple[Any, bool]]:
    few, most = schema.get("minItems", 0), schema.get("maxItems", 3)
    beyond = [([a_right(items)] * (most + 1), False)] if "maxItems" in schema else []
    right = [([a_right(items)] * few, True), ([a_right(items)] * most, True)]
    return [*right, ([None], False), ({}, False), ([], not few), *beyond]


def a_right(schema: schemas.Schema) -> Any:
    return next(value for value, fits in edges(next(branches(schema))) if fits)


def agree(name: str, body: dict[str, Any], *, says_more: bool) -> None:
    """The door takes what is right by the description, and nothing else."""
    refusal: RequestError | None = None
    try:
        take(name, body)
    except RequestError as error:
        refusal = error
    if refusal is None:
        assert is_valid(name, body), body
    else:
        assert refusal.code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
        assert says_more or not is_valid(name, body), (body, refusal.message)


FIELDS = [(name, field) for name in READERS for field in schemas.BODIES[name]["properties"]]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_the_door_takes_and_refuses_at_the_edges_that_are_described(name: str, field: str) -> None:
    schema = schemas.BODIES[name]["properties"][field]
    for branch in branches(schema):
        for value, _ in edges(branch):
            right = {} if name == "TokenizeRequest" and field == "prompt" else RIGHT[name]
            beside = BESIDE.get(field, {})
            if name == "ResponseRequest":
                beside = BESIDE_IN_A_RESPONSE.get(field, beside)
            if field == "best_of" and isinstance(value, int):
                beside = {"n": value}
            if field == "continue_final_message":
                well = [{"role": "assistant", "content": "Well"}]
                beside = {"input" if name == "ResponseRequest" else "messages": well}
            agree(name, right | beside | {field: value}, says_more=field in SAYS_MORE)


@pytest.mark.parametrize("field", schemas.PARTS["Message"]["properties"])
def test_messages_are_described_as_they_are_read(field: str) -> None:
    for branch in branches(schemas.PARTS["Message"]["properties"][field]):
        for value, _ in edges(branch):
            beside = BESIDE.get(f"messages[0].{field}", {})
            message = {"role": "user", "content": "Hi"} | beside | {field: value}
            agree("ChatRequest", {"messages": [message]}, says_more=field == "tool_calls")


ITEMS = {
    "message": {"role": "user", "content": "Hi"},
    "function_call": {"type": "function_call", "call_id": "c", "name": "f"},
    "function_call_output": {"type": "function_call_output", "call_id": "c", "output": "Hi"},
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_and_their_parts_are_described_as_they_are_read(kind: str) -> None:
    (described,) = (
        branch
        for branch in branches(schemas.PARTS["InputItem"])
        if a_right(branch["properties"]["type"]) == kind
    )
    for field, schema in described["properties"].items():
        for branch in branches(schema):
            for value, _ in edges(branch):
                agree("ResponseRequest", {"input": [ITEMS[kind] | {field: value}]}, says_more=False)
    for part in branches(schemas.PARTS["InputPart"]):
        for value, _ in edges(part):
            agree("ResponseRequest", {"input": [ITEMS["message"] | {"content": [value]}]}, says_more=False)
        for field, schema in part["properties"].items():
            for branch in branches(schema):
                for value, _ in edges(branch):
                    own = {"type": a_right(part["properties"]["type"]), "text": "Hi"} | {field: value}
                    agree(
                        "ResponseRequest", {"input": [ITEMS["message"] | {"content": [own]}]}, says_more=False
                    )


def test_null_is_right_for_every_field_that_may_be_absent() -> None:
    for name in READERS:
        body = RIGHT[name] | {
            field: None for field in schemas.BODIES[name]["properties"] if field not in RIGHT[name]
        }
        take(name, body)
        assert is_valid(name, body)
