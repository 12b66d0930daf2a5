import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift.step_driver import Epoch, ExecutorDriver, ended_by, tokens_by_sequence
from executor.config import ExecutorSettings
from executor.device_thread import DeviceThread
from executor.inputs import StepInputs
from executor.model import ModelError
from executor.rows import SampleRow
from executor.servicer import SERVICE_NAME, ExecutorServicer
from executor.serving import serve
from protos.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from rpc.address import Address
from rpc.channel import connect
from rpc.errors import StartError
from tests.rig.scripted_executor import Script, ScriptedRunner, expected_output, running

TIMEOUT_SECONDS = 20.0
SCRIPT = Script(max_num_seqs=8)


class GatedRunner(ScriptedRunner):
    """Each step waits for its gate, so that a test decides what happens meanwhile."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.gate = threading.Semaphore(0)
        self.is_gated = False
        self.started = threading.Semaphore(0)
        self.num_steps = 0
        self.fails = False
        self.is_lost = False

    def warm_up(self) -> None:
        if self.is_lost:
            raise RuntimeError("the device fell off the bus")

    def work_ahead(self) -> bool:
        return False

    def step(self, inputs: StepInputs, sample_rows: Sequence[SampleRow]) -> Any:
        self.num_steps += 1
        self.started.release()
        if self.is_gated:
            self.gate.acquire()
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(inputs, sample_rows)


@dataclass
class Bench:
    """A servicer in this process behind a real socket, and a driver."""

    runner: GatedRunner
    servicer: ExecutorServicer
    driver: ExecutorDriver
    channel: grpc.aio.Channel
    lost: list[BaseException] = field(default_factory=list)

    async def step_has_started(self) -> None:
        await asyncio.to_thread(self.runner.started.acquire)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    device = DeviceThread()
    lost: list[BaseException] = []
    servicer = ExecutorServicer(
        device,
        max_num_seqs=8,
        token_budget=lambda _: 64,
        max_window=2,
        grace_seconds=9.0,
        on_device_lost=lost.append,
    )
    server = grpc.aio.server()
    executor_pb2_grpc.add_ExecutorServicer_to_server(servicer, server)
    address = f"unix:{tmp_path}/executor.sock"
    server.add_insecure_port(address)
    await server.start()
    channel = connect(Address.parse(address, field="address"), max_message_bytes=1 << 20)
    runner = GatedRunner()
    servicer.ready(runner)
    driver = ExecutorDriver(channel, timeout_seconds=TIMEOUT_SECONDS)
    yield Bench(runner, servicer, driver, channel, lost)
    runner.gate.release(100)
    await channel.close(None)
    await server.stop(0)
    device.close()


def greedy(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)


def admitting(epoch: Epoch, prompt: list[int], max_tokens: int = 8) -> tuple[int, executor_pb2.BatchPlan]:
    new = epoch.new(prompt, greedy(max_tokens))
    return new.seq_id, epoch.plan({new.seq_id: len(prompt)}, admit=[new])


async def test_a_sequence_gets_its_tokens_and_timings(bench: Bench) -> None:
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        seq_id, plan = admitting(epoch, [1, 2, 3], max_tokens=3)
        output = []
        result = await stream.step(plan)
        while True:
            output += tokens_by_sequence(result)[seq_id]
            assert result.timings.total_us >= result.timings.inputs_us
            if result.finished:
                break
            result = await stream.step(epoch.plan({seq_id: 1}))
    assert output == expected_output([1, 2, 3], 3, SCRIPT)


async def test_b93_open_and_other_calls_answer_while_a_step_runs(bench: Bench) -> None:
    bench.runner.is_gated = True
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        await stream.send(admitting(epoch, [1, 2, 3])[1])
        await bench.step_has_started()
        refusal = await bench.driver.open_refused("b")
        assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
        bench.runner.gate.release()
        await stream.result()


@pytest.mark.parametrize("holder", ["node-0/unix:/a b", "zürich-1", "tab\tline\nend", "100 %41", "é" * 5000])
async def test_whatever_a_holder_is_called_a_refusal_names_it(bench: Bench, holder: str) -> None:
    await bench.driver.open(holder, term=7)
    refusal = await bench.driver.open_refused("other", term=6)
    assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
    assert refusal.held_by.removesuffix(" …") == holder[: len(refusal.held_by.removesuffix(" …"))] != ""
    assert len(holder) > 100 or refusal.held_by == holder
    assert refusal.held_at == "7"


async def test_a_duplicate_of_a_running_plan_is_answered_when_it_ends_and_not_run_again(bench: Bench) -> None:
    bench.runner.is_gated = True
    epoch = await bench.driver.open("a")
    _, plan = admitting(epoch, [1, 2, 3])
    async with epoch.stream() as older, epoch.stream() as newer:
        await older.send(plan)
        await bench.step_has_started()
        await newer.send(plan)
        assert (await older.end()).code is grpc.StatusCode.ABORTED
        bench.runner.gate.release()
        await newer.result()
    assert bench.runner.num_steps == 1


async def test_results_of_a_broken_stream_are_there_for_the_next_one(bench: Bench) -> None:
    bench.runner.is_gated = True
    epoch = await bench.driver.open("a")
    seq_id, first = admitting(epoch, [1, 2, 3])
    second = epoch.plan({seq_id: 1})
    async with epoch.stream() as stream:
        await stream.send(first)
        await stream.send(second)
        await bench.step_has_started()
    bench.runner.gate.release(2)
    await bench.step_has_started()
    async with epoch.stream() as stream:
        results = []
        for plan in (first, second):
            await stream.send(plan)
        for _ in range(2):
            results += tokens_by_sequence(await stream.result())[seq_id]
    assert results == expected_output([1, 2, 3], 2, SCRIPT)
    assert bench.runner.num_steps == 2


async def test_open_during_a_step_drops_its_result_and_what_waits_behind_it(bench: Bench) -> None:
    bench.runner.is_gated = True
    old = await bench.driver.open("a")
    async with old.stream() as stream:
        seq_id, plan = admitting(old, [1, 2, 3])
        await stream.send(plan)
        await stream.send(old.plan({seq_id: 1}))
        await bench.step_has_started()
        new = await bench.driver.open("a")
        assert (await stream.end()).code is grpc.StatusCode.FAILED_PRECONDITION
    async with new.stream() as stream:
        seq_id, plan = admitting(new, [4, 5], max_tokens=1)
        await stream.send(plan)
        bench.runner.gate.release(2)
        result = await stream.result()
    assert tokens_by_sequence(result)[seq_id] == expected_output([4, 5], 1, SCRIPT)
    assert bench.runner.num_steps == 2  # the old epoch's first, the new one's first


async def test_a_step_that_fails_ends_the_epoch_and_the_next_one_works(bench: Bench) -> None:
    bench.runner.fails = True
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        await stream.send(admitting(epoch, [1, 2, 3])[1])
        ended = await stream.end()
    assert ended.code is grpc.StatusCode.DATA_LOSS
    assert "step 1 failed: RuntimeError: out of memory" in ended.details
    assert bench.lost == []
    bench.runner.fails = False
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        await stream.step(admitting(epoch, [1, 2, 3])[1])


async def test_plans_behind_a_failed_one_are_not_run(bench: Bench) -> None:
    bench.runner.is_gated = True
    bench.runner.fails = True
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        seq_id, plan = admitting(epoch, [1, 2, 3])
        await stream.send(plan)
        await stream.send(epoch.plan({seq_id: 1}))
        await bench.step_has_started()
        bench.runner.gate.release(2)
        assert (await stream.end()).code is grpc.StatusCode.DATA_LOSS
    assert bench.runner.num_steps == 1


async def test_a_device_that_cannot_make_a_token_any_more_is_reported(bench: Bench) -> None:
    bench.runner.fails = bench.runner.is_lost = True
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        await stream.send(admitting(epoch, [1, 2, 3])[1])
        await stream.end()
    assert [str(error) for error in bench.lost] == ["the device fell off the bus"]


async def test_a_plan_that_disagrees_says_in_which_step_and_why(bench: Bench) -> None:
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        plan = admitting(epoch, [1, 2, 3])[1]
        plan.positions_sum = 4
        await stream.send(plan)
        ended = await stream.end()
    assert ended.code is grpc.StatusCode.DATA_LOSS
    assert ended.details.startswith("step 1: positions_sum is 4 in the plan and 0 here")


async def test_a_message_that_is_no_plan_is_refused(bench: Bench) -> None:
    await bench.driver.open("a")
    execute: Any = bench.channel.stream_stream("/chairlift.v1.Executor/Execute")
    call = execute()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert ended_by(error.value).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_first_open_ends_streams_that_were_there_before_it(bench: Bench) -> None:
    stub: Any = executor_pb2_grpc.ExecutorStub(bench.channel)
    early = stub.Execute(timeout=TIMEOUT_SECONDS)
    while not bench.servicer._calls:  # noqa: ASYNC110 - nothing tells a client that its stream is there
        await asyncio.sleep(0.01)
    await bench.driver.open("a")
    assert await early.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_scheduler_without_a_name_is_refused(bench: Bench) -> None:
    refusal = await bench.driver.open_refused("")
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "scheduler_id" in refusal.details


# --- leaving ----------------------------------------------------------------------------------------


async def test_draining_is_said_in_results_and_over_when_the_last_sequence_has_ended(bench: Bench) -> None:
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        seq_id, plan = admitting(epoch, [1, 2, 3], max_tokens=2)
        assert not (await stream.step(plan)).draining
        drain = asyncio.create_task(bench.servicer.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        result = await stream.step(epoch.plan({seq_id: 1}))
        assert (result.draining, len(result.finished)) == (True, 1)
        assert 0 < result.leaves_in_ms <= 9_000
        await drain
        assert (await stream.end()).code is grpc.StatusCode.UNAVAILABLE


async def test_draining_is_over_at_once_when_nobody_is_connected(bench: Bench) -> None:
    epoch = await bench.driver.open("a")
    async with epoch.stream() as stream:
        await stream.step(admitting(epoch, [1, 2, 3])[1])
        await stream.done_writing()
        assert (await stream.end()).code is grpc.StatusCode.OK
    await asyncio.wait_for(bench.servicer.drain(), TIMEOUT_SECONDS)


async def test_a_model_that_cannot_make_its_first_token_keeps_the_executor_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ScriptedRunner) -> None:
        raise ModelError("the first token could not be made: its logits are not numbers.")

    monkeypatch.setattr(ScriptedRunner, "warm_up", fail)
    settings = ExecutorSettings(model=tmp_path, listen=f"unix:{tmp_path}/executor.sock")
    with pytest.raises(StartError, match="the first token could not be made"):
        await serve(
            settings,
            lambda: ScriptedRunner(SCRIPT),
            max_num_seqs=8,
            token_budget=settings.token_budget,
            max_window=2,
        )


# --- a process --------------------------------------------------------------------------------------


async def test_b91_not_serving_and_unavailable_until_the_model_is_loaded(tmp_path: Path) -> None:
    with running(Script(load_seconds=3600), tmp_path, wait=False) as executor:
        channel = connect(Address.parse(executor.address, field="address"), max_message_bytes=1 << 20)
        async with channel:
            driver = ExecutorDriver(channel, timeout_seconds=TIMEOUT_SECONDS)
            refusal = await driver.open_refused("a")
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
        assert answer.status == answer.NOT_SERVING
        assert refusal.code is grpc.StatusCode.UNAVAILABLE
        assert "still loading" in refusal.details


async def test_a_terminated_process_without_work_ends_at_once_with_zero(tmp_path: Path) -> None:
    with running(SCRIPT, tmp_path) as executor:
        channel = connect(Address.parse(executor.address, field="address"), max_message_bytes=1 << 20)
        async with channel:
            epoch = await ExecutorDriver(channel, timeout_seconds=TIMEOUT_SECONDS).open("a")
            async with epoch.stream() as stream:
                await stream.step(epoch.plan())
                executor.terminate()
                assert (await stream.end()).code is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(executor.wait) == 0
