"""Driving one executor: lost streams, lost epochs, results that do not fit."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from protos.v1 import executor_pb2
from scheduler.core import SchedulerCore
from scheduler.epoch import Epoch, Loss
from scheduler.executor_client import ExecuteStream, ExecutorUnreachableError, HeldError, Opened
from scheduler.plan import StepResult
from scheduler.policy import Limits
from scheduler.running_scheduler import RunningScheduler
from scheduler.sequence import Request, State
from tests.rig import toy_executor
from tests.rig.checking_executor import capacity
from tests.scheduler.shell import (
    ObedientExecutor,
    Shell,
    all_right,
    expected_ids,
    serving_executor,
    submit_some,
    until,
)

# --- an executor that comes and goes ------------------------------------------------------------------


async def test_a_restarted_executor_is_opened_again_and_every_output_is_right(shell: Shell) -> None:
    first = ObedientExecutor()
    async with serving_executor(first, shell.executor_address):
        router = await shell.welcomed()
        await submit_some(shell, router)
        await until(lambda: len(first.plans) >= 5)
        first.may_answer.clear()
    second = ObedientExecutor()  # the same address, and it knows nothing
    async with serving_executor(second, shell.executor_address):
        await until(lambda: len(router.finished) == 10)
    assert all_right(router)
    assert second.num_opened == 1
    assert len(router.started) == 10  # told once, not once for each executor


async def test_an_epoch_that_the_executor_lost_is_opened_again_without_waiting(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    await submit_some(shell, router)
    await until(lambda: len(executor.plans) >= 5)
    executor.epoch = None  # the next plan is answered FAILED_PRECONDITION
    await until(lambda: len(router.finished) == 10)
    assert all_right(router)
    assert executor.num_opened == 2


async def test_a_status_that_came_while_no_plan_was_on_its_way_is_read_too(
    shell: Shell, executor: ObedientExecutor
) -> None:
    """The stream ends while the scheduler sleeps; the next write finds a call that is over."""
    router = await shell.welcomed()
    await router.submit(1, "a", [1], 3)
    await until(lambda: 1 in router.finished)
    executor.epoch = None
    executor.end_streams(grpc.StatusCode.FAILED_PRECONDITION, before=executor.next_stream)
    await router.submit(2, "b", [1], 3, accepted_before=True)
    await until(lambda: 2 in router.finished)
    assert router.ids[2] == expected_ids([1], 3)


async def test_a_stream_cut_in_the_same_epoch_costs_nothing(shell: Shell, executor: ObedientExecutor) -> None:
    router = await shell.welcomed()
    await submit_some(shell, router)
    for _ in range(5):
        executor.num_cuts = 1
        await until(lambda: executor.num_cuts == 0 or len(router.finished) == 10)
    await until(lambda: len(router.finished) == 10)
    assert all_right(router)
    assert executor.num_opened == 1
    assert executor.num_executed >= 3
    by_step: dict[int, executor_pb2.BatchPlan] = {}
    for plan in executor.plans:  # what came again came byte for byte
        assert by_step.setdefault(plan.step_id, plan) == plan


async def test_an_executor_that_stays_away_is_lost_and_the_router_is_told(shell: Shell) -> None:
    executor = ObedientExecutor()
    async with serving_executor(executor, shell.executor_address):
        router = await shell.welcomed()
        executor.may_answer.clear()
        await router.submit(1, "a", [1, 2], 9)
        await until(lambda: executor.plans)
    await until(lambda: not shell.scheduler.is_serving)
    assert shell.serving[-1][0] is False
    await until(lambda: not router.statuses[-1].serving)
    await until(lambda: shell.executor_address in router.statuses[-1].reason)
    async with serving_executor(ObedientExecutor(), shell.executor_address):
        await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1, 2], 9)


async def test_b05_single_requests_after_idleness_never_sleep(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    for handle in range(1, 101):
        await router.submit(handle, f"r{handle}", [handle % 90], 2)
        await until(lambda: handle in router.finished)  # noqa: B023 - awaited within its round
    assert shell.core.is_idle


async def test_a_draining_executor_ends_serving_and_what_runs_goes_on(
    shell: Shell, executor: ObedientExecutor
) -> None:
    def drain(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        result.draining = True
        return result

    router = await shell.welcomed()
    executor.change = drain
    await router.submit(1, "a", [1, 2], 9)
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1, 2], 9)
    await until(lambda: not router.statuses[-1].serving)
    assert "draining" in router.statuses[-1].reason


@pytest.mark.parametrize("is_draining", [True, False])
async def test_one_that_goes_while_it_drains_has_not_crashed(shell: Shell, is_draining: bool) -> None:
    def answer(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        result.draining = is_draining
        return result

    first = ObedientExecutor()
    first.change = answer
    async with serving_executor(first, shell.executor_address):
        router = await shell.welcomed()
        await router.submit(1, "a", [1, 2], 60)
        await until(lambda: len(first.plans) >= 5)
        first.may_answer.clear()  # it goes in the middle of a step
    async with serving_executor(ObedientExecutor(), shell.executor_address):
        await until(lambda: shell.core.counters.executors_left + shell.core.counters.executors_crashed == 1)
        assert shell.core.counters.executors_crashed == (0 if is_draining else 1)
        assert bool(shell.core.inquiry) == (not is_draining)


# --- an executor that takes nothing -------------------------------------------------------------------


class DeafStream:
    """To a process that stands still: a plan larger than what lies on the way holds its writer up.

    So it does after the call was cancelled, or has ended: the bytes have still to go.
    """

    def __init__(self, end: Exception | None) -> None:
        self._end = end
        self._is_writing = asyncio.Event()

    async def connected(self) -> None:
        pass

    async def send(self, _: bytes) -> None:
        self._is_writing.set()
        await asyncio.Event().wait()

    async def results(self) -> AsyncIterator[StepResult]:
        await self._is_writing.wait()
        if self._end is None:
            await asyncio.Event().wait()
        else:
            raise self._end
        yield  # type: ignore[misc]  # never

    def cancel(self) -> None:
        pass


async def _loss_of(stream: DeafStream) -> Loss:
    core = SchedulerCore(Limits())
    scheduler = RunningScheduler(core, on_serving=lambda serving, reason: None)
    wake = asyncio.Event()
    scheduler.executor_attached("e", Opened(1, 1, capacity()), wake)
    core.submit(Request(b"k" * 16, "a", array("I", [1, 2]), b"", 5), now=scheduler.now())
    epoch = Epoch(scheduler, "e", wake, reattach_seconds=0.1, step_timeout_seconds=0.01)
    async with asyncio.timeout(20):
        return await epoch.run(lambda: cast(ExecuteStream, stream))


async def test_an_executor_that_takes_nothing_is_found_out_though_its_writer_is_held_up() -> None:
    loss = await _loss_of(DeafStream(None))
    assert loss.is_late
    assert "the executor hangs" in loss.reason


async def test_the_end_of_a_stream_is_seen_though_its_writer_is_held_up() -> None:
    held = HeldError("another scheduler has it", "new", 7)
    assert (await _loss_of(DeafStream(held))).held is held


class DeadStream:
    """To nobody: the call has begun, and nobody has answered yet."""

    def __init__(self) -> None:
        self.num_begun = 0

    async def connected(self) -> None:
        self.num_begun += 1
        await asyncio.Event().wait()

    async def results(self) -> AsyncIterator[StepResult]:
        await asyncio.sleep(0.01)
        raise ExecutorUnreachableError("nobody answers")
        yield  # never

    def cancel(self) -> None:
        pass


async def test_nothing_is_planned_for_an_executor_that_is_not_connected_again() -> None:
    """Else it waited there while others could compute it, and was found guilty of two deaths it never saw."""
    core = SchedulerCore(Limits())
    scheduler = RunningScheduler(core, on_serving=lambda serving, reason: None)
    stream = DeadStream()
    for executor_id in ("a", "b"):
        wake = asyncio.Event()
        scheduler.executor_attached(executor_id, Opened(1, 1, capacity()), wake)
        epoch = Epoch(scheduler, executor_id, wake, reattach_seconds=0.1, step_timeout_seconds=60.0)
        seq = core.submit(Request(b"k" * 16, "a", array("I", [1, 2]), b"", 5), now=scheduler.now())
        before = stream.num_begun
        async with asyncio.timeout(20):
            loss = await epoch.run(lambda: cast(ExecuteStream, stream))
        assert stream.num_begun > before + 1
        assert (loss.is_crash, seq.state) == (True, State.WAITING)
        scheduler.executor_lost(executor_id, loss.reason, is_crash=True)
    assert not core.inquiry


# --- an executor that lies ----------------------------------------------------------------------------


def _ragged(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
    result.num_sampled.append(1)
    return result


def _too_many_ids(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
    result.token_ids.append(3)
    return result


def _out_of_order(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
    result.step_id += 1
    return result


def _unknown_row(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
    result.seq_ids.append(999)
    result.num_sampled.append(0)
    return result


def _no_such_id(result: executor_pb2.StepResult) -> executor_pb2.StepResult:
    result.token_ids[:1] = [toy_executor.VOCAB] * len(result.token_ids[:1])
    return result


@pytest.mark.parametrize("lie", [_ragged, _too_many_ids, _out_of_order, _unknown_row, _no_such_id])
async def test_a_result_that_does_not_fit_ends_the_epoch_and_nothing_else(
    shell: Shell, executor: ObedientExecutor, lie: Any
) -> None:
    router = await shell.welcomed()
    await submit_some(shell, router)
    await until(lambda: len(executor.plans) >= 5)
    opened = executor.num_opened
    executor.change = lie
    await until(lambda: executor.num_opened > opened)
    assert shell.core.counters.executors_crashed == 1  # and some of those who rode are suspects
    executor.change = lambda result: result
    await until(lambda: len(router.finished) == 10)
    assert all_right(router)


async def test_bytes_that_are_no_result_end_the_epoch_and_nothing_else(shell: Shell) -> None:
    executor = ObedientExecutor()
    server = grpc.aio.server()
    handlers = {
        "Open": grpc.unary_unary_rpc_method_handler(
            executor.Open,
            executor_pb2.OpenRequest.FromString,
            executor_pb2.OpenResponse.SerializeToString,
        ),
        "Execute": grpc.stream_stream_rpc_method_handler(
            executor.Execute,
            executor_pb2.BatchPlan.FromString,
            lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        ),
    }
    service = "chairlift.v1.Executor"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    server.add_insecure_port(shell.executor_address)
    try:
        await server.start()
        router = await shell.welcomed()
        executor.may_answer.clear()
        await submit_some(shell, router)
        executor.change = lambda _: b"\xff\xff\xff"
        executor.may_answer.set()
        await until(lambda: executor.num_opened >= 2)
        assert shell.core.counters.executors_crashed == 1
        executor.change = lambda result: result
        await until(lambda: len(router.finished) == 10)
        assert all_right(router)
    finally:
        await server.stop(0)


async def test_an_executor_that_breaks_every_epoch_is_not_asked_in_a_spin(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    executor.change = _ragged
    await router.submit(1, "a", [1], 5)
    await until(lambda: executor.num_opened >= 3)
    assert executor.num_opened <= 4
    assert len(executor.plans) <= 4 * 2
    executor.change = lambda result: result
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1], 5)


@pytest.mark.parametrize(
    "name", ["epoch", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_window"]
)
async def test_an_executor_that_offers_nothing_is_not_attached(
    shell: Shell, executor: ObedientExecutor, name: str
) -> None:
    executor.offer = lambda response: setattr(response, name, 0)
    router = await shell.connect()
    await until(lambda: any(f"its {name} is 0" in status.reason for status in router.statuses))
    assert not shell.core.executors
    executor.offer = lambda response: None
    await until(lambda: router.is_welcome)


async def test_blocks_that_nobody_owns_and_that_are_not_free_are_cured_by_a_new_epoch(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    shell.core.executors[shell.executor_address].blocks.allocate(1)  # leaked
    await router.submit(1, "a", [1, 2], 5)
    await until(lambda: executor.num_opened == 2)
    await until(lambda: shell.scheduler.is_serving)
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1, 2], 5)
    state = shell.core.executors[shell.executor_address]
    assert state.blocks.num_free == state.blocks.num_blocks
