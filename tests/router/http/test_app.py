"""The HTTP door over a real socket, before a scheduler that the test speaks for."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import structlog

from protos.v1 import common_pb2, router_pb2, scheduler_pb2
from router import wire
from router.http.answers import Answer
from router.http.app import HttpApp
from router.http.server import HttpDoor
from router.request_log import TokenLogprobs
from rpc.errors import from_call
from tests.rig import tiny_model
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.stack import Rig, Start, letters

LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
ERROR = common_pb2.FINISH_REASON_ERROR
MAX_BODY_BYTES = 1024 * 1024
HI = [{"role": "user", "content": "Hi"}]
# The two doors of generation, each with a body that is right.
DOORS = pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HI})]
)
# And the third, whose answers have no choices.
ANY_DOOR = pytest.mark.parametrize(("path", "body"), [*DOORS.args[1], ("/v1/responses", {"input": "Hi"})])


@dataclass
class HttpRig:
    """A router with an HTTP door, and a client of it."""

    router: Rig
    client: httpx2.AsyncClient
    door: HttpDoor

    @property
    def scheduler(self) -> ScriptedScheduler:
        return self.router.scheduler

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def error(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = await self.post(path, **body)
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.status_code, response.json()["error"]


Serve = Callable[..., contextlib.AbstractAsyncContextManager[HttpRig]]


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Serve:
    @contextlib.asynccontextmanager
    async def serving(scheduler: ScriptedScheduler | None = None, **options: Any) -> AsyncIterator[HttpRig]:
        async with start(scheduler, **options) as router:
            door = HttpDoor(
                HttpApp(router.intake, max_body_bytes=MAX_BODY_BYTES, doorkeeper=router.doorkeeper),
                f"unix:{tmp_path}/http.sock",
            )
            await door.open()
            transport = httpx2.AsyncHTTPTransport(uds=f"{tmp_path}/http.sock")
            client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=20)
            async with client, contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(door.stop)
                yield HttpRig(router, client, door)

    return serving


def events(body: str) -> list[dict[str, Any]]:
    """The values of a stream that ended well: each event is one `data:` line, the last one is [DONE]."""
    pieces = body.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    assert body.count("[DONE]") == 1
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def content(choice: dict[str, Any]) -> str:
    """A choice's text in whatever shape."""
    for name in ("message", "delta"):
        if name in choice:
            return str(choice[name].get("content", ""))
    return str(choice["text"])


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(content(c) for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def reasons(chunks: list[dict[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]):
        found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found


# --- one story, streamed or not ---------------------------------------------------------------------


@DOORS
async def test_b49_b72_b73_a_stream_tells_what_the_whole_answer_tells(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    asked = body | {"n": 2, "seed": 1, "stop": ["!"], "max_tokens": 50}
    async with serve(ScriptedScheduler(script=letters("Grüße, 😀! more"))) as rig:
        whole = (await rig.post(path, **asked)).json()
        response = await rig.post(path, **asked, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, last = events(response.text)
        for choice in whole["choices"]:
            assert content(choice) == joined(chunks, choice["index"]) == "Grüße, 😀"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "!")
        assert reasons(chunks) == {0: ["stop"], 1: ["stop"]}
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == 2 * len("Grüße, 😀!".encode())
        assert whole["usage"]["prompt_tokens"] == len(rig.scheduler.submits[0].prompt_token_ids)
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
        await rig.router.quiet()


async def test_shapes_are_openais(serve: Serve) -> None:
    async with serve(ScriptedScheduler(script=letters("ok"))) as rig:
        completion = (await rig.post("/v1/completions", prompt="Hi", request_id="mine")).json()
        assert completion | {"created": 0} == {
            "id": "cmpl-mine",
            "object": "text_completion",
            "created": 0,
            "model": "tiny",
            "choices": [
                {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
            ],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
        response = await rig.post("/v1/chat/completions", messages=HI, stream=True)
        chunks = events(response.text)
        assert response.headers["x-request-id"] == chunks[0]["id"].removeprefix("chatcmpl-")
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "o"},
            {"content": "k"},
            {},
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_b64_indexes_are_prompt_times_n_plus_sample_and_echoes_stand_before(
    serve: Serve, stream: bool
) -> None:
    def script(submit: Any) -> list[int]:
        said = f"<{bytes(submit.prompt_token_ids).decode()}{submit.sample_index}>" * (
            9 - len(submit.prompt_token_ids)
        )
        return [*said.encode(), tiny_model.EOS_ID]

    prompts = ["a", "bbb", "cccccc"]
    async with serve(ScriptedScheduler(script=script)) as rig:
        response = await rig.post(
            "/v1/completions", prompt=prompts, n=2, echo=True, stream=stream, max_tokens=99
        )
        answers = events(response.text) if stream else [response.json()]
        for index in range(6):
            prompt = prompts[index // 2]
            assert joined(answers, index) == prompt + f"<{prompt}{index % 2}>" * (9 - len(prompt))
        assert reasons(answers) == {index: ["stop"] for index in range(6)}
        if not stream:
            assert response.json()["usage"]["prompt_tokens"] == 10
        await rig.router.quiet()


async def test_token_ids_go_in_and_come_out(serve: Serve) -> None:
    async with serve(ScriptedScheduler(script=letters("é"))) as rig:
        asked = {"prompt": [[97, 98], [99]], "return_token_ids": True, "echo": True}
        whole = (await rig.post("/v1/completions", **asked)).json()
        chunks = events((await rig.post("/v1/completions", **asked, stream=True)).text)
        ids = [*"é".encode(), tiny_model.EOS_ID]
        assert [(c["text"], c["token_ids"]) for c in whole["choices"]] == [("abé", ids), ("cé", ids)]
        streamed = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 1]
        assert [token for choice in streamed for token in choice.get("token_ids", [])] == ids


async def test_b69_b70_logprobs_have_an_entry_for_each_token_streamed_or_not(serve: Serve) -> None:
    rows = [
        common_pb2.TokenLogprobs(
            token_id=t, logprob=-0.5, rank=1, top_token_ids=[t, 0xC3], top_logprobs=[-0.5, -2]
        )
        for t in (97, 0xF0, tiny_model.EOS_ID)
    ]

    async def answered(rig: HttpRig, count: int, path: str, **body: Any) -> httpx2.Response:
        call = asyncio.create_task(rig.post(path, **body))
        submit = await rig.scheduler.submitted(count)
        await rig.scheduler.give(submit, [97, 0xF0, tiny_model.EOS_ID], logprobs=rows, finish=STOP)
        return await call

    async with serve() as rig:
        for count, stream in ((1, False), (3, True)):
            asked = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream}
            response = await answered(rig, count, "/v1/chat/completions", **asked)
            chunks = events(response.text) if stream else [response.json()]
            entries = [
                e
                for chunk in chunks
                for c in chunk["choices"]
                if c["logprobs"]
                for e in c["logprobs"]["content"]
            ]
            assert [(e["token"], e["bytes"]) for e in entries] == [
                ("a", [97]),
                ("bytes:\\xf0", [0xF0]),
                ("<|eos|>", list(b"<|eos|>")),
            ]
            assert all([t["logprob"] for t in e["top_logprobs"]] == [-0.5, -2] for e in entries)
            response = await answered(
                rig, count + 1, "/v1/completions", prompt="Hi", logprobs=2, stream=stream
            )
            chunks = events(response.text) if stream else [response.json()]
            (logprobs,) = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
            assert logprobs["tokens"] == ["a", "bytes:\\xf0", "<|eos|>"]
            assert logprobs["token_logprobs"] == [-0.5] * 3
            assert logprobs["text_offset"] == [0, 1, 1]
            assert logprobs["top_logprobs"][0] == {"a": -0.5, "bytes:\\xc3": -2}


def many_logprobs(count: int) -> tuple[list[int], list[common_pb2.TokenLogprobs]]:
    ids = [97 + i % 26 for i in range(count - 1)] + [tiny_model.EOS_ID]
    tops = {"top_token_ids": [97, 98, 99, 100], "top_logprobs": [-1.0, -2.0, -3.0, -4.0]}
    return ids, [common_pb2.TokenLogprobs(token_id=t, logprob=-0.5, rank=1, **tops) for t in ids]


@pytest.mark.parametrize("count", [3, 400])
async def test_many_logprobs_are_put_into_words_beside_the_loop_at_every_door(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    threads = set()

    def noting(told: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            threads.add(threading.get_ident())
            return told(*args)

        return made

    for owner, name in ((Answer, "whole"), (Answer, "chunks"), (wire, "response"), (wire, "_token_logprobs")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    ids, rows = many_logprobs(count)
    asked = {"messages": HI, "logprobs": True, "top_logprobs": 4, "return_token_ids": True}
    request = router_pb2.GenerateRequest(text="Hi", sampling={"logprobs": 4})

    async def of_a_stream() -> list[int]:
        response = await rig.post("/v1/chat/completions", **asked, stream=True)
        chunks = [choice for chunk in events(response.text) for choice in chunk["choices"]]
        assert sum(len(chunk["logprobs"]["content"]) for chunk in chunks if chunk["logprobs"]) == count
        return [token for chunk in chunks for token in chunk.get("token_ids", ())]

    async def of_a_whole_answer() -> list[int]:
        (choice,) = (await rig.post("/v1/chat/completions", **asked)).json()["choices"]
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [4] * count
        return list(choice["token_ids"])

    async def of_a_grpc_stream() -> list[int]:
        deltas = [event.delta async for event in rig.router.stub.Generate(request)]
        assert sum(len(delta.logprobs) for delta in deltas) == count
        return [token for delta in deltas for token in delta.token_ids]

    async def of_a_grpc_answer() -> list[int]:
        (choice,) = (await rig.router.stub.Complete(request)).choices
        assert len(choice.logprobs) == count
        return list(choice.token_ids)

    async with serve() as rig:
        for number, ask in enumerate((of_a_stream, of_a_whole_answer, of_a_grpc_stream, of_a_grpc_answer), 1):
            threads.clear()
            call = asyncio.create_task(ask())
            submit = await rig.scheduler.submitted(number)
            await rig.scheduler.give(submit, ids, logprobs=rows, finish=STOP)
            assert await call == ids
            assert bool(threads - {threading.get_ident()}) == (count > 100), ask.__name__
        await rig.router.quiet()


@pytest.mark.parametrize("count", [3, 300])
async def test_many_logprobs_of_a_prompt_are_taken_in_beside_the_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    threads, told = set(), wire._logprobs

    def noting(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
        threads.add(threading.get_ident())
        return told(entry)

    monkeypatch.setattr(wire, "_logprobs", noting)
    scheduler = ScriptedScheduler()
    assert scheduler.welcome is not None
    scheduler.welcome.features.append("prompt_logprobs")
    async with serve(scheduler) as rig:
        asked = {"prompt": [97] * count, "prompt_logprobs": 0, "max_tokens": 1}
        call = asyncio.create_task(rig.post("/v1/completions", **asked))
        handle = (await rig.scheduler.submitted()).handle
        output = scheduler_pb2.StepOutput(handles=[handle], num_tokens=[1], token_ids=[tiny_model.EOS_ID])
        output.started.add(handle=handle)
        rows = [common_pb2.TokenLogprobs(token_id=97, logprob=-0.5, rank=1)] * (count - 1)
        output.prompt_logprobs.add(handle=handle, first_position=1, tokens=rows)
        output.finished.add(handle=handle, reason=STOP)
        await rig.scheduler.send(output)
        (choice,) = (await call).json()["choices"]
        assert len(choice["prompt_logprobs"]) == count
        assert (threads == {threading.get_ident()}) == (count == 3)
        await rig.router.quiet()


async def test_a_whole_answer_of_more_logprobs_than_are_kept_is_given_up_and_a_stream_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.call.MAX_WHOLE_NUMBERS", 50)
    ids, rows = many_logprobs(12)
    asked = {"prompt": ["a", "b"], "logprobs": 4, "max_tokens": 20}
    async with serve() as rig:
        refused = asyncio.create_task(rig.error("/v1/completions", **asked))
        await rig.scheduler.submitted(2)
        for submit in rig.scheduler.submits[:2]:
            await rig.scheduler.give(submit, ids[:6], logprobs=rows[:6])
        status, error = await refused
        assert (status, error["param"]) == (400, "logprobs")
        assert "50" in error["message"]
        await rig.scheduler.until(lambda: len(rig.scheduler.cancels) == 2)
        streamed = asyncio.create_task(rig.post("/v1/completions", **asked, stream=True))
        await rig.scheduler.submitted(4)
        for submit in rig.scheduler.submits[2:]:
            await rig.scheduler.give(submit, ids, logprobs=rows, finish=STOP)
        assert reasons(events((await streamed).text)) == {0: ["stop"], 1: ["stop"]}
        await rig.router.quiet()


async def test_the_loop_turns_between_the_prompts_of_one_call(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, seen = 0, []

    async def turning() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with serve(ScriptedScheduler(script=letters("ok"))) as rig:
        tokenizer = rig.router.intake.model.tokenizer
        monkeypatch.setattr(
            type(tokenizer), "encode", lambda _, text, **_how: [seen.append(turns), *text.encode()][1:]
        )
        ticking = asyncio.create_task(turning())
        await rig.post("/v1/completions", prompt=["a"] * 40, max_tokens=1)
        ticking.cancel()
    assert len(set(seen)) == 40


async def test_a_stop_token_id_of_the_client_is_told_and_an_end_token_is_not(serve: Serve) -> None:
    async with serve() as rig:
        for count, (token, told) in enumerate([(98, 98), (tiny_model.EOS_ID, None)], 1):
            call = asyncio.create_task(rig.post("/v1/completions", prompt="Hi", stop_token_ids=[98]))
            submit = await rig.scheduler.submitted(count)
            await rig.scheduler.give(submit, [97, token], finish=STOP, matched_token_id=token)
            (choice,) = (await call).json()["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", told)


@DOORS
async def test_usage_so_far_comes_with_each_chunk_where_it_is_asked(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve(ScriptedScheduler(script=letters("abcdef"))) as rig:
        *chunks, last = events((await rig.post(path, **body, stream=True, stream_options=options)).text)
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == last["usage"]["completion_tokens"] == 7
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)


# --- refusals ---------------------------------------------------------------------------------------


@DOORS
@pytest.mark.parametrize("stream", [False, True])
async def test_b76_a_wrong_request_is_a_status_before_any_event(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"top_p": 7}, 400, "top_p"),
        ({"stop": [""]}, 400, "stop"),
        ({"n": 17}, 400, "n"),
        ({"stop_token_ids": [272]}, 400, "stop_token_ids"),
        ({"unheard_of": 1}, 400, "unheard_of"),
    ]
    async with serve() as rig:
        for fields, status, param in wrong:
            got, error = await rig.error(path, **(body | fields), stream=stream)
            assert (got, error["param"]) == (status, param)
            assert error["message"].startswith(param)
        assert not rig.scheduler.submits
        await rig.router.quiet()


async def test_what_a_template_cannot_take_is_told_by_the_names_of_the_body(serve: Serve) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serve() as rig:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, error = await rig.error(path, messages=HI, tools=tools)
            assert (status, error["param"]) == (400, "tools")
            assert error["message"].startswith("tools: the model's chat template does not know")
        chat = router_pb2.Chat(messages=[router_pb2.Message(role="user", content="Hi")], tools=["{}"])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.router.stub.Complete(router_pb2.GenerateRequest(chat=chat))
        assert from_call(raised.value).field == "chat.tools"


async def test_a_call_that_was_cut_short_may_come_back_with_what_was_wrong_about_it(serve: Serve) -> None:
    """As agents send it: with the next request, and a tool's turn that tells the model."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "B'}}
    turns = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "the arguments are no JSON; try again"},
    ]
    async with serve(ScriptedScheduler(script=lambda _: [tiny_model.EOS_ID])) as rig:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await rig.post(path, messages=turns)
            assert response.status_code == 200, response.text


async def test_b34_b37_b97_prompts_that_cannot_be_are_refused(serve: Serve) -> None:
    async with serve(ScriptedScheduler(max_total_tokens=64)) as rig:
        for prompt in ("", [], "x" * 64, [1] * 64, [272], [-1], [2**63 - 1], ["a", "x" * 64]):
            status, error = await rig.error("/v1/completions", prompt=prompt)
            assert (status, error["param"]) == (400, "prompt")
        assert (await rig.error("/v1/chat/completions", messages=[]))[1]["param"] == "messages"
        assert not rig.scheduler.submits


@pytest.mark.parametrize("stream", [False, True])
async def test_b35_b36_b40_lengths_at_their_edges(serve: Serve, stream: bool) -> None:
    endless = ScriptedScheduler(script=lambda submit: [97] * submit.sampling.max_tokens, max_total_tokens=128)
    async with serve(endless) as rig:
        for length, max_tokens, num_tokens in [(127, 1, 1), (100, 28, 28), (100, None, 28), (100, 27, 27)]:
            asked = {"prompt": "x" * length, "max_tokens": max_tokens, "stream": stream}
            response = await rig.post("/v1/completions", **asked)
            answers = events(response.text) if stream else [response.json()]
            assert joined(answers) == "a" * num_tokens
            assert reasons(answers) == {0: ["length"]}
        for length, max_tokens, param in [
            (100, 29, "max_tokens"), (128, 1, "prompt"), (129, None, "prompt"), (5, 0, "max_tokens"),
            (5, 0, "max_tokens"), (5, -1, "max_tokens"), (5, 2**31 - 1, "max_tokens"),
        ]:  # fmt: skip
            asked = {"prompt": "x" * length, "max_tokens": max_tokens, "stream": stream}
            status, error = await rig.error("/v1/completions", **asked)
            assert (status, error["param"]) == (400, param)
        await rig.router.quiet()


async def test_what_is_too_long_has_the_code_and_the_words_by_which_programs_shorten_it(serve: Serve) -> None:
    said = [{"role": "user", "content": "x" * 64}]
    async with serve(ScriptedScheduler(max_total_tokens=64)) as rig:
        for path, asked, param in [
            ("/v1/completions", {"prompt": "x" * 64}, "prompt"),
            ("/v1/completions", {"prompt": "x" * 200_000}, "prompt"),
            ("/v1/completions", {"prompt": [1] * 64}, "prompt"),
            ("/v1/completions", {"prompt": [1] * 100_000}, "prompt"),  # read by another process
            ("/v1/completions", {"prompt": "x" * 60, "max_tokens": 5}, "max_tokens"),
            ("/v1/chat/completions", {"messages": said}, "messages"),
            ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 60}, "max_completion_tokens"),
            ("/v1/responses", {"input": said}, "input"),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": 60}, "max_output_tokens"),
        ]:
            status, error = await rig.error(path, **asked)
            assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
            assert "this model's maximum context length is 64 tokens" in error["message"]
        _, error = await rig.error("/v1/completions", prompt="x", max_tokens=0)
        assert error["code"] == "invalid_value"
        assert not rig.scheduler.submits


@ANY_DOOR
@pytest.mark.parametrize("stream", [False, True])
async def test_b76_b94_overload_is_429_with_the_time_to_wait(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    scheduler = ScriptedScheduler()
    scheduler.accepts = False
    async with serve(scheduler) as rig:
        call = asyncio.create_task(rig.post(path, **body, stream=stream))
        submit = await rig.scheduler.submitted()
        await rig.scheduler.give(
            submit, [], finish=ERROR, message="the queue is full", status_code=8, retry_after_ms=2500
        )
        response = await call
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["message"] == "the queue is full"
        await rig.router.quiet()


async def test_when_one_prompt_of_several_is_refused_all_are_let_go(serve: Serve) -> None:
    scheduler = ScriptedScheduler()
    scheduler.accepts = False
    async with serve(scheduler) as rig:
        call = asyncio.create_task(rig.post("/v1/completions", prompt=["a", "b"]))
        await rig.scheduler.submitted(2)
        await rig.scheduler.give(
            rig.scheduler.submits[1], [], finish=ERROR, message="full", status_code=8, retry_after_ms=1
        )
        assert (await call).status_code == 429
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        assert [cancel.key for cancel in rig.scheduler.cancels] == [rig.scheduler.submits[0].key]
        await rig.router.quiet()


async def test_bodies_are_taken_as_json_of_bounded_length_alone(serve: Serve) -> None:
    async with serve() as rig:

        async def status(content: bytes | AsyncIterator[bytes], kind: str = "application/json") -> int:
            headers = {"content-type": kind}
            return (await rig.client.post("/v1/completions", content=content, headers=headers)).status_code

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * (MAX_BODY_BYTES // 10)

        assert await status(b"{") == 400
        assert await status(b'{"prompt": "\xff"}') == 400
        assert await status(rb'{"prompt": "\ud800"}') == 400
        assert await status(b'{"prompt": "a", "temperature": NaN}') == 400
        assert await status(b'{"prompt": "a", "temperature": 1e999}') == 400
        assert await status(b'{"prompt": "a"}', "text/plain") == 415
        assert await status(b" " * (MAX_BODY_BYTES + 1)) == 413
        with contextlib.suppress(httpx2.WriteError, httpx2.ReadError):  # answered and closed while it sent
            assert await status(endless()) == 413
        assert (await rig.client.get("/health")).status_code == 200
        await rig.router.quiet()


async def test_b28_a_live_request_id_is_a_conflict(serve: Serve) -> None:
    async with serve() as rig:
        first = asyncio.create_task(rig.post("/v1/completions", prompt="a", request_id="twice"))
        submit = await rig.scheduler.submitted()
        assert (await rig.error("/v1/completions", prompt="a", request_id="twice"))[0] == 409
        await rig.scheduler.give(submit, [97], finish=LENGTH)
        assert (await first).status_code == 200


async def test_paths_and_methods_that_are_not_there_are_told_in_the_same_shape(serve: Serve) -> None:
    async with serve() as rig:
        assert (await rig.error("/v1/embeddings", input="a"))[0] == 404
        response = await rig.client.get("/v1/completions")
        assert (response.status_code, response.json()["error"]["code"]) == (405, "not_found")


# --- failures, cancels, timeouts --------------------------------------------------------------------


@DOORS
async def test_b75_an_error_never_looks_like_a_finished_answer(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async with serve() as rig:
        for count, stream in enumerate((False, True), 1):
            call = asyncio.create_task(rig.post(path, **body, stream=stream))
            submit = await rig.scheduler.submitted(count)
            await rig.scheduler.give(submit, list(b"abcde"))
            await rig.scheduler.give(submit, [], finish=ERROR, message="the logits are NaN", status_code=13)
            response = await call
            if not stream:
                assert response.status_code == 500
                assert response.json()["error"]["message"] == "the logits are NaN"
                continue
            assert response.status_code == 200
            assert "[DONE]" not in response.text
            *pieces, last, nothing = response.text.split("\n\n")
            chunks = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
            assert joined(chunks) == "abcde"
            assert reasons(chunks) == {}
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the logits are NaN"
            assert nothing == ""
        await rig.router.quiet()


@ANY_DOOR
async def test_b76_a_failure_before_the_first_token_is_the_status_of_a_stream_too(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    """Whatever fails: the request has been taken in, and its prompt begun."""

    async def failed(
        rig: HttpRig, count: int, **asked: Any
    ) -> tuple[asyncio.Task[Any], scheduler_pb2.Submit]:
        call = asyncio.create_task(rig.error(path, **body, stream=True, **asked))
        submit = await rig.scheduler.submitted(count)
        await rig.scheduler.give(submit, [])
        return call, submit

    async with serve() as rig:
        call, submit = await failed(rig, 1)
        await rig.scheduler.give(submit, [], finish=ERROR, message="the logits are NaN", status_code=13)
        status, error = await call
        assert (status, error["message"]) == (500, "the logits are NaN")
        call, _ = await failed(rig, 2, timeout=0.3)
        status, error = await call
        assert (status, error["code"]) == (408, "timeout")
        call, _ = await failed(rig, 3)
        await rig.door.stop()
        assert (await call)[0] == 503
        await rig.router.quiet()


@DOORS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("taken_in", "token_ids"), [(False, []), (True, []), (True, [97] * 3)], ids=["sent", "begun", "answered"]
)
async def test_b25_b26_b29_b31_a_client_that_hangs_up_gives_up_every_choice(
    serve: Serve, path: str, body: dict[str, Any], stream: bool, taken_in: bool, token_ids: list[int]
) -> None:
    scheduler = ScriptedScheduler()
    scheduler.accepts = taken_in
    async with serve(scheduler) as rig:
        call = asyncio.create_task(rig.post(path, **body, n=3, stream=stream))
        await rig.scheduler.submitted(3)
        if taken_in:
            await rig.scheduler.give(rig.scheduler.submits[0], token_ids)
        call.cancel()
        await rig.scheduler.until(lambda: len(rig.scheduler.cancels) == 3)
        await rig.router.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_b83_the_timeout_goes_inward_and_ends_the_request(serve: Serve, stream: bool) -> None:
    scheduler = ScriptedScheduler()
    scheduler.accepts = False
    async with serve(scheduler) as rig:
        call = asyncio.create_task(rig.post("/v1/completions", prompt="Hi", timeout=0.3, stream=stream))
        submit = await rig.scheduler.submitted()
        assert 0 < submit.remaining_ms <= 300
        assert (await call).status_code == 408
        await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        assert rig.scheduler.cancels[0].reason == common_pb2.FINISH_REASON_DEADLINE
        await rig.router.quiet()


@ANY_DOOR
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_says_which_request_it_was(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with serve() as rig:
        with structlog.testing.capture_logs() as lines:
            mine = await rig.post(path, **body, stream=stream, timeout=0.1, request_id="mine")
            drawn = await rig.post(path, **body, stream=stream, timeout=0.1)
            wrong = await rig.post(path, **body, stream=stream, temperature=-1)
            unsayable = await rig.post(path, **body, stream=stream, request_id="ä")
            unread = await rig.post(path, **body, stream=stream, unheard_of=1)
        submits = list(rig.scheduler.submits)
        await rig.router.quiet()
    statuses = [answer.status_code for answer in (mine, drawn, wrong, unsayable, unread)]
    assert statuses == [408, 408, 400, 400, 400]
    ids = [answer.headers.get("x-request-id") for answer in (mine, drawn, wrong, unsayable, unread)]
    assert ids[0] == "mine"
    assert ids[1]
    assert ids[2]
    assert {submit.request_id for submit in submits} <= set(ids[:2])
    assert ids[3:] == [None, None]  # it has none yet
    logged = [line.get("request_id") for line in lines if line["event"] == "request_failed"]
    assert logged == ids


async def test_b79_streams_at_once_keep_to_themselves(serve: Serve) -> None:
    def script(submit: Any) -> list[int]:
        return [*(bytes(submit.prompt_token_ids) * 5), tiny_model.EOS_ID]

    async with serve(ScriptedScheduler(script=script)) as rig:
        calls = [rig.post("/v1/completions", prompt=f"p{i}", stream=True) for i in range(8)]
        for i, response in enumerate(await asyncio.gather(*calls)):
            assert joined(events(response.text)) == f"p{i}" * 5


# --- the small calls --------------------------------------------------------------------------------


async def test_tokenize_and_detokenize_are_inverse(serve: Serve) -> None:
    async with serve() as rig:
        tokens = (await rig.post("/tokenize", prompt="héllo 😀")).json()
        assert bytes(tokens["tokens"]) == "héllo 😀".encode()
        assert (tokens["count"], tokens["max_model_len"]) == (11, 512)
        assert (await rig.post("/detokenize", tokens=tokens["tokens"])).json() == {"prompt": "héllo 😀"}
        chat = (await rig.post("/tokenize", messages=HI)).json()["tokens"]
        assert chat[0] == tiny_model.IM_START_ID
        assert (await rig.error("/detokenize", tokens=[1, 272]))[1]["param"] == "tokens"
        assert (await rig.error("/detokenize", model="other", tokens=[1]))[0] == 404
        assert (await rig.error("/tokenize"))[1]["param"] == "messages"


async def test_b112_models_are_listed_and_others_are_not_found(serve: Serve) -> None:
    async with serve() as rig:
        (card,) = (await rig.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 512)
        assert (await rig.client.get("/v1/models/tiny")).json() == card
        assert (await rig.client.get("/v1/models/an/other")).status_code == 404


async def test_b91_health_ready_and_models_follow_the_truth(serve: Serve) -> None:
    async with serve(ready=False, served=False) as rig:
        for path in ("/health", "/ready", "/v1/models"):
            response = await rig.client.get(path)
            assert response.status_code == 503
            assert "scheduler" in response.json()["error"]["message"]
    async with serve() as rig:
        for path in ("/health", "/ready", "/v1/models"):
            assert (await rig.client.get(path)).status_code == 200


async def test_browsers_are_told_to_keep_their_hands_off(serve: Serve) -> None:
    async with serve() as rig:
        for response in (
            await rig.client.get("/health", headers={"origin": "https://elsewhere.example"}),
            await rig.client.get("/nothing"),
            await rig.post("/v1/completions", prompt=""),
        ):
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-security-policy"].startswith("default-src 'none'")
            assert not [name for name in response.headers if name.startswith("access-control")]
        preflight = await rig.client.options(
            "/v1/completions", headers={"origin": "https://elsewhere.example"}
        )
        assert preflight.status_code == 405


# --- the end ----------------------------------------------------------------------------------------


async def test_b87_a_closed_door_refuses_the_new_and_lets_the_running_end(serve: Serve) -> None:
    async with serve() as rig:
        running = asyncio.create_task(rig.post("/v1/completions", prompt="a"))
        submit = await rig.scheduler.submitted()
        draining = asyncio.create_task(rig.router.intake.drain())
        rig.door.close()
        assert (await rig.error("/v1/completions", prompt="a"))[0] == 503
        assert (await rig.client.get("/ready")).status_code == 503
        assert not draining.done()
        await rig.scheduler.give(submit, [97], finish=LENGTH)
        assert (await running).status_code == 200
        await draining


@pytest.mark.parametrize("stream", [False, True])
async def test_b87_what_runs_when_the_grace_is_over_is_told_so(serve: Serve, stream: bool) -> None:
    async with serve() as rig:
        running = asyncio.create_task(rig.post("/v1/completions", prompt="a", stream=stream))
        await rig.scheduler.give(await rig.scheduler.submitted(), [97])
        if stream:
            await rig.scheduler.until(lambda: 1 in rig.scheduler.acks)
        await rig.door.stop()
        response = await running
        assert response.status_code == (200 if stream else 503)
        assert "shutting down" in response.text
        assert "[DONE]" not in response.text
        await rig.router.quiet()


@pytest.mark.parametrize(
    "headers", [{f"x-{i}": "y" for i in range(101)}, {"x-long": "a" * 32 * 1024}], ids=["many", "long"]
)
async def test_b104_a_head_beyond_the_limits_is_refused_by_name(
    serve: Serve, headers: dict[str, str]
) -> None:
    async with serve() as rig:
        response = await rig.client.get("/health", headers=headers)
        if response.status_code != 400:  # it came in pieces, and its end was not waited for
            assert response.status_code == 431
            assert response.json()["error"]["code"] == "headers_too_large"
            assert "at most 100 and 32768 bytes are allowed" in response.json()["error"]["message"]
        assert (await rig.client.get("/health")).status_code == 200
