"""What routers see of a scheduler, over real gRPC."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
import structlog

from protos.v1 import common_pb2, router_pb2, scheduler_pb2
from scheduler.core import SchedulerCore
from scheduler.executor_client import Opened
from scheduler.policy import Limits
from scheduler.router_session import MAX_UNACKED_MESSAGES, RouterSession
from scheduler.running_scheduler import RunningScheduler
from scheduler.sequence import StatusCode
from scheduler.servicer import _RouterStream, _SteppedDownError
from tests.rig import toy_executor
from tests.rig.checking_executor import CheckingExecutor, capacity
from tests.scheduler.shell import (
    ObedientExecutor,
    Shell,
    expected_ids,
    key_of,
    running_shell,
    serving_executor,
    until,
)

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
ABORT, DEADLINE = common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_DEADLINE
ERROR = common_pb2.FINISH_REASON_ERROR


# --- greeting ---------------------------------------------------------------------------------------


async def test_a_router_is_welcomed_once_and_told_that_requests_are_served(
    shell: Shell, executor: ObedientExecutor
) -> None:
    await until(lambda: shell.scheduler.is_serving)
    router = await shell.connect()
    await until(lambda: len(router.messages) == 2)
    welcome = router.messages[0].welcome
    assert (welcome.scheduler_id, welcome.term, welcome.protocol_revision) == ("this-scheduler", 1, 1)
    assert (welcome.max_total_tokens, welcome.vocab_size) == (toy_executor.MAX_LEN, toy_executor.VOCAB)
    assert list(welcome.eos_token_ids) == [toy_executor.EOS]
    assert router.messages[1].serving_status == scheduler_pb2.ServingStatus(serving=True)


async def test_without_an_executor_the_router_is_told_whom_the_scheduler_waits_for(shell: Shell) -> None:
    router = await shell.connect()
    await until(lambda: any(shell.executor_address in status.reason for status in router.statuses))
    assert not any(message.HasField("welcome") for message in router.messages)
    assert not any(status.serving for status in router.statuses)
    async with serving_executor(ObedientExecutor(), shell.executor_address):
        await until(lambda: router.is_welcome)
        await router.submit(1, "a", [5, 6], 4)
        await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([5, 6], 4)
    assert sum(message.HasField("welcome") for message in router.messages) == 1


# --- requests ---------------------------------------------------------------------------------------


async def test_every_token_of_many_sequences_arrives_once_and_in_order(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    prompts = {handle: [handle % 90 + 1] * (1 + handle % 7) for handle in range(1, 25)}
    for handle, prompt in prompts.items():
        await router.submit(handle, f"r{handle}", prompt, 3 + handle % 11)
    await until(lambda: len(router.finished) == len(prompts))
    for handle, prompt in prompts.items():
        assert router.ids[handle] == expected_ids(prompt, 3 + handle % 11)
        assert router.finished[handle].reason == LENGTH
    assert sorted(router.started) == sorted(prompts)
    await until(lambda: not shell.core.sequences)  # acknowledged: nothing is kept


async def test_an_end_token_is_told_with_its_id(shell: Shell, executor: ObedientExecutor) -> None:
    router = await shell.welcomed()
    prompt = next([first, 7] for first in range(97) if toy_executor.EOS in expected_ids([first, 7], 12))
    await router.submit(1, "a", prompt, 50, ignore_eos=False)
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids(prompt, 50, ignore_eos=False)
    assert router.finished[1].reason == STOP
    assert router.finished[1].matched_token_id == toy_executor.EOS


async def test_a_refused_request_ends_with_the_sentence_and_hurts_nobody(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    await router.submit(1, "big", [3] * 100, 100)
    await router.submit(2, "empty", [], 4)
    await router.submit(3, "small", [3], 4)
    await until(lambda: len(router.finished) == 3)
    assert router.finished[1].reason == ERROR
    assert router.finished[1].status_code == StatusCode.INVALID_ARGUMENT
    assert str(toy_executor.MAX_LEN) in router.finished[1].message
    assert router.finished[2].status_code == StatusCode.INVALID_ARGUMENT
    assert router.ids[3] == expected_ids([3], 4)
    await until(lambda: not shell.core.sequences)


async def test_a_prompt_in_parts_is_one_prompt(shell: Shell, executor: ObedientExecutor) -> None:
    router = await shell.welcomed()
    prompt = list(range(1, 41))
    await router.submit(1, "a", prompt[:15], 6, part=scheduler_pb2.Part(index=0, count=3))
    await router.submit(2, "b", [9], 6)  # overtakes
    for index, ids in ((1, prompt[15:30]), (2, prompt[30:])):
        part = scheduler_pb2.Part(index=index, count=3)
        await router.send(submit=scheduler_pb2.Submit(handle=1, prompt_token_ids=ids, part=part))
    await until(lambda: len(router.finished) == 2)
    assert router.ids[1] == expected_ids(prompt, 6)
    assert router.ids[2] == expected_ids([9], 6)


async def test_a_cancel_ends_a_prompt_that_is_still_travelling(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    await router.submit(1, "a", [1, 2, 3], 6, part=scheduler_pb2.Part(index=0, count=2))
    await router.cancel("a")
    await until(lambda: 1 in router.finished)  # at once, with nothing else going on
    assert router.finished[1].reason == ABORT
    late = scheduler_pb2.Submit(handle=1, prompt_token_ids=[4], part=scheduler_pb2.Part(index=1, count=2))
    await router.send(submit=late)
    await router.submit(2, "b", [9], 3)
    await until(lambda: 2 in router.finished)
    assert shell.core.counters.steps <= 4


async def test_a_cancel_ends_the_sequence_and_frees_its_blocks(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    executor.may_answer.clear()
    await router.submit(1, "a", [1, 2, 3], 100)
    await until(lambda: executor.plans)
    await router.cancel("a", STOP)
    await until(lambda: 1 in router.finished)
    assert router.finished[1].reason == STOP
    assert router.finished[1].num_wasted_tokens >= 1
    state = shell.core.executors[shell.executor_address]
    assert state.blocks.num_free == state.blocks.num_blocks
    executor.may_answer.set()
    await until(lambda: state.session.num_unanswered == 0)
    assert router.ids[1] == []


async def test_a_router_does_not_cancel_what_another_one_has_taken_over(
    shell: Shell, executor: ObedientExecutor
) -> None:
    """The client's old connection breaks when its new one has long gone on at another router."""
    old, new = await shell.welcomed("old"), await shell.welcomed("new")
    executor.may_answer.clear()
    await old.submit(1, "a", [1, 2, 3], 6)
    await until(lambda: executor.plans)
    await new.submit(1, "a", [1, 2, 3], 6, accepted_before=True)
    await until(lambda: 1 in old.finished)
    assert old.finished[1].status_code == StatusCode.ABORTED
    await old.cancel("a")
    await old.cancel("never")
    executor.may_answer.set()
    await until(lambda: 1 in new.finished)
    assert new.finished[1].reason == LENGTH
    assert new.ids[1] == expected_ids([1, 2, 3], 6)


async def test_b30_cancelling_what_does_not_live_leaves_no_trace(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    for number in range(500):
        await router.cancel(f"never {number}")
    await router.submit(1, "a", [1], 2)
    await until(lambda: 1 in router.finished)
    await until(lambda: not shell.core.sequences)


async def test_a_deadline_passes_although_the_executor_hangs(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    executor.may_answer.clear()
    await router.submit(1, "a", [1, 2, 3], 100, remaining_ms=50)
    await until(lambda: 1 in router.finished)
    assert router.finished[1].reason == DEADLINE
    assert router.finished[1].status_code == StatusCode.DEADLINE_EXCEEDED
    state = shell.core.executors[shell.executor_address]
    assert state.blocks.num_free == state.blocks.num_blocks
    executor.may_answer.set()


# --- streams that end ---------------------------------------------------------------------------------


async def test_the_first_message_must_be_hello(shell: Shell) -> None:
    call = shell.stub.Connect()
    await call.write(scheduler_pb2.RouterMessage(ack=scheduler_pb2.Ack(message_id=1)))
    with pytest.raises(grpc.aio.AioRpcError, match="Hello") as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_that_ends_before_hello_is_over(shell: Shell) -> None:
    call = shell.stub.Connect()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


def _submit(**fields: object) -> scheduler_pb2.RouterMessage:
    submit = scheduler_pb2.Submit(
        key=key_of("x"),
        handle=7,
        prompt_token_ids=[1],
        sampling=common_pb2.SamplingParams(max_tokens=3, ignore_eos=True),
    )
    submit.MergeFrom(scheduler_pb2.Submit(**fields))  # type: ignore[arg-type]
    return scheduler_pb2.RouterMessage(submit=submit)


BROKEN_RULES = {
    "Hello came a second time": [scheduler_pb2.RouterMessage(hello=scheduler_pb2.Hello(router_id="x"))],
    "message 99 was acknowledged": [scheduler_pb2.RouterMessage(ack=scheduler_pb2.Ack(message_id=99))],
    "key has 3 bytes": [_submit(key=b"abc")],
    "max_tokens is 0": [_submit(sampling=common_pb2.SamplingParams(max_tokens=0))],
    "handle 7 is in use": [_submit(), _submit(key=key_of("y"))],
    "part 2 of 3": [
        _submit(part=scheduler_pb2.Part(index=0, count=3)),
        _submit(part=scheduler_pb2.Part(index=2, count=3)),
    ],
}


@pytest.mark.parametrize("sentence", BROKEN_RULES)
async def test_a_router_that_breaks_the_rules_loses_its_stream_and_no_other_does(
    shell: Shell, executor: ObedientExecutor, sentence: str
) -> None:
    good = await shell.welcomed("good")
    executor.may_answer.clear()
    await good.submit(1, "a", [1, 2], 8)
    bad = await shell.welcomed("bad")
    with structlog.testing.capture_logs() as logs:
        for message in BROKEN_RULES[sentence]:
            await bad.write(message)
        code, details = await bad.ended()
    assert [sentence in entry["error"] for entry in logs if entry["event"] == "router_broke_the_rules"] == [
        True
    ]
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in details
    executor.may_answer.set()
    await until(lambda: 1 in good.finished)
    assert good.ids[1] == expected_ids([1, 2], 8)
    # Nothing was taken in that no reader and no grace is left for.
    for seq in shell.core.sequences.values():
        assert seq.attachment is not None or seq.orphaned_until is not None or seq.forget_at is not None


async def _read_to_the_end(call: Any) -> None:
    while True:
        await call.read()


async def test_bytes_that_are_no_message_end_their_stream_alone(
    shell: Shell, executor: ObedientExecutor
) -> None:
    channel: Any = shell.channel
    raw = channel.stream_stream("/chairlift.v1.Scheduler/Connect")()
    hello = scheduler_pb2.RouterMessage(hello=scheduler_pb2.Hello(router_id="raw"))
    await raw.write(hello.SerializeToString())
    await raw.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _read_to_the_end(raw)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    router = await shell.welcomed()
    await router.submit(1, "a", [1], 2)
    await until(lambda: 1 in router.finished)


async def test_a_router_that_acknowledges_nothing_loses_its_stream() -> None:
    async with running_shell(router_stall_seconds=0.2) as shell:
        executor = ObedientExecutor()
        async with serving_executor(executor, shell.executor_address):
            stalled = await shell.welcomed("stalled", acks=False)
            await stalled.submit(1, "a", [1, 2], 100)
            assert (await stalled.ended())[0] is grpc.StatusCode.ABORTED
            assert stalled.end is not None  # it writes nothing, so it has learned the status
            assert stalled.end.code() is grpc.StatusCode.ABORTED
            assert "0.2 seconds" in str(stalled.end.details())
            assert sum(item.HasField("step_output") for item in stalled.messages) == MAX_UNACKED_MESSAGES
            assert all(seq.attachment is None for seq in shell.core.sequences.values())


async def test_a_router_that_reads_nothing_orphans_its_sequences_all_the_same() -> None:
    limits = Limits(watermark=0.0, orphan_grace_seconds=0.1)
    async with running_shell(limits, router_stall_seconds=0.2) as shell:
        executor = ObedientExecutor()
        async with serving_executor(executor, shell.executor_address):
            call = shell.stub.Connect()
            hello = scheduler_pb2.Hello(router_id="deaf", protocol_revision=1)
            await call.write(scheduler_pb2.RouterMessage(hello=hello))
            await until(lambda: shell.scheduler.is_serving)
            executor.may_answer.clear()
            await call.write(_submit(sampling=common_pb2.SamplingParams(max_tokens=100)))
            await until(lambda: executor.plans)
            executor.may_answer.set()
            await until(lambda: all(seq.attachment is None for seq in shell.core.sequences.values()))
            await until(lambda: shell.core.is_idle)
            call.cancel()


# --- orphans ------------------------------------------------------------------------------------------


async def test_the_newest_stream_of_a_router_counts_whatever_an_older_one_still_brings(
    shell: Shell, executor: ObedientExecutor
) -> None:
    executor.may_answer.clear()
    newest = await shell.welcomed("one", stream=3)
    await newest.submit(1, "a", [1, 2], 20)
    await until(lambda: key_of("a") in shell.core.sequences)
    late = await shell.connect("one", stream=2)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await late.submit(1, "a", [1, 2], 20, accepted_before=True)
    assert (await late.ended())[0] is grpc.StatusCode.ABORTED
    executor.may_answer.set()
    await until(lambda: 1 in newest.finished)
    assert newest.ids[1] == expected_ids([1, 2], 20)
    other = await shell.connect("another", stream=1)
    next_one = await shell.connect("one", stream=4)
    assert (await newest.ended())[0] is grpc.StatusCode.ABORTED
    for router in (other, next_one):
        await router.submit(1, "b" if router is other else "c", [1, 2], 2)
        await until(lambda router=router: 1 in router.finished)  # type: ignore[misc]


async def test_a_broken_stream_costs_nothing_when_the_router_comes_back(
    shell: Shell, executor: ObedientExecutor
) -> None:
    first = await shell.welcomed()
    await first.submit(1, "a", [1, 2, 3], 60)
    await until(lambda: len(first.ids[1]) >= 5)
    executor.may_answer.clear()
    await first.leave()
    seq = shell.core.sequences[key_of("a")]
    await until(lambda: seq.orphaned_until is not None)
    executor.may_answer.set()
    second = await shell.welcomed()
    have = first.ids[1][:4]
    await second.submit(9, "a", [1, 2, 3], 60, output=have, accepted_before=True)
    await until(lambda: 9 in second.finished)
    assert second.ids[9] == expected_ids([1, 2, 3], 60)
    assert sum(len(plan.admitted) for plan in executor.plans) == 1  # never computed again


async def test_what_nobody_comes_back_for_is_aborted_after_its_grace() -> None:
    async with running_shell(Limits(watermark=0.0, orphan_grace_seconds=0.05)) as shell:
        executor = ObedientExecutor()
        async with serving_executor(executor, shell.executor_address):
            router = await shell.welcomed()
            executor.may_answer.clear()
            await router.submit(1, "a", [1, 2, 3], 100)
            await until(lambda: executor.plans)
            await router.leave()
            await until(lambda: shell.core.is_idle)
            executor.may_answer.set()
            state = shell.core.executors[shell.executor_address]
            assert state.blocks.num_free == state.blocks.num_blocks


async def test_b28_a_key_that_another_router_reads_is_refused_there_and_untouched_here(
    shell: Shell, executor: ObedientExecutor
) -> None:
    owner, other = await shell.welcomed("owner"), await shell.welcomed("other")
    executor.may_answer.clear()
    await owner.submit(1, "a", [1, 2], 20)
    await until(lambda: executor.plans)
    await other.submit(1, "a", [1, 2], 20)
    await until(lambda: 1 in other.finished)
    assert other.finished[1].status_code == StatusCode.ALREADY_EXISTS
    executor.may_answer.set()
    await until(lambda: 1 in owner.finished)
    assert owner.ids[1] == expected_ids([1, 2], 20)


async def test_a_router_that_goes_on_for_another_takes_over_and_the_older_reader_is_told(
    shell: Shell, executor: ObedientExecutor
) -> None:
    older, newer = await shell.welcomed("older"), await shell.welcomed("newer")
    executor.may_answer.clear()
    await older.submit(1, "a", [1, 2], 20)
    await until(lambda: executor.plans)
    await newer.submit(5, "a", [1, 2], 20, accepted_before=True)
    await until(lambda: 1 in older.finished)
    assert older.finished[1].status_code == StatusCode.ABORTED
    executor.may_answer.set()
    await until(lambda: 5 in newer.finished)
    assert newer.ids[5] == expected_ids([1, 2], 20)


async def test_a_half_open_stream_does_not_keep_its_own_router_out(
    shell: Shell, executor: ObedientExecutor
) -> None:
    half_open = await shell.welcomed("r")
    executor.may_answer.clear()
    await half_open.submit(1, "a", [1, 2], 20)
    await until(lambda: executor.plans)
    again = await shell.welcomed("r")
    await again.submit(1, "a", [1, 2], 20)  # its client has not been told "accepted" yet
    executor.may_answer.set()
    await until(lambda: 1 in again.finished)
    assert again.ids[1] == expected_ids([1, 2], 20)


async def test_a_reader_learns_that_its_sequence_was_given_up_for_other_ids(
    shell: Shell, executor: ObedientExecutor
) -> None:
    older, newer = await shell.welcomed("older"), await shell.welcomed("newer")
    await older.submit(1, "a", [1, 2], 100)
    await until(lambda: len(older.ids[1]) >= 3)
    executor.may_answer.clear()
    other_ids = [(token + 1) % 97 for token in older.ids[1][:3]]
    await newer.submit(1, "a", [1, 2], 100, output=other_ids, accepted_before=True)
    await until(lambda: 1 in older.finished)
    assert older.finished[1].reason == ABORT
    executor.may_answer.set()
    await until(lambda: 1 in newer.finished)
    assert newer.ids[1] == other_ids + expected_ids([1, 2, *other_ids], 97)


@pytest.mark.parametrize("rounds", [60])
async def test_b27_streams_that_break_leave_nothing_behind(
    shell: Shell, executor: ObedientExecutor, rounds: int
) -> None:
    num_tasks = None
    for number in range(rounds):
        router = await shell.welcomed()
        await router.submit(1, f"r{number}", [1, 2, number % 97], 50)
        await until(lambda: len(router.ids[1]) >= 1)  # noqa: B023 - awaited within its round
        await router.cancel(f"r{number}")
        await router.leave()
        await until(lambda: not shell.scheduler._router_wakes)
        if number == 10:
            num_tasks = len(asyncio.all_tasks())
    assert num_tasks is not None
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 2)  # some are just about to end
    await until(lambda: shell.core.is_idle)
    state = shell.core.executors[shell.executor_address]
    assert state.blocks.num_free == state.blocks.num_blocks


class _SlowRouter:
    """The context of a Connect call whose router takes a message when it may."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.is_writing = asyncio.Event()
        self.taken: list[scheduler_pb2.SchedulerMessage] = []

    async def write(self, message: scheduler_pb2.SchedulerMessage) -> None:
        self.is_writing.set()
        await self.may_take.wait()
        self.taken.append(message)


async def test_a_step_down_while_a_write_waits_is_no_end_for_the_router() -> None:
    """What it was promised goes on at the new leader, so the old one must not say that it gave it up."""
    core = SchedulerCore(Limits(watermark=0.0))
    scheduler = RunningScheduler(core, on_serving=lambda *_: None)
    scheduler.executor_attached("e", Opened(1, 1, capacity()), asyncio.Event())
    stream, router = _RouterStream(scheduler, RouterSession("router", 1), "scheduler"), _SlowRouter()
    reading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    writing = asyncio.create_task(stream.write(router, reading, 5.0))  # type: ignore[arg-type]
    submit = scheduler_pb2.Submit(handle=7, key=key_of("r"), request_id="r", prompt_token_ids=[1, 2, 3])
    submit.sampling.max_tokens, submit.sampling.ignore_eos = 50, True
    stream._submit(submit)
    request = core.sequences[key_of("r")].request
    executor = CheckingExecutor(capacity(), 1, {request.sampling: request})

    def step() -> None:
        plan = core.schedule("e", scheduler.now())
        assert plan is not None
        executor.send(plan)
        result = executor.run()
        scheduler.result_applied(result.step_id, core.update("e", result, scheduler.now()), has_turned=False)

    await until(lambda: len(router.taken) == 3)  # the welcome, the status, that it is taken in
    router.may_take.clear()
    router.is_writing.clear()
    step()
    await router.is_writing.wait()
    step()
    scheduler.executor_lost("e", "fenced", is_crash=False)
    scheduler.stand_by("another one leads")
    router.may_take.set()
    with pytest.raises(_SteppedDownError):
        await writing
    assert not any(message.step_output.finished for message in router.taken)


# --- the other calls ----------------------------------------------------------------------------------


async def test_load_counts_what_runs_and_what_waits() -> None:
    async with running_shell(Limits(max_num_seqs=2, watermark=0.0, window=1)) as shell:
        executor = ObedientExecutor()
        async with serving_executor(executor, shell.executor_address):
            router = await shell.welcomed()
            executor.may_answer.clear()
            for handle in range(1, 6):
                await router.submit(handle, f"r{handle}", [1] * 10, 5)
            await until(lambda: executor.plans and len(shell.core.sequences) == 5)
            load = await shell.stub.GetLoad(scheduler_pb2.GetLoadRequest())
            assert (load.num_running, load.num_waiting, load.num_executors) == (1, 4, 1)
            assert load.num_waiting_tokens == 40
            assert load.num_blocks == toy_executor.NUM_BLOCKS
            assert load.num_free_blocks == load.num_blocks - 3
            executor.may_answer.set()
            await until(lambda: len(router.finished) == 5)
            await until(lambda: shell.core.is_idle)
            load = await shell.stub.GetLoad(scheduler_pb2.GetLoadRequest())
            assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
            assert load.num_free_blocks == load.num_blocks


async def test_a_watcher_sees_who_enters_and_who_leaves(shell: Shell, executor: ObedientExecutor) -> None:
    router = await shell.welcomed()
    call = shell.stub.Watch(router_pb2.WatchRequest())
    await until(lambda: shell.scheduler.watchers)
    await router.submit(1, "a", [1, 2], 3)
    summaries = []
    async for summary in call:
        summaries.append(summary)
        if summary.left:
            break
    call.cancel()
    assert [member.request_id for member in summaries[0].members] == ["a"]
    assert summaries[0].members[0].entered
    assert summaries[0].members[0].num_tokens == 2
    assert not summaries[1].members[0].entered
    assert [(leaver.request_id, leaver.reason) for leaver in summaries[-1].left] == [("a", LENGTH)]
    assert [summary.step_id for summary in summaries] == list(range(1, len(summaries) + 1))
    assert all(summary.executor_id == shell.executor_address for summary in summaries)
    await until(lambda: not shell.scheduler.watchers)


async def test_a_watcher_of_another_executor_sees_nothing(shell: Shell, executor: ObedientExecutor) -> None:
    router = await shell.welcomed()
    other = shell.stub.Watch(router_pb2.WatchRequest(executor_id="another"))
    mine = shell.stub.Watch(router_pb2.WatchRequest(executor_id=shell.executor_address))
    await until(lambda: len(shell.scheduler.watchers) == 2)
    await router.submit(1, "a", [1, 2], 3)
    await mine.read()
    assert all(
        watcher.queue.empty() for watcher in shell.scheduler.watchers if watcher.executor_id == "another"
    )
    other.cancel()
    mine.cancel()


async def test_a_follower_sees_every_step_and_who_enters_and_leaves(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    call = shell.stub.Follow(router_pb2.WatchRequest())
    await until(lambda: shell.scheduler.feed.has_readers)
    await router.submit(1, "a", [1, 2], 3)
    steps: list[scheduler_pb2.StepChange] = []
    async for message in call:
        assert message.newest.executor_id == shell.executor_address
        steps += message.steps
        if steps[-1].left:
            break
    call.cancel()
    assert [one.request_id for one in steps[0].entered] == ["a"]
    assert [(leaver.request_id, leaver.reason) for leaver in steps[-1].left] == [("a", LENGTH)]
    numbers = [step.step_id + i for step in steps for i in range(step.num_alike + 1)]
    assert numbers == list(range(1, len(numbers) + 1))
    await until(lambda: not shell.scheduler.feed.has_readers)


async def test_explain_names_a_request_of_which_nothing_is_known(shell: Shell) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="nothing is known of request 'a'") as error:
        await shell.stub.Explain(router_pb2.ExplainRequest(request_id="a"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_explain_knows_nothing_of_another_tenants_request(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    await router.submit(1, "a", [1, 2], 3, tenant="red")
    await until(lambda: executor.plans)
    answer = await shell.stub.Explain(router_pb2.ExplainRequest(request_id="a", tenant="red"))
    assert answer.entries
    for tenant in ("blue", ""):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await shell.stub.Explain(router_pb2.ExplainRequest(request_id="a", tenant=tenant))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


# --- leaving ------------------------------------------------------------------------------------------


async def test_a_scheduler_that_drains_finishes_what_it_has_and_takes_nothing_new(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    executor.may_answer.clear()
    await router.submit(1, "a", [1, 2], 10)
    await until(lambda: executor.plans)
    draining = asyncio.ensure_future(shell.scheduler.drained())
    await until(lambda: not router.statuses[-1].serving)
    assert "shutting down" in router.statuses[-1].reason
    await router.submit(2, "b", [1, 2], 10)
    await until(lambda: 2 in router.finished)
    assert router.finished[2].status_code == StatusCode.UNAVAILABLE
    assert not draining.done()
    executor.may_answer.set()
    await draining
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1, 2], 10)
