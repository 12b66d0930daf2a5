"""Whatever is sent, at either door: an answer or a refusal, never a failure of ours; a probe still answers.

Messages and bodies are made from the contract's own descriptors and from the fields of docs/clients.md. The
long form (`make soak`) sends 20,000 and looks at memory too.
"""

import asyncio
import json
import random
import resource
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.v1 import router_pb2
from rpc import holding
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http.test_app import HttpRig, Serve, serve
from tests.router.stack import letters

__all__ = ["serve"]  # the fixture
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
MAX_GROWTH_BYTES = 64 * 1024 * 1024
TEXTS = [
    "",
    "a",
    "user",
    "assistant",
    "tool",
    "tiny",
    "\0",
    "😀" * 3,
    "(",
    "{}",
    "[]",
    "\ud7ff",
    "x" * 300,
    '{"type":1}',
]
INTS = [0, 1, -1, 2, 5, 17, 255, 271, 272, 2**31 - 1, -(2**31)]
WIDE = [*INTS, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, 1.0, -1.0, 0.5, 2.5, 1e308, float("nan"), float("inf"), -0.0]
FIELDS = (  # noqa: SIM905 - as people read them
    "model prompt messages tools tool_choice add_generation_prompt continue_final_message "
    "chat_template_kwargs max_tokens max_completion_tokens parallel_tool_calls temperature top_p top_k "
    "min_p seed n stop stop_token_ids ignore_eos min_tokens include_stop logprobs top_logprobs echo "
    "stream stream_options priority cache_salt request_id timeout return_token_ids user presence_penalty "
    "frequency_penalty repetition_penalty logit_bias allowed_token_ids banned_token_ids prompt_logprobs "
    "response_format json_schema regex choice best_of suffix tokens input instructions text include "
    "max_output_tokens reasoning metadata store background nonsense"
).split()
INNER = (  # noqa: SIM905 - likewise
    "type role content name text schema json_schema function arguments tool_calls tool_call_id id "
    "call_id output status format parameters strict verbosity"
).split()


def number(chance: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_INT64:
            return chance.choice(WIDE)
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return abs(chance.choice(INTS[:-1]))
        case _:
            return chance.choice(INTS)


def fill(chance: random.Random, message: Message, density: float) -> None:
    """Sets some of a message's fields to values that are right, odd, or wrong."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > density:
            continue
        count = chance.choice([1, 1, 2, 20]) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(count):
                getattr(message, field.name)[chance.choice(WIDE)] = chance.choice(FLOATS)
        elif field.message_type is not None:
            for _ in range(count):
                inner = getattr(message, field.name)
                inner = inner.add() if field.is_repeated else inner
                inner.SetInParent()
                fill(chance, inner, density)
        elif field.is_repeated:
            getattr(message, field.name).extend(number(chance, field) for _ in range(count))
        else:
            setattr(message, field.name, number(chance, field))


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 3 else 6)
    if kind == 6:
        return [value(chance, depth + 1) for _ in range(chance.choice([0, 1, 2, 20]))]
    if kind > 6:
        names = chance.sample(INNER, 3)
        return {name: value(chance, depth + 1) for name in names}
    return [
        None,
        chance.random() < 0.5,
        chance.choice(WIDE),
        chance.choice(FLOATS),
        *chance.choices(TEXTS, k=2),
    ][kind]


def body(chance: random.Random) -> bytes:
    """JSON whose fields are known and whose values are not; now and then no JSON at all."""
    made = {name: value(chance) for name in chance.sample(FIELDS, chance.choice([1, 2, 3, 6]))}
    right = chance.choice(
        [{"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"input": "Hi"}, {}]
    )
    text = json.dumps(right | made if chance.random() < 0.7 else made | right).encode()
    return text if chance.random() < 0.95 else text[: chance.randrange(len(text))]


async def grpc_once(rig: HttpRig, chance: random.Random) -> None:
    method, kind = chance.choice(
        [
            ("Complete", router_pb2.GenerateRequest),
            ("Generate", router_pb2.GenerateRequest),
            ("Tokenize", router_pb2.TokenizeRequest),
            ("Detokenize", router_pb2.DetokenizeRequest),
            ("GetModel", router_pb2.GetModelRequest),
        ]
    )
    message = kind()
    fill(chance, message, chance.choice([0.05, 0.1, 0.3]))
    call = getattr(rig.router.stub, method)(message, timeout=60)
    try:
        if method == "Generate":
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        assert error.code() not in OURS, (method, message, error.details())  # noqa: PT017 - some may fail


async def http_once(rig: HttpRig, chance: random.Random) -> None:
    path = chance.choice(
        ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
    )
    sent = body(chance)
    response = await rig.client.post(path, content=sent, headers={"content-type": "application/json"})
    assert response.status_code < 500, (path, sent, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"], sent


async def fuzzed(serve: Serve, count: int, first: int = 0) -> None:
    scheduler = ScriptedScheduler(script=letters("ok"))
    assert scheduler.welcome is not None
    scheduler.welcome.ClearField("features")
    scheduler.welcome.features.extend(["constraints", "penalties", "logit_bias", "token_lists"])
    async with serve(scheduler) as rig:
        for seed in range(first, first + count):
            once: Callable[[HttpRig, random.Random], Any] = grpc_once if seed % 2 else http_once
            await once(rig, random.Random(seed))
        probe = await rig.post("/v1/completions", prompt="Hi")
        assert probe.json()["choices"][0]["text"] == "ok"
        async with asyncio.timeout(60):
            await rig.router.quiet()


async def test_whatever_is_sent_is_answered_or_refused(serve: Serve) -> None:
    await fuzzed(serve, 600)


async def test_bodies_are_let_go_once_read_and_refused_when_too_many_are_kept(serve: Serve) -> None:
    scheduler = ScriptedScheduler(script=lambda _submit: [ord("x")])  # and never an end
    async with serve(scheduler) as rig:
        room = rig.door._app._room
        padded = json.dumps({"prompt": "Hi", "stream": True}).encode() + b" " * 900_000
        headers = {"content-type": "application/json"}
        async with rig.client.stream("POST", "/v1/completions", content=padded, headers=headers) as response:
            await anext(response.aiter_lines())
            assert room.num_bytes == 0
            with room.kept(holding.MAX_BYTES):  # others' bodies, under way
                refused = await rig.client.post("/tokenize", content=padded, headers=headers)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert (await rig.post("/tokenize", prompt="Hi")).status_code == 200
        assert (await rig.client.post("/tokenize", content=padded, headers=headers)).status_code == 400
        assert room.num_bytes == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_20_000_odd_inputs_leave_nothing_behind(serve: Serve) -> None:
    await fuzzed(serve, 2_000, first=1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await fuzzed(serve, 18_000, first=10_000)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES
