"""Who is told and who is woken."""

from protos.v1 import router_pb2
from scheduler.loop import MAX_SUMMARIES_PENDING, Watcher
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
