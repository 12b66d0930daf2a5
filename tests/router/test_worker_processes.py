import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.worker_processes import WorkerProcesses

SECONDS = 60.0


@asynccontextmanager
async def opened(num_processes: int = 2) -> AsyncIterator[WorkerProcesses]:
    processes = WorkerProcesses("tests.router.echo_worker", num_processes=num_processes, line_bytes=1024)
    try:
        async with asyncio.timeout(SECONDS):
            yield processes
    finally:
        await processes.close()


async def said(process: asyncio.subprocess.Process, word: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(word.encode() + b"\n")
    return (await process.stdout.readline()).decode().strip()


async def test_one_is_used_again() -> None:
    async with opened() as processes:
        async with processes.one() as first:
            assert await said(first, "snow") == "snow"
        async with processes.one() as second:
            assert await said(second, "ice") == "ice"
        assert second is first


async def test_one_is_of_nobody_else_and_there_are_so_many() -> None:
    async with opened(num_processes=1) as processes:
        async with processes.one() as first:
            other = processes.one()
            waiting = asyncio.ensure_future(other.__aenter__())
            assert await said(first, "snow") == "snow"
            assert not waiting.done()
        assert await waiting is first
        await other.__aexit__(None, None, None)


async def test_what_goes_wrong_inside_ends_it() -> None:
    async with opened() as processes:
        with contextlib.suppress(ZeroDivisionError):
            async with processes.one() as process:
                raise ZeroDivisionError
        assert process.returncode is not None
        assert not processes.idle


async def test_one_that_has_ended_is_not_used_again() -> None:
    async with opened() as processes:
        async with processes.one() as first:
            assert await said(first, "end") == ""
            await first.wait()
        async with processes.one() as second:
            assert second is not first
            assert await said(second, "snow") == "snow"


async def test_one_that_does_not_come_up_is_an_error_in_words() -> None:
    processes = WorkerProcesses("tests.router.no_such_worker", num_processes=1, line_bytes=1024)
    with pytest.raises(OSError, match=r"tests\.router\.no_such_worker does not come up"):
        async with processes.one():
            pass
    assert not processes.idle
