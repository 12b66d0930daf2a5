"""Bodies of every length are read alike, whoever reads them."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.http import reading_worker
from router.http.fields import parsed
from router.http.reading import INLINE_BYTES, THREAD_BYTES, Bodies
from router.validation import MAX_TOKENIZED
from rpc.errors import RequestError
from tests.router.stack import eventually

LONG = "long " * 20_000
HI = {"role": "user", "content": "Hi"}
ROOM = 1_000_000


@contextlib.asynccontextmanager
async def bodies() -> AsyncIterator[Bodies]:
    opened = Bodies()
    try:
        yield opened
    finally:
        await opened.close()


async def read(opened: Bodies, kind: str, value: Any) -> Any:
    body = json.dumps(value).encode()
    pieces = [body[first : first + 50_000] for first in range(0, len(body), 50_000)]
    return await opened.read(kind, pieces, ROOM)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("completion", {"prompt": LONG, "stop": ["a"], "n": 2}),
        ("completion", {"prompt": [LONG, "short"]}),
        ("completion", {"prompt": list(range(100_000)), "logit_bias": {"5": 1}}),
        ("completion", {"prompt": [[1, 2], list(range(50_000))]}),
        (
            "chat",
            {
                "messages": [HI, {"role": "assistant", "content": LONG}],
                "response_format": {"type": "json_object"},
            },
        ),
        (
            "response",
            {
                "input": [HI, {"role": "assistant", "content": LONG}],
                "instructions": LONG,
                "tools": [{"type": "function", "name": "f", "description": "ü"}],
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
                "tool_choice": "none",
            },
        ),
        ("tokenizing", {"prompt": LONG}),
        ("tokenizing", {"messages": [HI] * 4_000}),
        ("detokenizing", {"tokens": list(range(100_000))}),
    ],
)
async def test_a_long_body_says_what_a_short_one_would(kind: str, value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert len(body) > THREAD_BYTES
    async with bodies() as opened:
        assert await read(opened, kind, value) == reading_worker.READERS[kind](parsed(body))
        assert len(opened._processes.idle) == 1
        assert await read(opened, kind, value) == reading_worker.READERS[kind](parsed(body))
        assert len(opened._processes.idle) == 1, "the process is used again"


@pytest.mark.parametrize("num_bytes", [10, INLINE_BYTES + 10, THREAD_BYTES + 10])
async def test_refusals_are_the_same_at_every_length(num_bytes: int) -> None:
    async with bodies() as opened:
        for value, field, code in (
            (
                {"prompt": "x" * num_bytes, "temperature": "hot"},
                "temperature",
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            ({"prompt": "x" * num_bytes, "suffix": "y"}, "suffix", grpc.StatusCode.UNIMPLEMENTED),
            ({"prompt": ["x" * num_bytes, None]}, "prompt[1]", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(RequestError) as raised:
                await read(opened, "completion", value)
            assert (raised.value.field, raised.value.code) == (field, code)
        with pytest.raises(RequestError, match="not valid JSON"):
            await opened.read("chat", [b"{" + b" " * num_bytes], ROOM)
        with pytest.raises(RequestError, match="nested too deeply"):
            await opened.read("chat", [b"[" * 200_000], ROOM)
        assert await read(opened, "chat", {"messages": [HI]}), "and it goes on"


@pytest.mark.parametrize("num_bytes", [0, INLINE_BYTES, THREAD_BYTES])
@pytest.mark.parametrize(
    ("kind", "before", "behind"),
    [
        ("chat", '"messages": [], "json_schema": {"a": ', "}"),
        ("chat", '"messages": [], "tools": [{"function": {"name": "f", "parameters": {"a": ', "}}}]"),
        ("chat", '"messages": [], "chat_template_kwargs": {"a": ', "}"),
        (
            "response",
            '"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": ',
            "}}}",
        ),
        ("response", '"input": "Hi", "tools": [{"name": "f", "parameters": {"a": ', "}}]"),
        ("completion", r'"prompt": "\ud83d\ude00", "metadata": {"a": ', "}"),
    ],
    ids=["schema", "tools", "kwargs", "format", "flat tools", "metadata"],
)
async def test_nothing_is_too_deep_to_be_told_so(kind: str, before: str, behind: str, num_bytes: int) -> None:
    """The depth at which one step of the reading gives up is not that of another."""
    told = []
    async with bodies() as opened:
        for depth in range(900, 1000):
            body = "{" + before + "[" * depth + "]" * depth + behind + "}" + " " * num_bytes
            try:
                await opened.read(kind, [body.encode()], ROOM)
            except RequestError as error:
                told.append((error.code, error.message.partition(" is ")[2]))
    assert set(told) == {(grpc.StatusCode.INVALID_ARGUMENT, "nested too deeply")}


async def test_too_many_ids_are_refused_before_they_come_back() -> None:
    async with bodies() as opened:
        with pytest.raises(RequestError, match="the prompt has 1000001 tokens") as raised:
            await read(opened, "completion", {"prompt": [1] * (ROOM + 1)})
        assert raised.value.field == "token_ids"
        with pytest.raises(RequestError, match=f"at most {MAX_TOKENIZED}"):
            await read(opened, "detokenizing", {"tokens": [1] * (MAX_TOKENIZED + 1)})


async def test_a_process_that_dies_is_replaced_and_fails_at_most_the_body_it_reads() -> None:
    async with bodies() as opened:
        await read(opened, "completion", {"prompt": LONG})
        (process,) = opened._processes.idle
        process.kill()
        await process.wait()
        assert (await read(opened, "completion", {"prompt": LONG})).requests[0].prompt == LONG
        (process,) = opened._processes.idle
        process.send_signal(signal.SIGSTOP)
        reading = asyncio.create_task(read(opened, "completion", {"prompt": LONG}))
        await eventually(lambda: not opened._processes.idle)
        process.kill()
        with pytest.raises(RequestError) as raised:
            await reading
        assert raised.value.code is grpc.StatusCode.UNAVAILABLE
        assert (await read(opened, "completion", {"prompt": LONG})).requests[0].prompt == LONG


async def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(body: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(reading_worker, "parsed", out_of_memory)
    ((kind, error),) = reading_worker.answer("chat", b"{}", ROOM)
    assert (kind, error.code) == ("refused", grpc.StatusCode.INVALID_ARGUMENT)
    assert "too much memory" in error.message
