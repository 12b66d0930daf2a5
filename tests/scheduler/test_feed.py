import asyncio

import pytest

from protos.v1 import common_pb2, scheduler_pb2
from scheduler import feed
from scheduler.feed import Feed, FeedReader
from scheduler.plan import BatchPlan
from tests.scheduler.harness import EXECUTOR, Harness


class Rig:
    """A core whose steps are told."""

    def __init__(self) -> None:
        self.harness = Harness()
        self.feed = Feed(self.harness.core.waiting)

    def step(self) -> BatchPlan:
        plan = self.harness.plan()
        assert plan is not None
        if self.feed.has_readers:
            self.feed.step(self.harness.core.executors[EXECUTOR], plan, float(plan.step_id), 100)
        self.harness.result()
        return plan


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.harness.submit("a", [1, 2], 250, ignore_eos=True)
    return rig


def riders(message: scheduler_pb2.BatchChanges) -> list[str]:
    return [one.request_id for step in message.steps for one in step.entered]


async def test_several_steps_come_as_one_message_and_none_is_missing(rig: Rig) -> None:
    reader = FeedReader("")
    rig.feed.join(reader)
    for _ in range(5):
        rig.step()
    message = await reader.queue.get()
    assert reader.queue.empty()
    assert (message.whole, riders(message)) == (True, ["a"])
    assert [(step.step_id, step.num_alike) for step in message.steps] == [(1, 0), (2, 3)]
    newest = message.newest
    assert (newest.executor_id, newest.step_id, newest.time_seconds) == (EXECUTOR, 5, 5.0)
    assert (newest.num_running, newest.num_plan_bytes, len(newest.members)) == (1, 100, 0)
    rig.step()
    message = await reader.queue.get()
    assert (message.whole, [step.step_id for step in message.steps]) == (False, [6])


async def test_who_waits_is_told(rig: Rig) -> None:
    reader = FeedReader("")
    rig.feed.join(reader)
    rig.step()
    for name in "bcdefghijklmnop":
        rig.harness.submit(name, [1], 5)
    newest = (await reader.queue.get()).newest
    assert newest.num_waiting == 15
    assert [group.num_waiting for group in newest.waiting] == [15]


async def test_who_comes_later_is_told_who_sits_there_and_the_steps_from_then_on(rig: Rig) -> None:
    first, second = FeedReader(""), FeedReader("")
    rig.feed.join(first)
    rig.step()
    rig.feed.join(second)
    assert first.queue.get_nowait().newest.step_id == 1
    whole = second.queue.get_nowait()
    assert (whole.whole, [one.request_id for one in whole.seated], len(whole.steps)) == (True, ["a"], 0)
    rig.step()
    assert await second.queue.get() == await first.queue.get()


async def test_nothing_is_told_twice_to_those_who_were_there(rig: Rig) -> None:
    first, second, third = FeedReader(""), FeedReader(""), FeedReader("")
    rig.feed.join(first)
    rig.step()
    rig.feed.join(second)
    rig.feed.join(third)
    assert third.queue.get_nowait() == second.queue.get_nowait()
    assert first.queue.qsize() == 1
    assert second.queue.empty()


async def test_who_leaves_is_told_with_the_reason(rig: Rig) -> None:
    reader = FeedReader("")
    rig.feed.join(reader)
    rig.harness.submit("short", [3], 1, ignore_eos=True)
    rig.step()
    rig.step()
    left = [one for step in (await reader.queue.get()).steps for one in step.left]
    assert [(one.request_id, one.reason) for one in left] == [("short", common_pb2.FINISH_REASON_LENGTH)]


async def test_a_slow_reader_is_told_how_much_it_missed_and_then_who_sits_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "FLUSH_SECONDS", 0.0)
    slow, quick = FeedReader(""), FeedReader("")
    rig.feed.join(slow)
    rig.feed.join(quick)
    for _ in range(feed.MAX_MESSAGES_PENDING + 3):
        rig.step()
        assert not (await quick.queue.get()).newest.num_dropped
    for _ in range(feed.MAX_MESSAGES_PENDING):
        assert not slow.queue.get_nowait().newest.num_dropped
    rig.step()
    told, shared = await slow.queue.get(), await quick.queue.get()
    assert (told.whole, told.newest.num_dropped) == (True, 3)
    assert [one.request_id for one in told.seated] == ["a"]
    assert (shared.whole, shared.newest.num_dropped) == (False, 0)  # the one object is not written to
    rig.step()
    assert await slow.queue.get() == await quick.queue.get()


async def test_a_fresh_epoch_is_told_apart_from_what_was_before_it(rig: Rig) -> None:
    reader = FeedReader("")
    rig.feed.join(reader)
    rig.step()
    rig.feed.executor_gone(EXECUTOR)
    late = FeedReader("")
    rig.feed.join(late)
    assert late.queue.empty(), "who is gone sits nowhere"
    rig.harness = Harness()
    rig.harness.submit("b", [1], 5)
    rig.step()
    assert riders(reader.queue.get_nowait()) == ["a"]
    fresh = await reader.queue.get()
    assert (fresh.whole, riders(fresh)) == (True, ["b"])


async def test_a_reader_of_another_executor_is_told_nothing(rig: Rig) -> None:
    other, mine = FeedReader("another"), FeedReader(EXECUTOR)
    rig.feed.join(other)
    rig.feed.join(mine)
    rig.step()
    await mine.queue.get()
    assert other.queue.empty()


async def test_after_the_last_reader_nothing_is_left(rig: Rig) -> None:
    reader = FeedReader("")
    rig.feed.join(reader)
    rig.step()
    rig.feed.leave(reader)
    assert not rig.feed.has_readers
    await asyncio.sleep(0)
    assert reader.queue.empty()
    rig.feed.join(reader)
    assert reader.queue.empty()  # nobody sits anywhere, as far as is known
    rig.step()
    assert (await reader.queue.get()).steps[0].step_id == 2
