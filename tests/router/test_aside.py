"""Little work is done at once, much of it beside the loop."""

import asyncio
import sys
import threading

import pytest

from router import aside


async def test_long_work_runs_beside_the_loop_and_short_work_on_it() -> None:
    async def where(*, is_long: bool) -> int:
        return await aside.run(threading.get_ident, is_long=is_long)

    assert await where(is_long=False) == threading.get_ident() != await where(is_long=True)


async def test_the_loop_turns_while_long_work_goes_on() -> None:
    let_go = threading.Event()
    work = asyncio.create_task(aside.run(lambda: let_go.wait(20), is_long=True))
    await asyncio.sleep(0)
    let_go.set()  # reached, for nobody waits in the loop's own thread
    assert await work


@pytest.mark.parametrize("is_long", [False, True])
async def test_what_work_raises_its_asker_gets(is_long: bool) -> None:
    def fail() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError):
        await aside.run(fail, is_long=is_long)


def test_a_thread_that_computes_gives_way_within_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        aside.configure()
        assert sys.getswitchinterval() <= 0.0011
    finally:
        sys.setswitchinterval(before)
