"""An answer that is text of a schema or calls of tools: what it is held to, and what is made of it."""

import json
from typing import Any

import jsonschema
import llguidance
import pytest

from router import constraint_worker
from router.constraint_checks import _as_asked
from router.constraints import JsonOrTagged, JsonSchema, checked_form
from router.http import asked
from router.http.asked import Asked
from router.http.fields import Fields
from router.http.text_or_calls import with_calls
from router.http.tools import OfferedTools
from router.tool_calls import Called, ToolCallForm, ToolCallParser, writing_of
from rpc.errors import RequestError

HERMES, BARE, MISTRAL = ToolCallForm
WRITINGS = {
    "hermes": (HERMES, writing_of(HERMES, None)),
    "llama3_json": (BARE, writing_of(BARE, None)),
    "mistral": (MISTRAL, writing_of(MISTRAL, "[TOOL_CALLS]")),
    "mistral, names first": (MISTRAL, writing_of(MISTRAL, "[TOOL_CALLS]f[ARGS]")),
}
TREE = {
    "type": "object",
    "properties": {"leaf": {"enum": [1, 2]}, "left": {"$ref": "#/$defs/tree"}},
    "required": ["leaf"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "plant": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in PARAMETERS.items()]
ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
BERN = Called("weather", '{"city": "Bern"}')
PLANT = Called("plant", '{"leaf": 1, "left": {"leaf": 2}}')
TOKENIZER = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(constraint_worker._Bytes()), n_vocab=257, eos_token=256
)


def chat(schema: dict[str, Any] = ANSWER, tools: list[dict[str, Any]] = TOOLS, **fields: Any) -> Asked:
    messages = [{"role": "user", "content": "Hi"}]
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return asked.chat(Fields({"messages": messages, "tools": tools, "response_format": described, **fields}))


def held_to(asked: Asked) -> JsonOrTagged:
    constraint = asked.requests[0].sampling.constraint
    assert isinstance(constraint, JsonOrTagged)
    checked = checked_form(constraint)
    assert isinstance(checked, JsonOrTagged)
    return checked


def allows(constraint: JsonOrTagged, text: str) -> bool:
    """Whether the text may come, and may be all."""
    written = constraint_worker.grammar(*_as_asked(constraint))
    matcher = constraint_worker._built(written, TOKENIZER)
    assert not matcher.is_error(), matcher.get_error()
    for byte in text.encode():
        mask = matcher.compute_bitmask()
        if not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


def parted(asked: Asked, form: ToolCallForm, text: str) -> tuple[str, list[Called]]:
    assert isinstance(asked.tool_use, OfferedTools)
    parser = ToolCallParser(form, asked.tool_use.names, is_apart=bool(asked.tool_use.functions))
    parts = [part for character in text for part in parser.push(character)] + parser.finish()
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, Called)]


def written(name: str, calls: list[Called]) -> str:
    """As a model of that form writes calls."""
    whole = {
        "hermes": ("arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
        "llama3_json": ("parameters", "", "", "; "),
        "mistral": ("arguments", "", "", ", "),
    }
    if name not in whole:
        return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)
    key, begin, end, between = whole[name]
    text = between.join(f'{begin}{{"name": "{call.name}", "{key}": {call.arguments}}}{end}' for call in calls)
    return f"[TOOL_CALLS][{text}]" if name == "mistral" else text


@pytest.mark.parametrize("name", WRITINGS)
@pytest.mark.parametrize("calls", [[BERN], [PLANT], [BERN, PLANT], [PLANT, BERN, BERN]])
def test_calls_may_come_as_the_model_writes_them_and_are_found(name: str, calls: list[Called]) -> None:
    form, writing = WRITINGS[name]
    both = with_calls(chat(), writing)
    text = written(name, calls)
    assert allows(held_to(both), text)
    assert parted(both, form, text) == ("", calls)


@pytest.mark.parametrize("name", WRITINGS)
def test_text_of_the_schema_may_come_and_is_text(name: str) -> None:
    form, writing = WRITINGS[name]
    both = with_calls(chat(), writing)
    for text in ('{"name": "weather", "size": 5}', '{"name":"<tool_call>","size":1}'):
        assert allows(held_to(both), text)
        assert parted(both, form, text) == (text, [])


@pytest.mark.parametrize("name", WRITINGS)
def test_nothing_else_may_come(name: str) -> None:
    constraint = held_to(with_calls(chat(), WRITINGS[name][1]))
    wrong = Called("weather", '{"town": "Bern"}'), Called("time", "{}"), Called("plant", '{"leaf": 3}')
    for call in wrong:
        assert not allows(constraint, written(name, [call]))
        assert not allows(constraint, written(name, [BERN, call]))
    for text in ("Hello", '{"size": 5}', "", written(name, [BERN])[:-1], "x" + written(name, [BERN])):
        assert not allows(constraint, text)
    assert not allows(constraint, written(name, [BERN]) + ' {"name": "a", "size": 5}')


@pytest.mark.parametrize("name", WRITINGS)
def test_who_wants_one_call_gets_no_more(name: str) -> None:
    constraint = held_to(with_calls(chat(parallel_tool_calls=False), WRITINGS[name][1]))
    assert allows(constraint, written(name, [BERN]))
    assert not allows(constraint, written(name, [BERN, PLANT]))


NESTED = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "object"}}},
    "required": ["steps"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", WRITINGS)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_call_within_text_is_text(name: str, key: str) -> None:
    form, writing = WRITINGS[name]
    call = {"name": "weather", key: {"city": "Bern"}}
    for schema, value in ((NESTED, {"steps": [call, call]}), ({"type": "array"}, [call])):
        both = with_calls(chat(schema), writing)
        text = json.dumps(value)
        assert allows(held_to(both), text)
        assert parted(both, form, text) == (text, [])


@pytest.mark.parametrize("name", WRITINGS)
def test_where_any_object_is_text_what_reads_as_a_call_is_one(name: str) -> None:
    form, writing = WRITINGS[name]
    both = with_calls(chat({}), writing)
    text = written(name, [BERN])
    assert allows(held_to(both), text)
    assert parted(both, form, text) == ("", [BERN])
    assert parted(both, form, '{"a": 1}') == ('{"a": 1}', [])


def test_without_a_form_of_calls_there_is_only_text() -> None:
    both = with_calls(chat(), None)
    assert both.tool_use is None
    assert isinstance(both.requests[0].sampling.constraint, JsonSchema)


def test_what_is_held_to_nothing_or_to_a_call_stays_as_it_is() -> None:
    writing = WRITINGS["hermes"][1]
    for fields in ({"response_format": None}, {"tool_choice": "required"}, {"tool_choice": "none"}):
        alone = chat(**fields)
        assert with_calls(alone, writing) is alone


CALLS = {"name": {"type": "string"}, "parameters": {"type": "object"}}
OTHERS = {"name": {"enum": ["nobody", 5]}, "parameters": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": CALLS, "required": ["name", "parameters"]},
        {"properties": {"name": {"const": "plant"}, "arguments": {}}},
        {"anyOf": [ANSWER, {"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": CALLS}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"properties": CALLS}, {"$ref": "#/$defs/a"}]}}},
    ],
)
def test_a_schema_that_speaks_of_calls_is_refused_where_they_have_no_tags(schema: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match="which is how this model writes a call; give one of them"
    ) as caught:
        with_calls(chat(schema), WRITINGS["llama3_json"][1])
    assert caught.value.field == "response_format.json_schema.schema"
    for name in WRITINGS.keys() - {"llama3_json"}:
        with_calls(chat(schema), WRITINGS[name][1])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": OTHERS},
        {"properties": CALLS | {"why": {}}, "required": ["why"]},
        {"properties": {"name": {"const": "nobody"}, "arguments": {}}},
        {"properties": {"name": {}}},
        {"properties": 5, "anyOf": 5, "$ref": 5},
        NESTED | {"properties": {"steps": {"items": {"properties": CALLS}}}},
    ],
)
def test_a_schema_that_only_looks_like_it_is_not_refused(schema: dict[str, Any]) -> None:
    with_calls(chat(schema), WRITINGS["llama3_json"][1])


def test_every_part_is_named_as_the_body_has_it() -> None:
    names = with_calls(chat(), WRITINGS["hermes"][1]).names
    assert names["sampling.json_or_tagged.json_schema"] == "response_format.json_schema.schema"
    assert names["sampling.json_or_tagged.tags[1].json_schema"] == "tools[1].function.parameters"


def test_a_name_that_could_not_be_told_before_its_arguments_is_refused() -> None:
    tools = [TOOLS[0], {"function": {"name": "a b"}}]
    with pytest.raises(RequestError, match=r'tools\[1\] has the name "a b", which this model cannot write'):
        with_calls(chat(tools=tools), WRITINGS["mistral, names first"][1])
    with_calls(chat(tools=tools), WRITINGS["mistral"][1])


def test_what_calls_are_held_to_is_the_parameters_of_their_functions() -> None:
    for _, writing in WRITINGS.values():
        assert writing is not None
        for tag, (name, parameters) in zip(
            held_to(with_calls(chat(), writing)).tags, PARAMETERS.items(), strict=True
        ):
            arguments = {"leaf": 1, "left": {"leaf": 2}} if name == "plant" else {"city": "Bern"}
            call = arguments if writing.names_first else {"name": name, writing.arguments: arguments}
            jsonschema.validate(arguments, parameters)
            jsonschema.validate(call, json.loads(tag.text))
