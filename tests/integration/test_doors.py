"""Every door of a real cluster gives the same answer: gRPC and HTTP, streamed or not; OpenAI's own client."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from protos.v1 import router_pb2
from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet, wait_until_idle

HI: Any = [{"role": "user", "content": "Grüße, 😀!"}]


@pytest.fixture(scope="module")
def doors(tiny_model_folder: Path) -> Iterator[Cluster]:
    """The tiny model behind both doors."""
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler()
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        running.wait()
        yield running


@pytest.fixture(scope="module")
def http(doors: Cluster) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=f"{doors.folder}/http.sock")
    with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


@pytest.fixture
def client(http: httpx2.Client) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=0)


def streamed(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post(path, json=body | {"stream": True}).text
    return [json.loads(piece.removeprefix("data: ")) for piece in text.split("\n\n")[:-2]]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 7, "top_p": 0.9}])
def test_b31_b52_four_doors_one_answer(
    doors: Cluster, http: httpx2.Client, sampling: dict[str, float]
) -> None:
    prompt, n, max_tokens = [7 * i % 256 for i in range(17)], 2, 24
    message = request(prompt, max_tokens=max_tokens, n=n, ignore_eos=False, **sampling)
    body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "return_token_ids": True} | sampling
    unary = doors.router.Complete(message, timeout=60).choices
    expected = [(list(choice.token_ids), choice.text) for choice in unary]
    got: list[tuple[list[int], str]] = [([], "") for _ in range(n)]
    for delta in (
        event.delta for event in doors.router.Generate(message, timeout=60) if event.HasField("delta")
    ):
        tokens, text = got[delta.index]
        got[delta.index] = ([*tokens, *delta.token_ids], text + delta.text)
    assert got == expected
    whole = http.post("/v1/completions", json=body).json()
    assert [(choice["token_ids"], choice["text"]) for choice in whole["choices"]] == expected
    got = [([], "") for _ in range(n)]
    for choice in (
        choice for chunk in streamed(http, "/v1/completions", body) for choice in chunk["choices"]
    ):
        tokens, text = got[choice["index"]]
        got[choice["index"]] = ([*tokens, *choice.get("token_ids", [])], text + choice["text"])
    assert got == expected
    assert whole["usage"]["completion_tokens"] == sum(c.finished.usage.num_output_tokens for c in unary)


def test_a_chat_is_the_same_conversation_at_both_doors(doors: Cluster, http: httpx2.Client) -> None:
    message = request([], max_tokens=16)
    message.chat.messages.add(role="user", content=HI[0]["content"])
    answer = doors.router.Complete(message, timeout=60)
    body = {"messages": HI, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == answer.choices[0].text
    assert whole["usage"]["prompt_tokens"] == answer.prompt_info.num_prompt_tokens
    chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content=HI[0]["content"])])
    tokens = doors.router.Tokenize(router_pb2.TokenizeRequest(chat=chat)).token_ids
    assert http.post("/tokenize", json={"messages": HI}).json()["tokens"] == list(tokens)


def test_openais_client_reads_whole_answers_and_streams(client: openai.OpenAI) -> None:
    asked: Any = {"model": client.models.list().data[0].id, "max_tokens": 12, "temperature": 0, "n": 2}
    chat = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=3, **asked)
    stream = client.chat.completions.create(
        messages=HI, stream=True, stream_options={"include_usage": True}, **asked
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in chat.choices]
    assert chat.usage is not None
    assert usage is not None
    assert usage.completion_tokens == chat.usage.completion_tokens == 24
    for choice in chat.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert len(entries) == 12
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy
    completion = client.completions.create(prompt=["a", "bb"], echo=True, **asked)
    assert [choice.text[:1] for choice in completion.choices] == ["a", "a", "b", "b"]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1, stream=True)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="tiny", messages=HI, response_format={"type": "xml"})  # type: ignore[arg-type]


def test_b67_top_p_and_temperature_do_not_change_logprobs(http: httpx2.Client) -> None:
    def first(**sampling: float) -> dict[str, float]:
        body = {"prompt": "abc", "max_tokens": 1, "logprobs": 3, "seed": 1} | sampling
        logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        top: dict[str, float] = logprobs["top_logprobs"][0]
        assert len(top) == 3
        return top

    assert (
        first(top_p=1.0)
        == first(top_p=0.5)
        == first(top_p=0.01)
        == first(temperature=2)
        == first(temperature=0)
    )


def test_b25_a_client_that_hangs_up_frees_its_blocks(doors: Cluster, http: httpx2.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    wait_until_idle(doors)
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()  # closing it hangs up
        assert next(lines).startswith("data: ")
        assert doors.load().num_running == 1
    wait_until_idle(doors)


def test_b87_a_drained_router_ends_its_http_streams_well_and_itself(tiny_model_folder: Path) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler()
        running.start_router("--http", f"unix:{running.folder}/http.sock", "--grace-seconds", "20")
        running.wait()
        transport = httpx2.HTTPTransport(uds=f"{running.folder}/http.sock")
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
            body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                running.process("router").terminate()
                assert [line for line in lines if line][-1] == "data: [DONE]"
            began = time.monotonic()
            assert running.process("router").wait(20) == 0
            assert time.monotonic() - began < 15


def test_an_http_address_that_cannot_be_had_is_one_line_and_exit_code_2(
    doors: Cluster, tiny_model_folder: Path
) -> None:
    argv = ["--model", str(tiny_model_folder), "--scheduler", doors.address("scheduler"), "--log-level=error"]
    taken = f"unix:{doors.folder}/http.sock"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "router",
            "--listen",
            "127.0.0.1:0",
            "--http",
            taken,
            "--log-level",
            "error",
            *argv,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"chairlift router: --http is {taken}: another process listens on that socket\n"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["ab", "c"], "logprobs": 2, "echo": True, "n": 2}),
        ("/v1/completions", {"prompt": "ab", "logprobs": 0, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [1, 2], "return_token_ids": True, "stop_token_ids": [3]}),
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": HI, "prompt_logprobs": 0, "return_token_ids": True}),
    ],
)
def test_answers_and_chunks_are_what_the_description_says(
    http: httpx2.Client, path: str, fields: dict[str, Any]
) -> None:
    document = http.get("/openapi.json").json()
    described = document["paths"][path]["post"]
    kinds = described["responses"]["200"]["content"]

    def check(value: object, schema: dict[str, str]) -> None:
        jsonschema.validate(value, document | schema, cls=jsonschema.Draft202012Validator)

    body = fields | {"max_tokens": 4, "seed": 1}
    check(body, described["requestBody"]["content"]["application/json"]["schema"])
    check(http.post(path, json=body).json(), kinds["application/json"]["schema"])
    chunks = streamed(http, path, body | {"stream_options": {"include_usage": True}})
    assert len(chunks) > 2
    for chunk in chunks:
        check(chunk, kinds["text/event-stream"]["x-event-schema"])


def test_nothing_is_left(doors: Cluster) -> None:
    check_quiet(doors)
