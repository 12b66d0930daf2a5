"""Executors that come, go, hang and lie, as the scheduler's loops and a router beside them see it."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from protos.v1 import executor_pb2, executor_pb2_grpc, router_pb2
from rpc.address import Address
from scheduler.loop import MAX_SUMMARIES_PENDING, ExecutorDirectory, Watcher, _resolved
from scheduler.policy import Limits
from tests.scheduler.shell import (
    ObedientExecutor,
    Router,
    Shell,
    expected_ids,
    running_shell,
    serving_executor,
    until,
)


async def _submit_some(shell: Shell, router: Router, num_tokens: int = 30) -> None:
    """Ten requests, all of them taken in."""
    for handle in range(1, 11):
        await router.submit(handle, f"r{handle}", [handle] * (1 + handle % 5), num_tokens)
    await until(lambda: shell.core._num_submitted == 10)


def _all_right(router: Router, num_tokens: int = 30) -> bool:
    return len(router.finished) == 10 and all(
        router.ids[handle] == expected_ids([handle] * (1 + handle % 5), num_tokens) for handle in range(1, 11)
    )


# --- an executor that comes and goes ------------------------------------------------------------------


async def test_a_restarted_executor_is_opened_again_and_every_output_is_right(shell: Shell) -> None:
    first = ObedientExecutor()
    async with serving_executor(first, shell.executor_address):
        router = await shell.welcomed()
        await _submit_some(shell, router)
        await until(lambda: len(first.plans) >= 5)
        first.may_answer.clear()
    second = ObedientExecutor()  # the same address, and it knows nothing
    async with serving_executor(second, shell.executor_address):
        await until(lambda: len(router.finished) == 10)
    assert _all_right(router)
    assert second.num_opened == 1
    assert len(router.started) == 10  # told once, not once for each executor


async def test_an_epoch_that_the_executor_lost_is_opened_again_without_waiting(
    shell: Shell, executor: ObedientExecutor
) -> None:
    router = await shell.welcomed()
    await _submit_some(shell, router)
    await until(lambda: len(executor.plans) >= 5)
    executor.epoch = None  # the next plan is answered FAILED_PRECONDITION
    await until(lambda: len(router.finished) == 10)
    assert _all_right(router)
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
    await _submit_some(shell, router)
    for _ in range(5):
        executor.num_cuts = 1
        await until(lambda: executor.num_cuts == 0 or len(router.finished) == 10)
    await until(lambda: len(router.finished) == 10)
    assert _all_right(router)
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
    await until(lambda: not shell.loop.is_serving)
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


@pytest.mark.parametrize("lie", [_ragged, _too_many_ids, _out_of_order, _unknown_row])
async def test_a_result_that_does_not_fit_ends_the_epoch_and_nothing_else(
    shell: Shell, executor: ObedientExecutor, lie: Any
) -> None:
    router = await shell.welcomed()
    await _submit_some(shell, router)
    await until(lambda: len(executor.plans) >= 5)
    opened = executor.num_opened
    executor.change = lie
    await until(lambda: executor.num_opened > opened)
    executor.change = lambda result: result
    await until(lambda: len(router.finished) == 10)
    assert _all_right(router)


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
    await server.start()
    try:
        router = await shell.welcomed()
        executor.may_answer.clear()
        await _submit_some(shell, router)
        executor.change = lambda _: b"\xff\xff\xff"
        executor.may_answer.set()
        await until(lambda: executor.num_opened >= 2)
        executor.change = lambda result: result
        await until(lambda: len(router.finished) == 10)
        assert _all_right(router)
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
    await until(lambda: shell.loop.is_serving)
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1, 2], 5)
    state = shell.core.executors[shell.executor_address]
    assert state.blocks.num_free == state.blocks.num_blocks


# --- who holds it -------------------------------------------------------------------------------------


async def test_an_executor_held_by_another_scheduler_is_waited_for_and_never_taken(
    shell: Shell, executor: ObedientExecutor
) -> None:
    channel = grpc.aio.insecure_channel(shell.executor_address)
    holder: Any = executor_pb2_grpc.ExecutorStub(channel)
    await until(lambda: executor.num_opened)
    opened = await holder.Open(executor_pb2.OpenRequest(scheduler_id="another", term=100))
    plans = holder.Execute()
    await plans.write(executor_pb2.BatchPlan(epoch=opened.epoch, step_id=1))
    await plans.read()
    router = await shell.connect()
    await until(
        lambda: (
            router.statuses
            and "belongs to another scheduler" in router.statuses[-1].reason
            and "another at 100" in router.statuses[-1].reason
        )
    )
    assert executor.holder == "another"
    plans.cancel()  # the holder goes
    await until(lambda: router.is_welcome)
    assert executor.holder == "this-scheduler"
    await router.submit(1, "a", [1], 3)
    await until(lambda: 1 in router.finished)
    await channel.close(None)


async def test_a_scheduler_that_was_fenced_off_gives_the_new_holder_time_to_open_its_stream(
    shell: Shell, executor: ObedientExecutor
) -> None:
    channel = grpc.aio.insecure_channel(shell.executor_address)
    holder: Any = executor_pb2_grpc.ExecutorStub(channel)
    router = await shell.welcomed()
    await router.submit(1, "a", [1], 60)
    await until(lambda: len(executor.plans) >= 2)
    executor.may_answer.clear()
    opened = await holder.Open(executor_pb2.OpenRequest(scheduler_id="another", term=100))
    plans = holder.Execute()
    executor.may_answer.set()
    await plans.write(executor_pb2.BatchPlan(epoch=opened.epoch, step_id=1))
    assert (await plans.read()).step_id == 1
    await until(lambda: not shell.loop.is_serving)
    assert executor.holder == "another"
    plans.cancel()
    await until(lambda: 1 in router.finished)
    assert router.ids[1] == expected_ids([1], 60)
    await channel.close(None)


# --- several executors --------------------------------------------------------------------------------


async def test_two_executors_share_the_work_and_one_may_go() -> None:
    async with running_shell(Limits(watermark=0.0, max_num_seqs=3)) as shell:
        other_address = shell.executor_address.replace("executor", "other")
        second_loop = asyncio.create_task(
            shell.executor_loop(Address.parse(other_address, field="--executor")).run()
        )
        shell.tasks.append(second_loop)
        first, second = ObedientExecutor(), ObedientExecutor()
        async with serving_executor(first, shell.executor_address):
            async with serving_executor(second, other_address):
                router = await shell.welcomed()
                await until(lambda: len(shell.core.executors) == 2)
                await _submit_some(shell, router, 60)
                await until(lambda: len(first.plans) > 3 and len(second.plans) > 3)
                second.may_answer.clear()
            await until(lambda: len(router.finished) == 10)
        assert _all_right(router, 60)
        assert router.statuses[-1].serving  # one was enough throughout


async def test_each_missing_executor_has_its_own_reason_and_says_it_once(shell: Shell) -> None:
    other = Address.parse("127.0.0.1:1", field="--executor")
    shell.tasks.append(asyncio.create_task(shell.executor_loop(other).run()))
    router = await shell.connect()
    await until(lambda: router.statuses and str(other) in router.statuses[-1].reason)
    await until(lambda: shell.executor_address in router.statuses[-1].reason)
    await asyncio.sleep(0.5)  # several attempts more
    assert str(other) in router.statuses[-1].reason
    assert len(router.statuses) <= 6


# --- the directory ------------------------------------------------------------------------------------


async def test_an_address_is_itself_and_a_name_is_every_address_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("executors", 50053)
        v4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("10.0.0.2", "10.0.0.1")]
        return [*v4, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0)), v4[0]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    plain = Address.parse("127.0.0.1:9", field="--executor")
    assert await _resolved(plain) == [plain]
    found = await _resolved(Address.parse("dns:///executors:50053", field="--executor"))
    assert found is not None
    assert [str(item) for item in found] == ["10.0.0.1:50053", "10.0.0.2:50053", "[fd00::1]:50053"]


@pytest.mark.parametrize("error", [socket.gaierror("no such name"), OSError("down"), UnicodeError("label")])
async def test_a_name_that_cannot_be_looked_up_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await _resolved(Address.parse("dns:///executors:1", field="--executor")) is None


class _Loop:
    """Stands for an ExecutorLoop: runs until cancelled, or fails."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_attached = False
        self.is_running = False
        self.fail = asyncio.Event()

    async def run(self) -> None:
        self.is_running = True
        try:
            await self.fail.wait()
            raise RuntimeError("the loop is broken")
        finally:
            self.is_running = False


def _directory(names: dict[str, list[str] | None], monkeypatch: pytest.MonkeyPatch) -> Any:
    loops: dict[str, _Loop] = {}

    async def resolved(address: Address) -> list[Address] | None:
        answer = names[str(address)]
        return None if answer is None else [Address.parse(item, field="x") for item in answer]

    def make(address: Address) -> Any:
        loops[str(address)] = _Loop(address)
        return loops[str(address)]

    monkeypatch.setattr("scheduler.loop._resolved", resolved)
    monkeypatch.setattr("scheduler.loop.RESOLVE_SECONDS", 0.01)
    return ExecutorDirectory([Address.parse(name, field="x") for name in names], make), loops


async def test_the_directory_follows_a_name_and_keeps_who_is_still_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, list[str] | None] = {"dns:///e:1": [], "10.1.1.1:1": ["10.1.1.1:1"]}
    directory, loops = _directory(names, monkeypatch)
    running = asyncio.create_task(directory.run())
    await until(lambda: set(loops) == {"10.1.1.1:1"})
    names["dns:///e:1"] = ["10.0.0.1:1", "10.0.0.2:1"]
    await until(lambda: len(loops) == 3)
    loops["10.0.0.1:1"].is_attached = True
    names["dns:///e:1"] = None  # the name server is away: nobody is given up
    await asyncio.sleep(0.05)
    assert all(loop.is_running for loop in loops.values())
    names["dns:///e:1"] = ["10.0.0.3:1"]
    await until(lambda: not loops["10.0.0.2:1"].is_running)
    assert loops["10.0.0.1:1"].is_running  # it still answers
    loops["10.0.0.1:1"].is_attached = False
    await until(lambda: not loops["10.0.0.1:1"].is_running)
    assert loops["10.1.1.1:1"].is_running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not any(loop.is_running for loop in loops.values())


async def test_a_loop_that_fails_ends_the_directory_and_the_other_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, loops = _directory({"10.0.0.1:1": ["10.0.0.1:1"], "10.0.0.2:1": ["10.0.0.2:1"]}, monkeypatch)
    running = asyncio.create_task(directory.run())
    await until(lambda: len(loops) == 2)
    await until(lambda: all(loop.is_running for loop in loops.values()))
    loops["10.0.0.1:1"].fail.set()
    with pytest.raises(RuntimeError, match="broken"):
        await running
    assert not loops["10.0.0.2:1"].is_running


# --- watchers -----------------------------------------------------------------------------------------


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
