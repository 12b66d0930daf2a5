"""Outputs that are held to a form, at every door, with real processes."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import jsonschema
import pytest

from protos.v1 import router_pb2
from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "size": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{3,6}-(ja|nein)"
CHOICE = ["yes", "yes and no", "größe"]
EXPLODING = ["(a{1000}){1000}", "(((a{100}){100}){100}){100}"]


@pytest.fixture(scope="module")
def served(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, str]]:
    """The tiny model's, with a template that knows tools."""
    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("with_tools") / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    form = "{# as <tool_call>, in hermes' form #}"
    config["chat_template"] = form + "{{ tools | tojson if tools }}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with cluster.assembling(folder) as running:
        running.start_executor("--num-blocks", "1024")
        running.start_scheduler()
        running.start_router("--http", "127.0.0.1:0")
        running.wait()
        yield running, "http://" + running.process("router").next_line().removeprefix("http on ")


def asked(seed: int, **constraint: Any) -> router_pb2.GenerateRequest:
    choice = constraint.pop("choice", None)
    message = request("Tell me", max_tokens=100, ignore_eos=False, temperature=1.0, seed=seed, **constraint)
    if choice is not None:
        message.sampling.choice.values.extend(choice)
    return message


def texts_at_every_door(served: tuple[Cluster, str], seed: int, **constraint: Any) -> list[str]:
    running, url = served
    grpc_fields = {k: json.dumps(v) if k == "json_schema" else v for k, v in constraint.items()}
    whole = running.router.Complete(asked(seed, **grpc_fields), timeout=60).choices[0]
    assert whole.finished.reason == router_pb2.Finished(reason=1).reason, "it ends by an end token"
    pieces = [e.delta.text for e in running.router.Generate(asked(seed, **grpc_fields), timeout=60)]
    body = {"prompt": "Tell me", "max_tokens": 100, "temperature": 1.0, "seed": seed, **constraint}
    answer = httpx2.post(url + "/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    streamed = httpx2.post(url + "/v1/completions", json=body | {"stream": True}, timeout=60).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    joined = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    return [whole.text, "".join(pieces), answer["choices"][0]["text"], joined]


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return value["colour"] in {"red", "blue"} and 0 <= value["size"] <= 99 and len(value) == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_outputs_match_and_every_door_says_the_same(served: tuple[Cluster, str], seed: int) -> None:
    texts = texts_at_every_door(served, seed, json_schema=SCHEMA)
    assert len(set(texts)) == 1
    assert is_valid(texts[0])
    texts = texts_at_every_door(served, seed, regex=PATTERN)
    assert len(set(texts)) == 1
    assert re.fullmatch(PATTERN, texts[0])
    texts = texts_at_every_door(served, seed, choice=CHOICE)
    assert len(set(texts)) == 1
    assert texts[0] in CHOICE


def test_a_chat_takes_openais_response_format(served: tuple[Cluster, str]) -> None:
    _, url = served
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "seed": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA},
        },
    }
    answer = httpx2.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    assert is_valid(answer["choices"][0]["message"]["content"])


def test_one_of_several_tools_is_called_with_arguments_of_its_schema(served: tuple[Cluster, str]) -> None:
    """Their schemas refer to themselves, and stand within one of them all."""
    _, url = served
    tree = {
        "type": "object",
        "properties": {"leaf": {"enum": [1, 2]}, "left": {"$ref": "#/$defs/tree"}},
        "required": ["leaf"],
        "additionalProperties": False,
    }
    schemas: dict[str, dict[str, Any]] = {
        "paint": SCHEMA,
        "plant": {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "tool_choice": "required",
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 1,
        "n": 4,
    }
    called = set()
    for choice in httpx2.post(url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]:
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        called.add(call["function"]["name"])
    assert "plant" in called, "the one whose schema refers to itself"


def test_an_answer_is_text_of_the_schema_or_calls_of_tools(served: tuple[Cluster, str]) -> None:
    """At random, as this model chooses: both come, and each is told as what it is."""
    _, url = served
    parameters = {"type": "object", "properties": {"to": {"enum": [1, 2]}}, "required": ["to"]}
    parameters["additionalProperties"] = False
    functions = [{"name": name, "parameters": parameters} for name in ("walk", "run")]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        "logit_bias": {str(ord("<")): 6.0},
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 1,
        "n": 12,
    }
    told = httpx2.post(url + "/v1/chat/completions", json=body, timeout=60).json()["choices"]
    for choice in told:
        message = choice["message"]
        if choice["finish_reason"] == "stop":
            assert is_valid(message["content"])
            assert "tool_calls" not in message
            continue
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", None) or (
            choice["finish_reason"] == "length"
        )
        for call in message.get("tool_calls", []):
            jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    assert {"stop", "tool_calls"} <= {choice["finish_reason"] for choice in told}
    streamed = httpx2.post(url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60).text
    contents, calls = dict.fromkeys(range(12), ""), {i: [] for i in range(12)}
    for line in streamed.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            contents[choice["index"]] += choice["delta"].get("content") or ""
            calls[choice["index"]] += choice["delta"].get("tool_calls", [])
    for choice in told:
        i = choice["index"]
        whole = [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert contents[i] == (choice["message"]["content"] or "")
        assert [call["function"] for call in calls[i]] == whole
    tools = [{"type": "function", **function} for function in functions]
    body = {"input": "Hi", "tools": tools, "max_output_tokens": 300, "temperature": 1.0}
    body["text"] = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    body["logit_bias"] = {str(ord("<")): 6.0}
    seen = set()
    for seed in range(12):
        answer = httpx2.post(url + "/v1/responses", json=body | {"seed": seed}, timeout=60).json()
        if answer["status"] == "completed":
            kinds = {item["type"] for item in answer["output"]}
            assert len(kinds) == 1, "it is one or the other"
            seen |= kinds
    assert seen == {"message", "function_call"}


def test_which_schema_cannot_be_kept_to_is_named(served: tuple[Cluster, str]) -> None:
    _, url = served
    good, wrong = {"type": "object"}, {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    for schema, parameters, param in (
        (wrong, good, "response_format.json_schema.schema"),
        (good, wrong, "tools[0].function.parameters"),
    ):
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
        answer = httpx2.post(url + "/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param} cannot be kept to: ")
        assert 'properties.a has "uniqueItems", which no output can be held to here' in error["message"]


def test_neighbours_and_a_preemption_change_nothing(tiny_model_folder: Path) -> None:
    """Ten of them in few blocks, so that some are taken off and begun again."""
    pattern = r"[a-f]{40,60}-(ja|nein)"
    messages = [asked(seed, regex=pattern) for seed in range(10)]
    for message in messages:
        message.token_ids.ids.extend(b"x" * 40)
        message.sampling.max_tokens = 80
    flags = ("--num-blocks", "16", "--block-size", "8")
    admission = ("--admission", "optimistic", "--watermark", "0")
    with cluster.running(tiny_model_folder, executor_flags=flags, scheduler_flags=admission) as running:
        calls = [running.router.Complete.future(message, timeout=90) for message in messages]
        together = [call.result().choices[0].text for call in calls]
        assert running.load().num_preemptions > 0
        alone = [running.router.Complete(message, timeout=60).choices[0].text for message in messages]
    assert together == alone
    assert all(re.fullmatch(pattern, text) for text in together)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": ""}, "json_schema"),
        ({"json_schema": "false"}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"json_schema": "x"}, "json_schema"),
        ({"json_schema": {"type": "objct"}}, "json_schema"),
        ({"json_schema": {"x": "y" * 70_000}}, "json_schema"),
        ({"response_format": {"type": "json_object", "json_object": False}}, "response_format.json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}},
            "response_format.json_schema.schema",
        ),
        ({"regex": "("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * 5000}, "regex"),
        ({"regex": EXPLODING[0]}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a"], "regex": "a"}, "choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_b99_what_cannot_be_kept_to_is_refused_by_name(
    served: tuple[Cluster, str], fields: dict[str, Any], param: str
) -> None:
    running, url = served
    answer = httpx2.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 4} | fields, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)
    assert running.router.Complete(asked(1, regex="ok"), timeout=60).choices[0].text == "ok"


def test_b100_what_explodes_is_refused_and_streams_go_on(served: tuple[Cluster, str]) -> None:
    running, _ = served
    alone = running.router.Complete(request("x" * 20, max_tokens=200), timeout=60).choices[0].token_ids
    beside = running.router.Complete.future(request("x" * 20, max_tokens=200), timeout=60)
    messages = [asked(0, regex=EXPLODING[i % 2] + f"x{{{i}}}") for i in range(6)]
    calls = [running.router.Complete.future(message, timeout=60) for message in messages]
    for call in calls:
        with pytest.raises(grpc.RpcError, match=r"sampling\.regex cannot be kept to") as caught:
            call.result()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert beside.result().choices[0].token_ids == alone


def test_executors_that_cannot_constrain_are_named(tiny_model_folder: Path) -> None:
    from tests.rig.scripted_executor import Script

    with (
        cluster.running(tiny_model_folder, script=Script()) as running,
        pytest.raises(grpc.RpcError, match=r"sampling\.regex needs the ability 'constraints'") as caught,
    ):
        running.router.Complete(asked(1, regex="ok"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
