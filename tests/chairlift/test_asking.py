import dataclasses
from typing import Any

import pytest

from chairlift.asking import Options, detokenize_request, generate_request, tokenize_request
from chairlift.results import Message, ToolCall
from protos.v1 import common_pb2, router_pb2

Request = router_pb2.GenerateRequest


def test_each_form_of_prompt() -> None:
    assert generate_request("Hi", {}) == Request(text="Hi")
    assert generate_request([1, 2], {}) == Request(token_ids=router_pb2.TokenIds(ids=[1, 2]))
    chat = Request(chat=router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")]))
    assert generate_request([Message("user", "Hi")], {}) == chat
    assert generate_request([{"role": "user", "content": "Hi"}], {}) == chat
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"  # for the server to refuse


@pytest.mark.parametrize("mixed", [[Message("user", "Hi"), 5], [5, {"role": "user", "content": "Hi"}]])
def test_ids_and_messages_do_not_mix(mixed: Any) -> None:
    with pytest.raises(TypeError, match="token ids beside messages"):
        generate_request(mixed, {})


def test_options_go_where_the_contract_has_them_and_zero_is_not_absent() -> None:
    options: Options = {
        "n": 2,
        "stop": ["a"],
        "temperature": 0,
        "stop_token_ids": [7],
        "logprobs": 0,
        "seed": -1,
        "logit_bias": {5: -1.5},
    }
    assert generate_request("Hi", options) == Request(
        text="Hi",
        n=2,
        stop=["a"],
        sampling=common_pb2.SamplingParams(
            temperature=0, stop_token_ids=[7], logprobs=0, seed=-1, logit_bias={5: -1.5}
        ),
    )


def test_a_stop_may_be_a_text_alone() -> None:
    assert generate_request("Hi", {"stop": "END"}) == Request(text="Hi", stop=["END"])
    assert generate_request("Hi", {"stop": ("END", "\n")}) == Request(text="Hi", stop=["END", "\n"])


def test_text_of_a_schema_or_calls_is_a_mapping_of_the_contracts_fields() -> None:
    either = {"json_schema": "{}", "tags": [{"begin": "<", "json_schema": "{}", "end": ">"}], "max_tags": 1}
    sampling = generate_request("Hi", {"json_or_tagged": either}).sampling
    assert sampling.json_or_tagged == common_pb2.JsonOrTagged(
        json_schema="{}", tags=[common_pb2.Tagged(begin="<", json_schema="{}", end=">")], max_tags=1
    )
    with pytest.raises(ValueError, match=r"json_or_tagged"):
        generate_request("Hi", {"json_or_tagged": {"stranger": 1}})
    with pytest.raises(ValueError, match=r"regex is given beside json_or_tagged"):
        generate_request("Hi", {"json_or_tagged": either, "regex": "a"})


def _repeated_options() -> set[str]:
    """The options that are lists, as the contract has them."""
    messages = (Request, router_pb2.Chat, common_pb2.SamplingParams)
    fields = [field for message in messages for field in message.DESCRIPTOR.fields if field.is_repeated]
    return {field.name for field in fields} - {"messages", "logit_bias"} | {"choice"}


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        (name, alone)
        for name in sorted(_repeated_options())
        for alone in ("yes", b"yes", bytearray(b"yes"), {"yes": 1}, 5)
        if (name, alone) != ("stop", "yes")
    ],
)
def test_what_is_no_list_is_not_taken_apart_into_one(name: str, alone: Any) -> None:
    options: Any = {name: alone}
    with pytest.raises(TypeError, match=rf"{name} is .*(yes|5).*, and must be a list"):
        generate_request([Message("user", "Hi")], options)


def test_bytes_and_mappings_are_neither_a_prompt_nor_ids() -> None:
    wrong: Any
    for wrong in (b"Once", {5: 1}, None):
        with pytest.raises(TypeError, match=r"prompt is .*, and must be a text or a list"):
            generate_request(wrong, {})
    with pytest.raises(TypeError, match="token_ids is b'hi', and must be a list"):
        detokenize_request(b"hi", include_special=False)
    assert list(detokenize_request([104, 105], include_special=True).token_ids) == [104, 105]


def test_a_long_value_is_shortened_in_the_sentence() -> None:
    with pytest.raises(TypeError) as raised:
        generate_request("Hi", {"choice": "x" * 10_000})
    assert len(str(raised.value)) < 100


def test_options_and_messages_say_all_that_the_contract_can() -> None:
    chat = set(router_pb2.Chat.DESCRIPTOR.fields_by_name) - {"messages"}
    prompts = {"text", "token_ids", "chat"}
    assert set(Options.__annotations__) == {
        *set(Request.DESCRIPTOR.fields_by_name)
        - prompts
        - {"sampling", "resume"},  # what resumes is a stream
        *common_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
        *chat,
    }
    of_messages = {field.name for field in dataclasses.fields(Message)}
    assert of_messages == set(router_pb2.Message.DESCRIPTOR.fields_by_name)
    of_calls = {field.name for field in dataclasses.fields(ToolCall)}
    assert of_calls == set(router_pb2.ToolCall.DESCRIPTOR.fields_by_name)


def test_none_is_absent() -> None:
    absent: Any = dict.fromkeys(Options.__annotations__)
    assert generate_request("Hi", absent) == Request(text="Hi")


def test_tools_are_for_conversations() -> None:
    tool = {"type": "function", "function": {"name": "wetter"}}
    request = generate_request([Message("user", "Hi")], {"tools": [tool]})
    assert list(request.chat.tools) == ['{"type": "function", "function": {"name": "wetter"}}']
    with pytest.raises(ValueError, match="tools is for a conversation"):
        generate_request("Hi", {"tools": [tool]})
    with pytest.raises(ValueError, match="continue_final_message is for a conversation"):
        generate_request([1], {"continue_final_message": True})


def test_variables_of_the_template_are_for_conversations() -> None:
    request = generate_request([Message("user", "Hi")], {"chat_template_kwargs": {"enable_thinking": False}})
    assert request.chat.chat_template_kwargs == '{"enable_thinking": false}'
    with pytest.raises(ValueError, match="chat_template_kwargs is for a conversation"):
        generate_request("Hi", {"chat_template_kwargs": {}})


def test_turns_of_tools_are_the_same_as_messages_and_as_mappings() -> None:
    call = {"id": "c", "name": "weather", "arguments": "{}"}
    turns = [
        Message("assistant", "", tool_calls=(ToolCall(**call),)),
        Message("tool", "sun", tool_call_id="c"),
    ]
    mappings = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c"},
    ]
    request = generate_request(turns, {"add_generation_prompt": False})
    assert request == generate_request(mappings, {"add_generation_prompt": False})
    assert request.chat.messages[0].tool_calls[0].name == "weather"
    assert request.chat.HasField("add_generation_prompt")
    assert tokenize_request(turns).chat.messages == request.chat.messages


def test_what_cannot_be_asked_is_named() -> None:
    with pytest.raises(ValueError, match="seed does not fit"):
        generate_request("Hi", {"seed": 2**63})
    wrong: Any
    for name, wrong in {
        "max_tokens": "5", "temperature": "hot", "seed": 2**64, "choice": [1], "stop": [5], "logit_bias": [1],
        "json_schema": {"enum": {1}}, "tools": [{1}], "chat_template_kwargs": 5, "regex": "\ud800",
        "add_generation_prompt": "yes",
    }.items():  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{name} does not fit into the contract: "):
            generate_request([Message("user", "Hi")], {name: wrong})
    text: Any = {"role": "user", "content": "Hi"}
    call = {"type": "function", "function": {"name": "f"}}
    for wrong, where in (
        ("\ud800", "prompt"),
        ([1, 2.5], r"prompt\[1\]"),
        (["Hi"], r"prompt\[0\]"),
        ([text, Message("user", "\ud800")], r"prompt\[1\]"),
        ([text, text | {"content": [{"type": "text", "text": "Hi"}]}], r"prompt\[1\]"),
        ([text | {"tool_calls": [call]}], r"prompt\[0\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{where} does not fit into the contract: "):
            generate_request(wrong, {})
    misspelt: Any = {"temprature": 1}
    with pytest.raises(TypeError, match="'temprature' is no option"):
        generate_request("Hi", misspelt)
