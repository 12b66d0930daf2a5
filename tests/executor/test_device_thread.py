import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from executor.device_thread import DeviceThread, Later


async def test_jobs_run_one_after_the_other_in_one_thread_that_is_not_the_loops() -> None:
    device = DeviceThread()
    seen: list[tuple[int, int]] = []
    for number in range(20):
        device.submit(partial(_numbered, number), seen.append)
    await device.call(lambda: None)
    device.close()
    assert [number for number, _ in seen] == list(range(20))
    (thread,) = {thread for _, thread in seen}
    assert thread != threading.get_ident()


def _numbered(number: int) -> tuple[int, int]:
    return number, threading.get_ident()


async def test_what_a_called_function_raises_is_raised_to_the_caller() -> None:
    device = DeviceThread()
    with pytest.raises(ZeroDivisionError):
        await device.call(lambda: 1 // 0)
    assert await device.call(lambda: 5) == 5
    device.close()


async def outcome(device: DeviceThread, job: Callable[[], Later[str]]) -> str:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    device.submit(job, future.set_result)
    return await future


async def test_jobs_run_while_another_ones_outcome_is_waited_for_and_outcomes_keep_their_order() -> None:
    device = DeviceThread()
    seen: list[str] = []
    both_launched, threads = threading.Event(), set()

    def launch(name: str, *, is_last: bool) -> Later[str]:
        threads.add(threading.get_ident())
        if is_last:
            both_launched.set()

        def wait() -> None:
            threads.add(threading.get_ident())
            assert both_launched.wait(20), "the second job runs while the first one's outcome is waited for"

        return Later(wait, lambda: f"{name} in {threading.get_ident()}")

    device.submit(lambda: launch("first", is_last=False), seen.append)
    device.submit(lambda: launch("second", is_last=True), seen.append)
    thread = await device.call(threading.get_ident)
    assert await outcome(device, lambda: Later(lambda: None, lambda: "last")) == "last"
    assert seen == [f"first in {thread}", f"second in {thread}"]
    assert len(threads) == 2
    device.close()


async def test_what_can_be_done_ahead_is_done_while_there_is_no_job_and_jobs_come_between() -> None:
    device = DeviceThread()
    pieces = 0
    some, all_done = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def piece() -> bool:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            loop.call_soon_threadsafe(some.set)
        if pieces == 2000:
            loop.call_soon_threadsafe(all_done.set)
        time.sleep(0.0005)
        return pieces < 2000

    device.work_ahead = piece
    await device.call(lambda: None)
    async with asyncio.timeout(20):
        await some.wait()
        assert await device.call(lambda: pieces) < 2000
        await all_done.wait()
        assert await device.call(lambda: "still there") == "still there"
    assert device.close()


async def test_a_wait_that_raises_leaves_the_word_to_the_outcome() -> None:
    def wait() -> None:
        raise RuntimeError("the device fell off the bus")

    device = DeviceThread()
    assert await outcome(device, lambda: Later(wait, lambda: "what is wrong")) == "what is wrong"
    device.close()
