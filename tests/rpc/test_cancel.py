"""A cancel that was swallowed is heeded."""

import asyncio
import contextlib

import pytest

from rpc.cancel import heed_cancel


async def swallows(begun: asyncio.Event, *, heeds: bool) -> str:
    """As grpc.aio does when a call ends in the instant in which its task is cancelled."""
    begun.set()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    if heeds:
        heed_cancel()
    return "goes on"


async def test_a_task_that_was_not_cancelled_goes_on() -> None:
    heed_cancel()


@pytest.mark.parametrize("heeds", [True, False])
async def test_a_swallowed_cancel_ends_the_task_where_it_is_heeded(heeds: bool) -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(swallows(begun, heeds=heeds))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() is heeds


async def test_within_a_timeout_it_is_the_timeouts() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await swallows(asyncio.Event(), heeds=True)
    heed_cancel()  # it is over
