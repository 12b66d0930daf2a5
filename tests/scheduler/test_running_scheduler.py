"""Who is told and who is woken."""

import asyncio
from dataclasses import replace

import pytest

from protos.v1 import router_pb2
from scheduler.core import SchedulerCore
from scheduler.executor_client import Opened
from scheduler.plan import Capacity
from scheduler.running_scheduler import MAX_SUMMARIES_PENDING, RunningScheduler, Watcher
from tests.rig.checking_executor import capacity
from tests.scheduler.shell import (
    ObedientExecutor,
    Shell,
    expected_ids,
    serving_executor,
    until,
)


def _summary(step_id: int) -> router_pb2.StepSummary:
    return router_pb2.StepSummary(executor_id="e", step_id=step_id)


async def test_a_slow_watcher_misses_summaries_and_is_told_how_many() -> None:
    slow, quick = Watcher(""), Watcher("")
    for step_id in range(1, MAX_SUMMARIES_PENDING + 11):
        slow.offer(_summary(step_id))
        quick.offer(_summary(step_id))
        quick.queue.get_nowait()
    for _ in range(MAX_SUMMARIES_PENDING):
        assert slow.queue.get_nowait().num_dropped == 0
    shared = _summary(1000)
    slow.offer(shared)
    quick.offer(shared)
    told = slow.queue.get_nowait()
    assert (told.step_id, told.num_dropped) == (1000, 10)
    assert quick.queue.get_nowait().num_dropped == 0  # the one object is not written to
    slow.offer(_summary(1001))
    assert slow.queue.get_nowait().num_dropped == 0


async def test_no_pause_between_a_timer_and_its_sequence_when_an_earlier_one_comes(shell: Shell) -> None:
    """The clock sleeps until the next timer; a nearer one that arrives meanwhile wakes it."""
    async with serving_executor(executor := ObedientExecutor(), shell.executor_address):
        router = await shell.welcomed()
        executor.may_answer.clear()
        await router.submit(1, "later", [1], 50, remaining_ms=60_000)
        await until(lambda: shell.core.next_timer is not None)
        await router.submit(2, "sooner", [1], 50, remaining_ms=30)
        await until(lambda: 2 in router.finished)
        assert 1 not in router.finished
        executor.may_answer.set()
        await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1], 50)


@pytest.mark.parametrize(
    "poorer",
    [capacity(max_seq_len=99), replace(capacity(), features=frozenset({"penalties"}))],
    ids=["shorter", "with fewer abilities"],
)
async def test_what_routers_are_promised_is_what_every_executor_that_is_there_can_do(
    poorer: Capacity,
) -> None:
    scheduler = RunningScheduler(SchedulerCore(), on_serving=lambda *_: None)
    able = replace(capacity(), features=frozenset({"penalties", "constraints"}))
    scheduler.executor_attached("able", Opened(1, 1, able), asyncio.Event())
    before = scheduler.promise
    assert before is not None
    assert (before.max_total_tokens, before.features) == (256, able.features)
    scheduler.executor_attached("poorer", Opened(2, 1, poorer), asyncio.Event())
    assert scheduler.promise is not None
    assert scheduler.promise != before
    assert scheduler.promise.max_total_tokens == min(256, poorer.max_seq_len)
    assert scheduler.promise.features == poorer.features
    scheduler.executor_lost("poorer", "gone", is_crash=False)
    assert (scheduler.promise.max_total_tokens, scheduler.promise.features) == (256, able.features)
    scheduler.executor_lost("able", "gone", is_crash=False)
    assert scheduler.promise.max_total_tokens == 256  # nobody is told anything new by an absence


async def test_routers_need_not_hear_which_executors_take_draft_tokens() -> None:
    """Else each of their streams would end when one that takes none joins those that do, or leaves them."""
    scheduler = RunningScheduler(SchedulerCore(), on_serving=lambda *_: None)
    takes_none = replace(capacity(), features=frozenset({"penalties"}))
    takes = replace(takes_none, features=takes_none.features | {"draft_tokens"})
    scheduler.executor_attached("takes", Opened(1, 1, takes), asyncio.Event())
    before = scheduler.promise
    assert before is not None
    assert before.features == {"penalties"}
    scheduler.executor_attached("takes none", Opened(2, 1, takes_none), asyncio.Event())
    assert scheduler.promise == before
    scheduler.executor_lost("takes none", "gone", is_crash=False)
    assert scheduler.promise == before


async def test_other_numbers_or_names_that_are_not_told_are_no_other_promise() -> None:
    scheduler = RunningScheduler(SchedulerCore(), on_serving=lambda *_: None)
    one = replace(capacity(), model_fingerprint="m", numerics_fingerprint="avx2", dtype="float32")
    scheduler.executor_attached("one", Opened(1, 1, one), asyncio.Event())
    before = scheduler.promise
    other = replace(one, model_fingerprint="", numerics_fingerprint="amx", dtype="bfloat16")
    scheduler.executor_attached("other", Opened(2, 1, other), asyncio.Event())
    assert before is not None
    assert scheduler.promise == before
    assert scheduler.promise.model_fingerprint == "m"


async def test_who_was_promised_more_is_welcomed_anew(shell: Shell) -> None:
    async with serving_executor(executor := ObedientExecutor(), shell.executor_address):
        router = await shell.welcomed()
        executor.may_answer.clear()
        await router.submit(1, "r", [1], 30)
        await until(lambda: 1 in router.started or executor.plans)
        shell.scheduler.executor_attached(
            "small", Opened(77, 1, replace(shell.scheduler.capacity, max_seq_len=50)), asyncio.Event()
        )
        assert (await router.ended())[0].name == "UNAVAILABLE"
        again = await shell.welcomed()
        assert again.messages[0].welcome.max_total_tokens == 50
        await again.submit(1, "r", [1], 30, accepted_before=True)
        executor.may_answer.set()
        await until(lambda: 1 in again.finished)
    assert again.ids[1] == expected_ids([1], 30)
