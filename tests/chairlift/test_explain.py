"""`chairlift explain`: under which names a request is found."""

import asyncio
from pathlib import Path

import pytest

from chairlift import explain
from protos.v1 import router_pb2
from tests.chairlift.fake_router import FakeRouter, listening


async def run(tmp_path: Path, known: str, asked: str) -> int:
    router = FakeRouter()
    router.explained = {known: router_pb2.ExplainResponse(request_id=known)}
    async with listening(router, tmp_path) as address:
        return await asyncio.to_thread(explain.main, [asked, "--address", address])


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        ("fox-1", "fox-1"),
        ("a11e", "chatcmpl-a11e"),
        ("a11e", "cmpl-a11e"),
        ("cmpl-mine", "cmpl-mine"),  # named so by who asked
        ("a[/b]", "a[/b]"),
        ("[red]x", "[red]x"),
    ],
)
async def test_the_id_of_an_http_answer_is_one_too(
    known: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(tmp_path, known, asked) == 0
    assert known in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "named"), [("chatcmpl-a", "a"), ("resp_a", "a"), ("cmpl-", "cmpl-"), ("fox-1", "fox-1")]
)
async def test_a_request_that_nobody_knows_is_a_sentence(
    asked: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run(tmp_path, "other", asked) == 1
    expected = f"chairlift explain: no request {named!r} is known here [NOT_FOUND]\n"
    assert capsys.readouterr().err == expected
