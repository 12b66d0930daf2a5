"""One executor's life: held by others, fenced, missing, coming and going."""

import asyncio
from typing import Any

import grpc
from structlog.testing import capture_logs

from protos.v1 import executor_pb2, executor_pb2_grpc
from rpc.address import Address
from scheduler.policy import Limits
from tests.scheduler.shell import (
    ObedientExecutor,
    Shell,
    all_right,
    expected_ids,
    running_shell,
    serving_executor,
    submit_some,
    until,
)

# --- who holds it -------------------------------------------------------------------------------------


async def test_an_executor_held_by_another_scheduler_is_waited_for_and_never_taken(
    shell: Shell, executor: ObedientExecutor
) -> None:
    channel = grpc.aio.insecure_channel(shell.executor_address)
    holder: Any = executor_pb2_grpc.ExecutorStub(channel)
    # A stream that comes after another has opened it says nothing of whose it is before it brings a plan.
    await until(lambda: executor.streams)
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
    await until(lambda: not shell.scheduler.is_serving)
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
                await submit_some(shell, router, 60)
                await until(lambda: len(first.plans) > 3 and len(second.plans) > 3)
                second.may_answer.clear()
            await until(lambda: len(router.finished) == 10)
        assert all_right(router, 60)
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


async def test_the_log_tells_how_many_seats_an_executor_has() -> None:
    with capture_logs() as logs:
        async with (
            running_shell(Limits(watermark=0.0, max_num_batched_tokens=3)) as shell,
            serving_executor(ObedientExecutor(), shell.executor_address),
        ):
            await until(lambda: shell.core.executors)
    (entry,) = [entry for entry in logs if entry["event"] == "executor_attached"]
    assert entry["max_num_seqs"] > entry["num_seats"] == 3
