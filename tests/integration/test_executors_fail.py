"""Kinds 15 and 18 through real processes: executors die, freeze, are replaced, are killed by a request."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.prompts import ids_of, prompt, sized
from tests.rig import cluster
from tests.rig.client import Client, client_of
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet
from tests.rig.scripted_executor import RequestScript, Script, expected_output
from tests.rig.service_process import START_SECONDS

SCRIPT = Script(step_seconds=0.005)
EXECUTORS = ("executor", "second")
NUM_PROMPT_TOKENS, NUM_TOKENS = 100, 60


def start(running: Cluster, script: Script, *flags: str, executors: tuple[str, ...] = EXECUTORS) -> None:
    for name in executors:
        running.start_scripted_executor(script, name=name)
    running.start_scheduler(*flags, executors=executors)
    running.start_router()
    running.wait()


async def attached(running: Cluster, count: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while (await asyncio.to_thread(running.load)).num_executors != count:  # noqa: ASYNC110 - seen through a door
            await asyncio.sleep(0.02)


async def after_some_tokens(client: Client, count: int) -> "list[asyncio.Task[list[int]]]":
    """So many streams, each with five tokens at least, that go on by themselves."""
    begun = [asyncio.Event() for _ in range(count)]

    async def read(salt: int) -> list[int]:
        ids: list[int] = []
        async for answer in client.growing(sized(NUM_PROMPT_TOKENS, NUM_TOKENS, salt=salt)):
            ids = answer.token_ids
            if len(ids) >= 5:
                begun[salt].set()
        return ids

    tasks = [asyncio.create_task(read(salt)) for salt in range(count)]
    async with asyncio.timeout(30):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def all_right(tasks: "list[asyncio.Task[list[int]]]") -> None:
    for salt, ids in enumerate(await asyncio.gather(*tasks)):
        assert ids == expected_output(prompt(NUM_PROMPT_TOKENS, salt), NUM_TOKENS)


async def test_b106_b107_after_an_executor_is_killed_the_other_one_goes_on_token_by_token(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        start(running, SCRIPT)
        await attached(running, 2)
        async with client_of(running) as client:
            tasks = await after_some_tokens(client, 8)
            running.kill("second")
            # New ones do not go to the dead one and are not refused.
            messages = [sized(6, 10, salt=50 + salt) for salt in range(8)]
            for message, answer in zip(
                messages, await asyncio.gather(*map(client.generate, messages)), strict=True
            ):
                assert answer.token_ids == expected_output(ids_of(message), 10)
            await all_right(tasks)
        await attached(running, 1)
        running.restart("second")
        await attached(running, 2)
        check_quiet(running)


async def test_b105_a_frozen_executor_loses_its_work_and_changes_nothing_when_it_thaws(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        start(running, SCRIPT, "--step-timeout", "1")
        await attached(running, 2)
        frozen = running.process("second").pid
        async with client_of(running) as client:
            tasks = await after_some_tokens(client, 8)
            os.kill(frozen, signal.SIGSTOP)
            try:
                await all_right(tasks)
                await attached(running, 1)
            finally:
                os.kill(frozen, signal.SIGCONT)
            await attached(running, 2)
            await all_right(await after_some_tokens(client, 8))
        check_quiet(running)


async def test_b92_with_no_executor_left_health_follows_and_streams_wait_for_one(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        start(running, SCRIPT, executors=("executor",))
        async with client_of(running) as client:
            tasks = await after_some_tokens(client, 4)
            running.kill("executor")
            killed = time.monotonic()
            check = health_pb2_grpc.HealthStub(running.channel("router")).Check
            while (
                check(health_pb2.HealthCheckRequest(), timeout=5).status
                == health_pb2.HealthCheckResponse.SERVING
            ):
                assert time.monotonic() < killed + 10
                await asyncio.sleep(0.02)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await client.generate(sized(5, 5), 5)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not any(task.done() for task in tasks)
            running.restart("executor")
            await all_right(tasks)
        check_quiet(running)


async def test_b92_without_one_they_end_unavailable_with_what_they_had(tiny_model_folder: Path) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        start(running, SCRIPT, "--recovery-timeout", "0", executors=("executor",))
        async with client_of(running) as client:
            tasks = await after_some_tokens(client, 4)
            running.kill("executor")
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        codes = {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)}
        assert codes == {grpc.StatusCode.UNAVAILABLE}
        assert len(ends) == 4
        running.restart("executor")
        running.wait()
        await attached(running, 1)
        check_quiet(running)


async def test_one_alone_whose_executor_is_killed_again_and_again_is_not_taken_for_the_reason(
    tiny_model_folder: Path,
) -> None:
    """Three more times, each while it computes again what it had."""
    script = Script(step_seconds=0.005, token_seconds=0.002)
    with cluster.assembling(tiny_model_folder) as running:
        start(running, script, "--reattach-seconds", "0.1", executors=("executor",))
        async with client_of(running) as client:
            tasks = await after_some_tokens(client, 1)
            for _ in range(4):
                running.kill("executor")
                await attached(running, 0)
                running.restart("executor")
                await attached(running, 1)
            await all_right(tasks)
        check_quiet(running)


@contextlib.asynccontextmanager
async def restarting(running: Cluster, name: str) -> AsyncIterator[list[float]]:
    """What an operator's supervisor does: whenever the process has died it is started again."""
    deaths: list[float] = []

    async def watch() -> None:
        while True:
            if running.process(name).exit_code is not None:
                deaths.append(time.monotonic())
                running.kill(name)
                await asyncio.to_thread(running.restart, name)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield deaths
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_kills_executors_ends_alone_and_everybody_else_ends_right(
    tiny_model_folder: Path,
) -> None:
    poison = prompt(9, salt=200)
    script = Script(step_seconds=0.005, requests=(RequestScript(prompt=tuple(poison), deadly=True),))
    with cluster.assembling(tiny_model_folder) as running:
        start(running, script, "--reattach-seconds", "0.1", executors=("executor",))
        async with restarting(running, "executor") as deaths, client_of(running) as client:
            tasks = await after_some_tokens(client, 3)
            with pytest.raises(grpc.aio.AioRpcError, match="the-poison") as failure:
                await client.generate(sized(9, 10, salt=200, request_id="the-poison"), 100)
            assert failure.value.code() is grpc.StatusCode.INTERNAL
            await all_right(tasks)
            assert len(deaths) <= 4  # log2(4) + 2
            await attached(running, 1)
        check_quiet(running)
