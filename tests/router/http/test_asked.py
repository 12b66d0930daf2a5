import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chat import ToolCall
from router.constraints import Choice, Constraint, JsonSchema, Regex
from router.http import asked
from router.http.asked import MAX_CHOICES_IN_ALL, Asked
from router.http.fields import Fields, parsed
from router.http.tools import ForcedFunction, Function, OfferedTools
from router.validation import Conversation, Limits, checked
from rpc.errors import RequestError

HI = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> Asked:
    return asked.completion(parsed(json.dumps({"prompt": "Hi"} | fields).encode()))


def chat(**fields: Any) -> Asked:
    return asked.chat(parsed(json.dumps({"messages": HI} | fields).encode()))


def conversation(**fields: Any) -> Conversation:
    (request,) = chat(**fields).requests
    assert isinstance(request.prompt, Conversation)
    return request.prompt


def refusal(read: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        read(**fields)
    return raised.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_each_form_of_prompt_is_one_request_a_prompt(prompt: object, prompts: list[object]) -> None:
    assert [request.prompt for request in completion(prompt=prompt).requests] == prompts


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ([None], "prompt[0]"),
        (["a", None], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([1, None], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1, None]], "prompt[0][1]"),
        ([[1], "a"], "prompt[1]"),
        ([{}], "prompt[0]"),
        (1, "prompt"),
    ],
)
def test_b37_b98_a_prompt_of_another_form_is_refused_by_its_place(prompt: object, field: str) -> None:
    error = refusal(completion, prompt=prompt)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_b102_choices_are_counted_over_all_prompts() -> None:
    assert len(completion(prompt=["a"] * 8, n=16).requests) * 16 == MAX_CHOICES_IN_ALL
    error = refusal(completion, prompt=["a"] * 9, n=16)
    assert error.field == "n"
    assert str(MAX_CHOICES_IN_ALL) in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": -1},
        {"n": True},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": 1e9},
        {"stop": [None, "a"]},
        {"stop": 5},
        {"stop_token_ids": [None]},
        {"seed": 2**63},
        {"seed": "100"},
        {"seed": 1.5},
        {"stream": 1},
        {"stream_options": {"include_usage": True}},
        {"request_id": "x" * 125},
        {"best_of": 2},
        {"suffix": "end"},
        {"store": True},
        {"service_tier": "flex"},
        {"metadata": "a"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object", "x": 1}},
        {"logprobs": 6},
        {"logprobs": -1},
        {"presence_penalty": "1"},
        {"prompt_logprobs": True},
        {"logit_bias": [1]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"": None}},
        {"logit_bias": {"5": None}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"07": 1}},
        {"logit_bias": {"1.0": 1}},
        {"logit_bias": {"9" * 40: 1}},
        {"logit_bias": {"5": "1"}},
        {"allowed_token_ids": 5},
        {"banned_token_ids": [None]},
        {"nonsense": 1},
    ],
)
def test_a_wrong_or_unsupported_field_is_refused_by_name(fields: dict[str, object]) -> None:
    assert re.match(r"\w+", refusal(completion, **fields).field)[0] in fields  # type: ignore[index]


def test_usage_with_each_chunk_needs_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=options).continuous_usage
    error = refusal(completion, stream=True, stream_options=options | {"include_usage": False})
    assert error.field == "stream_options.continuous_usage_stats"


def test_unknown_stream_options_are_refused_by_name() -> None:
    error = refusal(completion, stream=True, stream_options={"include_obfuscation": True})
    assert error.field == "stream_options.include_obfuscation"


@pytest.mark.parametrize(
    ("name", "off", "on", "meant"),
    [
        ("presence_penalty", 0, 0.5, 0.5),
        ("frequency_penalty", 0.0, -1, -1.0),
        ("repetition_penalty", 1.0, 1.1, 1.1),
        ("logit_bias", {}, {"5": 1, "7": -2.5}, {5: 1.0, 7: -2.5}),
        ("allowed_token_ids", [], [5, 6], (5, 6)),
        ("banned_token_ids", [], [7], (7,)),
        ("prompt_logprobs", False, 1, 1),
    ],
)
@pytest.mark.parametrize("read", [completion, chat])
def test_bias_penalties_and_lists_arrive_and_off_is_off(
    read: Callable[..., Asked], name: str, off: object, on: object, meant: object
) -> None:
    assert getattr(read(**{name: on}).requests[0].sampling, name) == meant
    limits = Limits(max_total_tokens=512, vocab_size=272)
    assert checked(read(**{name: off}).requests[0], model="tiny", limits=limits)


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    both = completion(echo=True, logprobs=3)
    assert (both.requests[0].sampling.prompt_logprobs, both.echo_logprobs) == (3, 3)
    assert not both.prompt_logprobs
    assert both.names == {"sampling.prompt_logprobs": "logprobs"}
    more = completion(echo=True, logprobs=0, prompt_logprobs=2)
    assert (more.requests[0].sampling.prompt_logprobs, more.echo_logprobs) == (2, 0)
    assert more.prompt_logprobs
    assert completion(logprobs=3).requests[0].sampling.prompt_logprobs is None
    assert completion(echo=True).requests[0].sampling.prompt_logprobs is None


def test_b77_null_is_as_if_absent_for_every_field_at_once() -> None:
    nullable = [
        *(
            "temperature",
            "top_p",
            "n",
            "stop",
            "max_tokens",
            "seed",
            "logit_bias",
            "logprobs",
            "user",
            "stream",
        ),
        *("stream_options", "presence_penalty", "frequency_penalty", "response_format", "model", "top_k"),
        *("min_p", "timeout", "request_id", "echo", "suffix", "best_of"),
    ]
    assert completion(**dict.fromkeys(nullable)) == completion()
    assert (
        chat(**dict.fromkeys([*nullable, "tools", "tool_choice", "top_logprobs", "max_completion_tokens"]))
        == chat()
    )


def test_every_field_arrives() -> None:
    request = completion(
        model="m", temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, max_tokens=9, min_tokens=2, n=2,
        stop=["a", "b"], ignore_eos=True, stop_token_ids=[7], logprobs=0, include_stop=True, priority=-2,
        cache_salt="red", request_id="mine",
    ).requests[0]  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-1, 9, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.logprobs) == (True, (7,), 0)
    assert (request.model, request.n, request.stop, request.include_stop) == ("m", 2, ("a", "b"), True)
    assert (request.priority, request.cache_salt, request.request_id) == (-2, "red", "mine")


def test_one_stop_may_stand_alone() -> None:
    assert completion(stop="a").requests[0].stop == ("a",)
    assert completion(stop=[]).requests[0].stop == ()


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ],
)
def test_b69_logprobs_of_a_chat(fields: dict[str, object], logprobs: int | None) -> None:
    assert chat(**fields).requests[0].sampling.logprobs == logprobs


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"top_logprobs": 1, "logprobs": False}])
def test_b69_alternatives_need_logprobs(fields: dict[str, object]) -> None:
    assert refusal(chat, **fields).field == "top_logprobs"


def test_either_name_of_the_length_is_taken_and_both_are_refused() -> None:
    assert chat(max_tokens=3).requests[0].sampling.max_tokens == 3
    assert chat(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
    assert refusal(chat, max_tokens=3, max_completion_tokens=3).field == "max_tokens"


def test_what_popular_tools_say_beside_their_question_is_taken_where_nothing_depends_on_it() -> None:
    labels = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "metadata": {"run": "7"}}
    off = {"store": False, "service_tier": "auto", "stream_options": {"include_obfuscation": False}}
    assert completion(stream=True, **labels, **off).stream
    assert chat(stream=True, **labels, **off, parallel_tool_calls=False, modalities=["text"]).stream
    assert refusal(chat, modalities=["text", "audio"]).field == "modalities"
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    echoed = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "tool_calls": [call]}
    marked = {"role": "user", "content": "b", "type": "text"}
    assert [m.content for m in conversation(messages=[echoed, marked]).messages] == ["a", "b"]
    cited = echoed | {"annotations": [{"type": "url_citation"}]}
    assert refusal(chat, messages=[cited]).field == "messages[0].annotations"


def test_a_message_may_be_a_list_of_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (None, "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [None]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [None]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_b98_a_wrong_message_is_refused_by_its_place(message: object, field: str) -> None:
    assert refusal(chat, messages=[message]).field == field


def test_tools_go_to_the_template_as_json_unless_none_is_to_be_chosen() -> None:
    tool = {"type": "function", "function": {"name": "wetter", "description": "Grüße"}}
    assert [json.loads(text) for text in conversation(tools=[tool]).tools] == [tool]
    assert conversation(tools=[tool], tool_choice="none").tools == []
    assert refusal(chat, tools=[None]).field == "tools[0]"
    assert refusal(chat, tools=[{**tool, "x": float("nan")}]).field == "tools[0]"


def test_b101_a_hundred_thousand_messages_are_refused_by_their_number() -> None:
    error = refusal(chat, messages=HI * 100_000)
    assert error.field == "messages"
    assert "100000" in error.message


def test_tokenizing_takes_a_prompt_or_a_conversation() -> None:
    assert asked.tokenizing(parsed(b'{"prompt": "a"}')).prompt == "a"
    assert isinstance(asked.tokenizing(parsed(json.dumps({"messages": HI}).encode())).prompt, Conversation)
    with pytest.raises(RequestError, match="messages"):
        asked.tokenizing(parsed(json.dumps({"messages": HI, "prompt": "a"}).encode()))


NAMES = st.sampled_from(
    [
        *("prompt", "messages", "model", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "n"),
        *("max_completion_tokens", "stop", "logprobs", "top_logprobs", "echo", "stream", "stream_options"),
        *("tools", "tool_choice", "response_format", "logit_bias", "timeout", "user", "suffix", "best_of"),
        *("stop_token_ids", "priority", "cache_salt", "request_id", "ignore_eos", "min_tokens"),
        *("presence_penalty", "repetition_penalty", "allowed_token_ids", "prompt_logprobs"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(HI),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(body=st.dictionaries(NAMES, VALUES), read=st.sampled_from([asked.completion, asked.chat]))
def test_b55_b97_b98_whatever_is_asked_is_a_request_or_a_refusal(
    body: dict[str, object], read: Callable[[Fields], Asked]
) -> None:
    with contextlib.suppress(RequestError):
        for request in read(parsed(json.dumps(body).encode())).requests:
            checked(request, model="tiny", limits=Limits(max_total_tokens=512, vocab_size=272))


def test_variables_of_the_template_are_an_object() -> None:
    assert conversation().chat_template_kwargs == ""
    asked = conversation(chat_template_kwargs={"enable_thinking": False, "ü": None})
    assert json.loads(asked.chat_template_kwargs) == {"enable_thinking": False, "ü": None}
    assert refusal(chat, chat_template_kwargs=[]).field == "chat_template_kwargs"
    assert refusal(chat, chat_template_kwargs={"a": float("inf")}).field == "chat_template_kwargs"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"b": -float("inf")}]])
def test_what_is_taken_and_used_for_nothing_is_json_too(value: object) -> None:
    for read in (completion, chat):
        assert refusal(read, metadata={"a": value}).field == "metadata"
        assert read(metadata={"a": [1.5, None]})


def test_kinds_that_are_not_served_are_named_in_few_words() -> None:
    long = "x" * 100_000
    for fields in (
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"response_format": {"type": long}},
        {"service_tier": long},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": long}}},
        {"tools": [{"function": {"name": "f", "parameters": {"type": long}}}], "tool_choice": "required"},
    ):
        told = refusal(chat, **fields)
        assert len(told.message) < 250
        assert '"xxx' in told.message


# --- constraints and tools --------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonSchema("{}")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": False, "schema": {"type": "null"}},
                }
            },
            JsonSchema('{"type": "null"}'),
        ),
        ({"json_schema": {"const": "é"}}, JsonSchema('{"const": "é"}')),
        ({"json_schema": "[]"}, JsonSchema("[]")),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": ["a", "b"]}, Choice(("a", "b"))),
        ({"structured_outputs": None}, None),
        ({"structured_outputs": {"json": None, "json_object": False}}, None),
        ({"structured_outputs": {"json": {"const": "é"}}}, JsonSchema('{"const": "é"}')),
        ({"structured_outputs": {"json_object": True}}, JsonSchema("{}")),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(("a", "b"))),
    ],
)
def test_what_an_output_is_held_to(fields: dict[str, object], constraint: Constraint | None) -> None:
    assert completion(**fields).requests[0].sampling.constraint == constraint
    assert chat(**fields).requests[0].sampling.constraint == constraint


def test_b99_one_output_is_held_to_one_thing() -> None:
    assert refusal(completion, regex="a", choice=["a"]).field == "choice"
    assert refusal(completion, regex="a", response_format={"type": "json_object"}).field == "regex"
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        refused = refusal(chat, regex="a", tools=[WEATHER], tool_choice=choice)
        assert refused.field == "regex"
        assert "set tool_choice to none" in refused.message
    assert chat(regex="a", tools=[WEATHER], tool_choice="none").requests[0].sampling.constraint == Regex("a")
    assert refusal(completion, json_schema=5).field == "json_schema"
    assert refusal(completion, choice=[None]).field == "choice[0]"
    as_vllm = {"regex": "a", "choice": ["a"]}
    assert refusal(chat, structured_outputs=as_vllm).field == "structured_outputs.choice"
    assert refusal(chat, regex="a", structured_outputs={"regex": "a"}).field == "structured_outputs.regex"
    assert refusal(chat, structured_outputs={"grammar": "root ::= a"}).field == "structured_outputs.grammar"


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_a_forced_function_holds_the_output_to_its_parameters(choice: object, finish_reason: str) -> None:
    asked = chat(tools=[WEATHER], tool_choice=choice)
    constraint = asked.requests[0].sampling.constraint
    assert isinstance(constraint, JsonSchema)
    assert json.loads(constraint.text) == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert isinstance(asked.tool_use, ForcedFunction)
    assert (asked.tool_use.name, asked.tool_use.finish_reason) == ("weather", finish_reason)
    assert asked.names["sampling.json_schema"] == "tools[0].function.parameters"


FUNCTION = Function("weather", WEATHER["function"]["parameters"], 0, "tools[0].function.parameters")  # type: ignore[index]
PLACES = {
    "type": "object",
    "$defs": {"place": {"type": "object", "properties": {"near": {"$ref": "#/$defs/place"}}}},
    "properties": {"$ref": {"const": "#/as/it/is"}, "at": {"anyOf": [{"$ref": "#/$defs/place"}]}},
}
FIND = {"type": "function", "function": {"name": "find", "parameters": PLACES}}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def test_one_of_several_tools_must_be_called_with_what_its_schema_calls_its_root() -> None:
    asked = chat(tools=[WEATHER, FIND, {"function": {"name": "now"}}], tool_choice="required")
    constraint = asked.requests[0].sampling.constraint
    assert isinstance(constraint, JsonSchema)
    weather, find, now = json.loads(constraint.text)["anyOf"]
    assert weather == {
        "type": "object",
        "properties": {"name": {"const": "weather"}, "arguments": WEATHER["function"]["parameters"]},  # type: ignore[index]
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    root = "#/anyOf/1/properties/arguments"
    arguments = find["properties"]["arguments"]
    assert arguments["$defs"]["place"]["properties"]["near"] == {"$ref": f"{root}/$defs/place"}
    assert arguments["properties"] == {
        "$ref": {"const": "#/as/it/is"},
        "at": {"anyOf": [{"$ref": f"{root}/$defs/place"}]},
    }
    assert now["properties"]["arguments"] == NO_ARGUMENTS
    call = {"name": "find", "arguments": {"at": {"near": {"near": {}}}}}
    jsonschema.validate(call, json.loads(constraint.text))
    assert asked.tool_use == OfferedTools(frozenset({"weather", "find", "now"}), schema=constraint.text)
    assert asked.names["sampling.json_schema"] == "tools"


@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {"a": {"type": "string"}}}, None, {"type": ["object", "null"]}]
)
def test_arguments_of_a_call_are_an_object_where_the_schema_does_not_say_so(parameters: object) -> None:
    """So that what the output is held to is a call."""
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    for call in (
        chat(tools=tools, tool_choice="required"),
        chat(tools=[WEATHER, *tools], tool_choice={"type": "function", "function": {"name": "f"}}),
        chat(tools=[WEATHER, *tools], tool_choice="required"),
    ):
        constraint = call.requests[0].sampling.constraint
        assert isinstance(constraint, JsonSchema)
        schema = json.loads(constraint.text)
        if "anyOf" in schema:
            schema = schema["anyOf"][1]["properties"]["arguments"]
        # As OpenAI says: a function without parameters takes none.
        assert schema == (NO_ARGUMENTS if parameters is None else {**parameters, "type": "object"})  # type: ignore[dict-item]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_forced_is_no_text_that_a_schema_could_hold(choice: object) -> None:
    """As agents ask that force the first call, and want the last answer in a schema."""
    forced = chat(tools=[WEATHER], tool_choice=choice)
    both = chat(tools=[WEATHER], tool_choice=choice, response_format={"type": "json_object"})
    assert both.requests[0].sampling.constraint == forced.requests[0].sampling.constraint
    assert (both.tool_use, both.names) == (forced.tool_use, forced.names)


def test_data_in_a_schema_stays_as_it_is_when_the_schema_is_moved() -> None:
    data = {"$ref": "#/as/it/is"}
    parameters = {
        "type": "object",
        "properties": {
            "const": {"$ref": "#/$defs/a"},  # names of the client's own, whatever they are
            "enum": {"enum": [data]},
            "default": {"const": data, "default": data, "examples": [data]},
            "elsewhere": {"$id": "http://example.com/a", **data},
        },
        "$defs": {"a": {}, "enum": {"$ref": "#/$defs/a"}},
    }
    tools = [{"function": {"name": "f", "parameters": parameters}}, WEATHER]
    constraint = chat(tools=tools, tool_choice="required").requests[0].sampling.constraint
    assert isinstance(constraint, JsonSchema)
    there = {"$ref": "#/anyOf/0/properties/arguments/$defs/a"}
    assert json.loads(constraint.text)["anyOf"][0]["properties"]["arguments"] == {
        **parameters,
        "properties": {**parameters["properties"], "const": there},  # type: ignore[dict-item]
        "$defs": {"a": {}, "enum": there},
    }


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"not": schema}
    tools = [WEATHER, {"function": {"name": "f", "parameters": schema}}]
    with pytest.raises(RequestError, match="nested too deeply") as raised:
        asked.chat(Fields({"messages": HI, "tools": tools, "tool_choice": "required"}))
    assert raised.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, OfferedTools(frozenset({"weather"}))),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, OfferedTools(frozenset({"weather"}))),
        ({"parallel_tool_calls": False}, OfferedTools(frozenset({"weather"}), max_calls=1)),
        ({"tool_choice": "none"}, None),
        ({"tools": []}, None),
        ({"regex": "a", "tool_choice": "none"}, None),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, None),
        (
            {"response_format": {"type": "json_object"}, "parallel_tool_calls": False},
            OfferedTools(frozenset({"weather"}), max_calls=1, functions=(FUNCTION,)),
        ),
        ({"response_format": {"type": "text"}}, OfferedTools(frozenset({"weather"}))),
    ],
)
def test_calls_are_looked_for_where_tools_are_offered(
    fields: dict[str, object], use: OfferedTools | None
) -> None:
    assert chat(**{"tools": [WEATHER], **fields}).tool_use == use


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([], "required", "tool_choice"),
        ([WEATHER], {"type": "function", "function": {"name": "x"}}, "tool_choice"),
        ([WEATHER], {"type": "custom"}, "tool_choice"),
        ([WEATHER], 5, "tool_choice"),
        ([{"type": "function"}], "required", "tools[0].function"),
        ([WEATHER, {"type": "function"}], "required", "tools[1].function"),
        ([{"function": {}}], "required", "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], "required", "tools[0].function.parameters"),
        (
            [{"function": {"name": "f", "parameters": {"type": "array"}}}],
            {"type": "function", "function": {"name": "f"}},
            "tools[0].function.parameters",
        ),
        (
            [WEATHER, {"function": {"name": "f", "parameters": {"type": ["array", "null"]}}}],
            "required",
            "tools[1].function.parameters",
        ),
    ],
)
def test_other_choices_of_tools_are_refused_by_name(tools: list[object], choice: object, field: str) -> None:
    assert refusal(chat, tools=tools, tool_choice=choice).field == field


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
@pytest.mark.parametrize(
    ("tool", "field", "code"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "tools[1].type", grpc.StatusCode.UNIMPLEMENTED),
        ({"type": 5, "function": {"name": "f"}}, "tools[1].type", grpc.StatusCode.INVALID_ARGUMENT),
        ({"a": 1}, "tools[1].function", grpc.StatusCode.INVALID_ARGUMENT),
        ({"type": "function", "function": 5}, "tools[1].function", grpc.StatusCode.INVALID_ARGUMENT),
        ({"type": "function", "function": {}}, "tools[1].function.name", grpc.StatusCode.INVALID_ARGUMENT),
        (
            {"type": "function", "function": {"name": 5}},
            "tools[1].function.name",
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": "x"}},
            "tools[1].function.parameters",
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}},
            "tools[1].function.parameters",
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (WEATHER, "tools[1].function.name", grpc.StatusCode.INVALID_ARGUMENT),  # the name of the first
    ],
)
def test_a_tool_that_is_no_function_is_refused_by_name_whatever_is_to_be_chosen(
    choice: str | None, tool: object, field: str, code: grpc.StatusCode
) -> None:
    error = refusal(chat, tools=[WEATHER, tool], tool_choice=choice)
    assert (error.field, error.code) == (field, code)
    assert field in error.message


def test_turns_of_tools_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    _, called, answered = conversation(messages=messages).messages
    assert (called.content, called.tool_calls) == ("", (ToolCall("c1", "weather", '{"city": "Bern"}'),))
    assert (answered.content, answered.tool_call_id) == ("rain", "c1")


def test_the_last_message_may_be_continued() -> None:
    assert not conversation().continue_final_message
    continued = conversation(continue_final_message=True)
    assert continued.continue_final_message
    assert not continued.add_generation_prompt
