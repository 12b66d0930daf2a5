import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from router.constraint_checks import ConstraintChecks
from router.constraints import Choice, Constraint, JsonOrTagged, JsonSchema, Regex, Tagged
from rpc.errors import RequestError

TAGGED = Tagged("<call>\n", '{"type": "object"}', "\n</call>")


@contextlib.asynccontextmanager
async def checks(max_seconds: float = 30.0) -> AsyncIterator[ConstraintChecks]:
    opened = ConstraintChecks(max_seconds=max_seconds)
    try:
        yield opened
    finally:
        await opened.close()


async def test_what_can_be_kept_to_is_taken() -> None:
    async with checks() as opened:
        await asyncio.gather(
            opened.check(JsonSchema("{}")),
            opened.check(Regex(r"\d{3}|[a-z]{1,100000}|.*")),
            opened.check(Choice(["a", "é😀", '"\n\\'])),
            opened.check(JsonOrTagged("{}", [TAGGED], '"\n\\[', ", ", "é]", 3)),
            opened.check(JsonOrTagged("{}", [TAGGED, TAGGED])),
        )


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Regex("("), "sampling.regex cannot be kept to: unclosed group"),
        (Regex("(?=a)b"), "look-around"),
        (Regex("(a{1000}){1000}"), "too many expressions|takes too long"),
        (JsonSchema('{"type": "objct"}'), 'sampling.json_schema cannot be kept to: it has the type "objct"'),
        (JsonSchema('{"enum": []}'), "it can be matched by nothing"),
        (JsonOrTagged('{"not": {}}', [TAGGED]), r'tagged\.json_schema cannot be kept to: it has "not"'),
        (
            JsonOrTagged("{}", [TAGGED, Tagged("<", '{"properties": {"a": {"not": {}}}}', "")]),
            r'sampling\.json_or_tagged\.tags\[1\]\.json_schema cannot be kept to: properties\.a has "not"',
        ),
        (JsonSchema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'), "nothing can match it"),
    ],
)
async def test_b99_b100_what_cannot_is_refused_with_the_reason(constraint: Constraint, why: str) -> None:
    async with checks() as opened:
        for _ in range(2):  # tried, and remembered
            with pytest.raises(RequestError, match=why) as caught:
                await opened.check(constraint)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "\n" not in caught.value.message


async def test_a_trial_that_had_no_time_says_nothing_of_its_constraint() -> None:
    """As on a machine that has too much to do."""
    constraint = Regex("(a{1000}){1000}")
    async with checks(max_seconds=0.0) as opened:
        with pytest.raises(RequestError, match="cannot be checked now; try again") as failed:
            await opened.check(constraint)
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
        assert failed.value.retry_after_seconds
        assert not opened._processes.idle
        opened._max_seconds = 30.0
        with pytest.raises(RequestError, match=r"too many expressions|takes too long") as refused:
            await opened.check(constraint)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        await opened.check(Regex("a"))


@pytest.mark.parametrize(
    ("how", "code", "why", "num_trials"),
    [
        ("killed", grpc.StatusCode.UNAVAILABLE, "cannot be checked now", 2),
        (
            "aborted",
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.regex cannot be kept to: it takes too much",
            2,
        ),
        ("busy", grpc.StatusCode.INVALID_ARGUMENT, "takes too long to build", 1),
    ],
)
async def test_what_befell_a_trial_is_not_kept_but_that_it_computes_too_long(
    tmp_path: Path, how: str, code: grpc.StatusCode, why: str, num_trials: int
) -> None:
    trials = tmp_path / "trials"
    constraint = Regex(f"{how}:{trials}")
    async with checks() as opened:
        opened._processes._module = "tests.router.dying_constraint_worker"
        with pytest.raises(RequestError, match=why) as first:
            await opened.check(constraint)
        assert first.value.code is code
        if num_trials == 1:
            with pytest.raises(RequestError, match=why):
                await opened.check(constraint)
        else:
            await opened.check(constraint)
        assert len(trials.read_text()) == num_trials


async def test_equal_constraints_are_tried_once() -> None:
    async with checks() as opened:
        await asyncio.gather(*(opened.check(Regex("[ab]")) for _ in range(300)))
        assert len(opened._processes.idle) == 1
        await asyncio.gather(*(opened.check(Regex(f"[ab]{{{i}}}")) for i in range(200)))
        assert len(opened._processes.idle) == 2


async def test_too_many_at_once_are_refused_for_now() -> None:
    async with checks() as opened:
        tried = await asyncio.gather(
            *(opened.check(Regex(f"a{{{i}}}")) for i in range(600)), return_exceptions=True
        )
        refused = [error for error in tried if isinstance(error, RequestError)]
        assert refused
        assert {error.code for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(error.retry_after_seconds for error in refused)
        await opened.check(Regex("b"))


async def test_a_process_that_died_in_between_is_replaced() -> None:
    async with checks() as opened:
        await opened.check(Choice(["a"]))
        (idle,) = opened._processes.idle
        idle.kill()
        await idle.wait()
        await opened.check(Choice(["b"]))
        assert opened._processes.idle != [idle]


async def test_processes_that_cannot_start_are_no_fault_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with checks() as opened:
        with pytest.raises(RequestError, match="cannot be checked now") as failed:
            await opened.check(Choice(["a"]))
        assert failed.value.code is grpc.StatusCode.UNAVAILABLE
