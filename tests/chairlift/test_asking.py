from typing import Any

import pytest

from chairlift.asking import Options, generate_request
from chairlift.results import Message
from protos.v1 import common_pb2, router_pb2

Request = router_pb2.GenerateRequest


def test_each_form_of_prompt() -> None:
    assert generate_request("Hi", {}) == Request(text="Hi")
    assert generate_request([1, 2], {}) == Request(token_ids=router_pb2.TokenIds(ids=[1, 2]))
    chat = Request(chat=router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")]))
    assert generate_request([Message("user", "Hi")], {}) == chat
    assert generate_request([{"role": "user", "content": "Hi"}], {}) == chat
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"  # for the server to refuse


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


def test_every_option_is_a_field_of_the_contract() -> None:
    fields = {
        *Request.DESCRIPTOR.fields_by_name,
        *common_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
        "tools",
    }
    assert set(Options.__annotations__) <= fields


def test_none_is_absent() -> None:
    absent: Any = dict.fromkeys(Options.__annotations__)
    assert generate_request("Hi", absent) == Request(text="Hi")


def test_tools_are_for_conversations() -> None:
    tool = {"type": "function", "function": {"name": "wetter"}}
    request = generate_request([Message("user", "Hi")], {"tools": [tool]})
    assert list(request.chat.tools) == ['{"type": "function", "function": {"name": "wetter"}}']
    with pytest.raises(ValueError, match="conversation"):
        generate_request("Hi", {"tools": [tool]})


def test_what_cannot_be_asked_is_named() -> None:
    with pytest.raises(ValueError, match="seed does not fit"):
        generate_request("Hi", {"seed": 2**63})
    misspelt: Any = {"temprature": 1}
    with pytest.raises(TypeError, match="'temprature' is no option"):
        generate_request("Hi", misspelt)
