"""A call that is cancelled or late gives back what it holds, whatever kind of call and wherever it is."""

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.client import DOORS, client_of
from tests.rig.quiet import check_all_leave, check_quiet, wait_until_idle
from tests.rig.scripted_executor import Fault, Script, expected_output

SLOW = Script(step_seconds=0.005)
GIVEN_BACK_SECONDS = 1.0


@DOORS
async def test_b25_a_cancelled_call_gives_its_blocks_back_within_a_second(
    door: str, tiny_model_folder: Path
) -> None:
    with cluster.running(tiny_model_folder, script=SLOW) as running:
        async with client_of(running) as client:
            call = asyncio.create_task(client.ask(door, sized(40, 2_000)))
            await until_running(running, 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            wait_until_idle(running, GIVEN_BACK_SECONDS)
        num_steps = running.load().num_steps
        check_quiet(running)
        assert num_steps < 500, "it did not go on"
        check_all_leave(running)


async def test_b26_a_queued_request_whose_client_has_left_is_never_computed(tiny_model_folder: Path) -> None:
    flags = ("--max-num-seqs", "1")
    with cluster.running(tiny_model_folder, script=SLOW, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            first = asyncio.create_task(client.generate(sized(10, 60)))
            await until_running(running, 1)
            leaving = [
                asyncio.create_task(client.ask(door, sized(20 + i, 5)))
                for i, door in enumerate(["generate", "complete"])
            ]
            staying = client.growing(sized(30, 5))
            await anext(staying)
            for call in leaving:
                call.cancel()
            await asyncio.wait(leaving)
            assert [answer async for answer in staying][-1].token_ids == expected_output(prompt(30), 5)
            await first
        admitted = [entry[2] for step in running.scripted().steps() for entry in step["admitted"]]
        assert admitted == [10, 30]
        check_quiet(running)


@DOORS
async def test_b83_deadlines_are_kept_for_the_waiting_and_the_running(
    door: str, tiny_model_folder: Path
) -> None:
    flags = ("--max-num-seqs", "1")
    with cluster.running(tiny_model_folder, script=SLOW, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            first = client.growing(sized(10, 2_000))
            await anext(first)
            waiting = [client.ask(door, sized(20, 5, salt=i), 0.3) for i in range(20)]
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(is_late(outcome) for outcome in outcomes)
            await first.aclose()
            wait_until_idle(running, GIVEN_BACK_SECONDS)
            computed = [entry[2] for step in running.scripted().steps() for entry in step["admitted"]]
            assert computed == [10], "nothing of those that only waited is computed"
            (outcome,) = await asyncio.gather(client.ask(door, sized(20, 2_000), 0.3), return_exceptions=True)
            assert is_late(outcome)
            wait_until_idle(running, GIVEN_BACK_SECONDS)
            assert is_late(
                (await asyncio.gather(client.ask(door, sized(20, 5), 0.0), return_exceptions=True))[0]
            )
        check_quiet(running)
        check_all_leave(running)


async def test_b83_the_server_ends_a_call_at_its_deadline_by_itself(tiny_model_folder: Path) -> None:
    """Even when the executor hangs, and no step comes to notice it."""
    script = Script(faults=(Fault(at_step=3, kind="stall", seconds=3.0),))
    with cluster.running(tiny_model_folder, script=script) as running:
        async with client_of(running) as client:
            (outcome,) = await asyncio.gather(client.generate(sized(5, 50), 0.5), return_exceptions=True)
        assert is_late(outcome)
        wait_until_idle(running, GIVEN_BACK_SECONDS)


def is_late(outcome: object) -> bool:
    return isinstance(outcome, grpc.aio.AioRpcError) and outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def until_running(running: cluster.Cluster, num_running: int) -> None:
    async with asyncio.timeout(10):
        while (await asyncio.to_thread(running.load)).num_running < num_running:
            pass
