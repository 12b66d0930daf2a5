import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from router.constraint_checks import ConstraintChecks
from router.constraints import Choice, Constraint, JsonSchema, Regex
from rpc.errors import RequestError


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
        )


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Regex("("), "sampling.regex cannot be kept to: unclosed group"),
        (Regex("(?=a)b"), "look-around"),
        (Regex("(a{1000}){1000}"), "too many expressions|takes too long"),
        (JsonSchema('{"type": "objct"}'), "sampling.json_schema cannot be kept to: Invalid type: objct"),
        (JsonSchema('{"not": {}}'), "Unimplemented keys"),
        (JsonSchema('{"enum": []}'), "Unsatisfiable schema"),
        (JsonSchema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'), "nothing can match it"),
    ],
)
async def test_b99_b100_what_cannot_is_refused_with_the_librarys_reason(
    constraint: Constraint, why: str
) -> None:
    async with checks() as opened:
        for _ in range(2):  # tried, and remembered
            with pytest.raises(RequestError, match=why) as caught:
                await opened.check(constraint)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "\n" not in caught.value.message


async def test_a_trial_that_takes_too_long_is_killed_and_the_next_one_goes_well() -> None:
    async with checks(max_seconds=0.0) as opened:
        with pytest.raises(RequestError, match="takes longer than 0 seconds"):
            await opened.check(Regex("(a{1000}){1000}"))
        assert not opened._processes.idle
        opened._max_seconds = 30.0
        await opened.check(Regex("a"))


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
