"""What a body of /v1/responses asks for, field by field."""

import json
from typing import Any

import grpc
import pytest

from router.chat import ChatMessage, ToolCall
from router.constraints import Constraint, JsonSchema, Regex
from router.http import asked, responses
from router.http.fields import parsed
from router.http.responses import LOGPROBS, AskedResponse
from router.http.tools import ForcedFunction, Function, OfferedTools
from router.validation import MAX_TOOL_CALLS, Conversation
from rpc.errors import RequestError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
UNIMPLEMENTED, INVALID = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT


def response(**fields: Any) -> AskedResponse:
    return responses.response(parsed(json.dumps({"input": "Hi"} | fields).encode()))


def conversation(**fields: Any) -> Conversation:
    (request,) = response(**fields).requests
    assert isinstance(request.prompt, Conversation)
    return request.prompt


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        response(**fields)
    return raised.value


def repeated(name: str, **fields: Any) -> Any:
    return json.loads(response(**fields).repeated[name])


# --- input ------------------------------------------------------------------------------------------


def call(name: str, call_id: str, arguments: str = "{}") -> dict[str, str]:
    return {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments}


def result(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


USER = {"role": "user", "content": "Hi"}
SAID = {  # as an answer has it
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [
        {"type": "output_text", "text": "Well", "annotations": [], "logprobs": [{"token": "Well"}]},
        {"type": "output_text", "text": ", yes"},
    ],
}


@pytest.mark.parametrize(
    ("given", "turns"),
    [
        ("Hi", [ChatMessage("user", "Hi")]),
        ([USER], [ChatMessage("user", "Hi")]),
        (
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]}],
            [ChatMessage("developer", "a")],
        ),
        (
            [USER, SAID, USER],
            [ChatMessage("user", "Hi"), ChatMessage("assistant", "Well, yes"), ChatMessage("user", "Hi")],
        ),
        ([SAID, SAID], [ChatMessage("assistant", "Well, yes")] * 2),
        (
            [
                SAID,
                call("f", "c1") | {"id": "fc_1", "status": "completed"},
                call("g", "c2", ""),
                result("c1", "one"),
                result("c2", [{"type": "input_text", "text": "two"}]) | {"id": "fco", "status": None},
                {**SAID, "content": "Done"},
            ],
            [
                ChatMessage(
                    "assistant",
                    "Well, yes",
                    tool_calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "")),
                ),
                ChatMessage("tool", "one", tool_call_id="c1"),
                ChatMessage("tool", "two", tool_call_id="c2"),
                ChatMessage("assistant", "Done"),
            ],
        ),
        (
            [USER, call("f", "c1"), {**SAID, "content": "behind"}, call("f", "c2"), result("c1", "")],
            [
                ChatMessage("user", "Hi"),
                ChatMessage(
                    "assistant", "behind", tool_calls=(ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}"))
                ),
                ChatMessage("tool", "", tool_call_id="c1"),
            ],
        ),
    ],
    ids=["text", "easy", "parts", "an answer", "two answers", "calls", "said behind a call"],
)
def test_items_become_turns(given: object, turns: list[ChatMessage]) -> None:
    assert conversation(input=given).messages == turns
    said = conversation(input=given, instructions="Be brief.").messages
    assert said == [ChatMessage("system", "Be brief."), *turns]


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        (None, INVALID, "input"),
        ([], INVALID, "input"),
        (5, INVALID, "input"),
        (["Hi"], INVALID, "input[0]"),
        ([USER] * 4097, INVALID, "input"),
        ([{"content": "Hi"}], INVALID, "input[0].role"),
        ([USER | {"role": "tool"}], INVALID, "input[0].role"),
        ([{"role": "user"}], INVALID, "input[0].content"),
        ([USER | {"content": 5}], INVALID, "input[0].content"),
        ([USER | {"name": "Bob"}], INVALID, "input[0].name"),
        ([USER | {"status": "done"}], INVALID, "input[0].status"),
        ([USER, {"type": "reasoning", "id": "r", "summary": []}], UNIMPLEMENTED, "input[1].type"),
        ([{"type": "item_reference", "id": "msg_1"}], UNIMPLEMENTED, "input[0]"),
        ([{"type": "web_search_call"}], UNIMPLEMENTED, "input[0].type"),
        ([USER | {"content": [{"type": "input_image"}]}], UNIMPLEMENTED, "input[0].content[0]"),
        ([USER | {"content": [{"type": "input_file"}]}], UNIMPLEMENTED, "input[0].content[0]"),
        ([USER | {"content": [{"type": "input_text"}]}], INVALID, "input[0].content[0].text"),
        (
            [USER | {"content": [{"type": "input_text", "text": "a", "annotations": []}]}],
            INVALID,
            "input[0].content[0].annotations",
        ),
        (
            [USER | {"content": [{"type": "output_text", "text": "a", "annotations": [{}]}]}],
            UNIMPLEMENTED,
            "input[0].content[0].annotations",
        ),
        ([call("", "c")], INVALID, "input[0].name"),
        ([call("f", "")], INVALID, "input[0].call_id"),
        ([call("f", "c") | {"arguments": {}}], INVALID, "input[0].arguments"),
        ([{"type": "function_call_output", "output": ""}], INVALID, "input[0].call_id"),
        ([result("c", None)], INVALID, "input[0].output"),
        ([result("c", [{"type": "input_image"}])], UNIMPLEMENTED, "input[0].output[0]"),
        ([call("f", "c")] * (MAX_TOOL_CALLS + 1), INVALID, "input"),
    ],
)
def test_items_that_are_wrong_or_not_served_are_refused_by_name(
    given: object, code: grpc.StatusCode, field: str
) -> None:
    refused = refusal(input=given)
    assert (refused.code, refused.field) == (code, field)
    assert refused.message.startswith(field)


# --- options ----------------------------------------------------------------------------------------


def test_what_chats_have_too_is_read_as_theirs() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "min_tokens": 1,
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "ignore_eos": False,
        "logit_bias": {"5": 1}, "stop": "x", "stop_token_ids": [3], "include_stop": True, "priority": 2,
        "cache_salt": "s", "request_id": "mine", "timeout": 5, "stream": True, "regex": "a",
        "chat_template_kwargs": {"enable_thinking": False}, "user": "u", "service_tier": "auto",
        "model": "m", "allowed_token_ids": [97], "banned_token_ids": [98],
    }  # fmt: skip
    mine = response(**options, max_output_tokens=9)
    theirs = asked.chat(parsed(json.dumps({"messages": [USER], "max_tokens": 9, **options}).encode()))
    assert mine.requests == theirs.requests
    assert (mine.stream, mine.timeout_seconds) == (theirs.stream, theirs.timeout_seconds)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"previous_response_id": "resp_1"}, UNIMPLEMENTED, "previous_response_id"),
        ({"conversation": "conv_1"}, UNIMPLEMENTED, "conversation"),
        ({"prompt": {"id": "p"}}, UNIMPLEMENTED, "prompt"),
        ({"max_tool_calls": 1}, UNIMPLEMENTED, "max_tool_calls"),
        ({"background": True}, UNIMPLEMENTED, "background"),
        ({"truncation": "auto"}, UNIMPLEMENTED, "truncation"),
        ({"reasoning": {"effort": "low"}}, UNIMPLEMENTED, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, UNIMPLEMENTED, "include[0]"),
        ({"include": [LOGPROBS], "tools": [WEATHER]}, UNIMPLEMENTED, "include"),
        ({"top_logprobs": 1}, INVALID, "top_logprobs"),
        ({"service_tier": "flex"}, UNIMPLEMENTED, "service_tier"),
        ({"n": 2}, UNIMPLEMENTED, "n"),
        ({"prompt_logprobs": 1}, UNIMPLEMENTED, "prompt_logprobs"),
        ({"return_token_ids": True}, UNIMPLEMENTED, "return_token_ids"),
        ({"stream_options": {}}, INVALID, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            INVALID,
            "stream_options.include_usage",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            UNIMPLEMENTED,
            "stream_options.include_obfuscation",
        ),
        ({"store": 1}, INVALID, "store"),
        ({"messages": []}, INVALID, "messages"),
        ({"max_tokens": 5}, INVALID, "max_tokens"),
        ({"response_format": {"type": "text"}}, INVALID, "response_format"),
        ({"unheard_of": 1}, INVALID, "unheard_of"),
        ({"metadata": {"a": 1}}, INVALID, "metadata.a"),
        ({"metadata": {"a": None}}, INVALID, "metadata"),
        ({"metadata": {"a" * 65: ""}}, INVALID, "metadata"),
        ({"metadata": {"a": "b" * 513}}, INVALID, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, INVALID, "metadata"),
        ({"text": {"verbosity": "low"}}, UNIMPLEMENTED, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, UNIMPLEMENTED, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, INVALID, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, INVALID, "text.format.schema"),
        ({"text": {"format": {"type": "text"}, "regex": "a"}}, INVALID, "text.regex"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, INVALID, "regex"),
    ],
)
def test_what_is_wrong_or_not_served_is_refused_by_name(
    fields: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    refused = refusal(**fields)
    assert (refused.code, refused.field) == (code, field)
    assert refused.message.startswith(field)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"store": False},
        {"background": False},
        {"truncation": "disabled"},
        {"include": []},
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": None, "summary": None}},
        {"top_logprobs": 0},
        {"text": {}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"service_tier": "default", "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"},
        {"n": 1, "prompt_logprobs": False, "return_token_ids": False},
    ],
)
def test_what_asks_for_what_happens_anyway_changes_nothing(fields: dict[str, Any]) -> None:
    assert response(**fields).requests == response().requests


def test_logprobs_are_asked_for_by_include() -> None:
    assert response().requests[0].sampling.logprobs is None
    assert response(include=[LOGPROBS]).requests[0].sampling.logprobs == 0
    assert response(include=[LOGPROBS], top_logprobs=3).requests[0].sampling.logprobs == 3
    without = response(include=[LOGPROBS], tools=[WEATHER], tool_choice="none")
    assert without.requests[0].sampling.logprobs == 0


SCHEMA = {"type": "json_schema", "name": "city", "schema": CITY}


@pytest.mark.parametrize(
    ("fields", "constraint", "name", "told"),
    [
        ({}, None, None, {"type": "text"}),
        (
            {"text": {"format": {"type": "json_object"}}},
            JsonSchema("{}"),
            "text.format",
            {"type": "json_object"},
        ),
        (
            {"text": {"format": SCHEMA | {"description": "ü"}}},
            JsonSchema(json.dumps(CITY)),
            "text.format.schema",
            SCHEMA | {"description": "ü", "strict": True},
        ),
        ({"regex": "a+"}, Regex("a+"), "regex", {"type": "text"}),
    ],
)
def test_what_an_output_is_held_to_and_how_the_answer_says_it(
    fields: dict[str, Any], constraint: Constraint | None, name: str | None, told: dict[str, Any]
) -> None:
    read = response(**fields)
    assert read.requests[0].sampling.constraint == constraint
    assert name is None or name in read.names.values()
    assert json.loads(read.repeated["text"]) == {"format": told, "verbosity": "medium"}


# --- tools ------------------------------------------------------------------------------------------


def test_a_template_sees_tools_as_in_a_chat_and_the_answer_as_they_came() -> None:
    tool = {"type": "function", "parameters": CITY, "strict": True, "name": "weather", "description": None}
    (shown,) = conversation(tools=[tool]).tools
    assert shown == json.dumps({"type": "function", "function": {"name": "weather", "parameters": CITY}})
    assert repeated("tools", tools=[tool]) == [tool]
    bare = {"type": "function", "name": "now", "description": None, "parameters": None, "strict": None}
    assert repeated("tools", tools=[{"name": "now"}]) == [bare]
    assert conversation(tools=[tool], tool_choice="none").tools == []


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, OfferedTools(frozenset({"weather"}))),
        ({"tool_choice": "auto"}, OfferedTools(frozenset({"weather"}))),
        ({"parallel_tool_calls": False}, OfferedTools(frozenset({"weather"}), max_calls=1)),
        ({"tool_choice": "none"}, None),
        (
            {"text": {"format": {"type": "json_object"}}},
            OfferedTools(
                frozenset({"weather"}),
                functions=(Function("weather", WEATHER["parameters"], 0, "tools[0].parameters"),),
            ),
        ),
    ],
)
def test_which_tools_may_be_called(fields: dict[str, Any], use: OfferedTools | None) -> None:
    assert response(tools=[WEATHER], **fields).tool_use == use
    assert repeated("tool_choice", tools=[WEATHER], **fields) == fields.get("tool_choice", "auto")
    assert repeated("parallel_tool_calls", **fields) is fields.get("parallel_tool_calls", True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_function_holds_the_output_to_its_parameters(choice: object) -> None:
    read = response(tools=[WEATHER], tool_choice=choice)
    assert isinstance(read.tool_use, ForcedFunction)
    assert read.tool_use.name == "weather"
    assert read.requests[0].sampling.constraint == JsonSchema(json.dumps(CITY))
    assert read.names["sampling.json_schema"] == "tools[0].parameters"
    assert json.loads(read.repeated["tool_choice"]) == choice


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, UNIMPLEMENTED, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, UNIMPLEMENTED, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, INVALID, "tools[0].function"),
        ({"tools": [{"type": "function"}]}, INVALID, "tools[0].name"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, INVALID, "tools[0].defer_loading"),
        ({"tools": [WEATHER, WEATHER]}, INVALID, "tools[1].name"),
        ({"tools": [WEATHER | {"parameters": {"type": "string"}}]}, INVALID, "tools[0].parameters"),
        ({"tools": [WEATHER | {"strict": "yes"}]}, INVALID, "tools[0].strict"),
        ({"tools": [5]}, INVALID, "tools[0]"),
        ({"tools": [WEATHER | {"name": str(i)} for i in range(257)]}, INVALID, "chat.tools"),
        ({"tools": [WEATHER | {"description": "x" * 524_288}]}, INVALID, "chat.tools"),
        ({"tool_choice": "required"}, INVALID, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}}, INVALID, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, UNIMPLEMENTED, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            UNIMPLEMENTED,
            "tool_choice",
        ),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, INVALID, "regex"),
    ],
)
def test_tools_that_are_wrong_or_not_served_are_refused(
    fields: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    refused = refusal(**fields)
    assert (refused.code, refused.field) == (code, field)


# --- what the answer says again ---------------------------------------------------------------------


def test_the_answer_says_again_what_was_asked() -> None:
    told = response(
        instructions='Say "ü"', max_output_tokens=5, metadata={"a": "b"}, user="u", prompt_cache_key="k"
    ).repeated
    assert {name: json.loads(text) for name, text in told.items()} == {
        "instructions": 'Say "ü"',
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": None,
    }
