"""Kind 1: while anything runs or waits, every step moves something, ends something or refuses something."""

import asyncio
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from tests.integration.prompts import ids_of, prompt, sized
from tests.rig import cluster
from tests.rig.client import DOORS, LENGTH, client_of
from tests.rig.cluster import Cluster
from tests.rig.oracle import Oracle
from tests.rig.quiet import check_all_leave, check_quiet
from tests.rig.scripted_executor import Fault, Script, expected_output
from tests.rig.watching import watching


@DOORS
async def test_b01_a_prompt_that_can_never_fit_is_refused_and_holds_nobody_back(
    door: str, tiny_model_folder: Path, tiny_oracle: Oracle
) -> None:
    with cluster.running(tiny_model_folder, executor_flags=("--num-blocks", "8")) as running:
        async with client_of(running) as client:
            too_big = asyncio.create_task(client.ask(door, sized(200, 8), 5))
            small = await client.ask(door, sized(10, 8, salt=1))
            with pytest.raises(grpc.aio.AioRpcError, match="128") as refusal:
                await too_big
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        tiny_oracle.check(prompt(10, salt=1), small.token_ids)
        check_quiet(running, tiny_oracle)
        check_all_leave(running)


async def test_b02_small_requests_do_not_overtake_a_big_one_for_ever(tiny_model_folder: Path) -> None:
    """The order is strict: who does not fit yet holds back those behind it."""
    script = Script(num_blocks=20, max_num_seqs=8, step_seconds=0.002)
    with cluster.running(tiny_model_folder, script=script) as running:
        async with client_of(running) as client:
            running_first = client.growing(sized(100, 28))
            await anext(running_first)
            big = client.growing(sized(230, 4, salt=1))
            await anext(big)
            small: list[asyncio.Task[object]] = []
            reading = asyncio.ensure_future(anext(big))  # the event behind Accepted: it has been admitted
            while not reading.done():
                small.append(asyncio.create_task(client.generate(sized(4, 4, salt=len(small) + 2))))
                await asyncio.wait([reading], timeout=0.004)
            answer = [answer async for answer in big][-1]
            await asyncio.gather(*small)
            assert [first async for first in running_first][-1].token_ids == expected_output(prompt(100), 28)
        assert answer.token_ids == expected_output(prompt(230, salt=1), 4)
        assert len(small) > 3
        steps = running.scripted().steps()
        admitted = [entry[2] for step in steps for entry in step["admitted"]]
        assert admitted[:2] == [100, 230]
        ended = next(i for i, step in enumerate(steps) if step["finished"])
        entered = next(i for i, step in enumerate(steps) if 230 in [entry[2] for entry in step["admitted"]])
        assert ended < entered <= ended + 50
        check_quiet(running)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
async def test_b03_requests_of_one_token_give_their_seats_back(
    max_num_seqs: int, tiny_model_folder: Path
) -> None:
    script = Script(max_num_seqs=max_num_seqs)
    with cluster.running(tiny_model_folder, script=script) as running:
        async with client_of(running) as client:
            for round_number in range(100):
                door = ["generate", "complete"][round_number % 2]
                three = [sized(5, 1, salt=3 * round_number + i) for i in range(3)]
                answers = await asyncio.gather(*(client.ask(door, message, 10) for message in three))
                for message, answer in zip(three, answers, strict=True):
                    assert answer.token_ids == expected_output(ids_of(message), 1)
                    assert answer.choice.reason == LENGTH
        check_quiet(running)
        check_all_leave(running)


@pytest.mark.parametrize("window", ["1", "2"])
async def test_b04_with_a_full_cache_no_two_steps_in_a_row_are_empty(
    window: str, tiny_model_folder: Path
) -> None:
    script = Script(num_blocks=12, step_seconds=0.01)  # all of them come before the first has ended
    flags = ("--window", window, "--watermark", "0", "--admission", "optimistic")
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        # Three fill nine blocks and want three more in one step; the fourth does not fit beside them.
        messages = [sized(48, 40, salt=i, request_id=f"r{i}") for i in range(3)]
        messages.append(sized(64, 8, salt=3, request_id="last"))
        with watching(running) as watcher:
            async with client_of(running) as client:
                answers = await asyncio.gather(*map(client.generate, messages))
            steps = await asyncio.to_thread(watcher.steps_until_gone, "last")
        for message, answer in zip(messages, answers, strict=True):
            assert answer.token_ids == expected_output(ids_of(message), message.sampling.max_tokens)
        empty = [not step.members and step.num_running + step.num_waiting > 0 for step in steps]
        assert not any(first and second for first, second in pairwise(empty))
        assert running.load().num_preemptions >= 1
        check_quiet(running)


@DOORS
async def test_b05_a_request_whose_step_failed_resumes_without_any_other_event(
    door: str, tiny_model_folder: Path
) -> None:
    script = Script(faults=(Fault(at_step=5, kind="fail"),))
    with cluster.running(tiny_model_folder, script=script) as running:
        async with client_of(running) as client:
            answer = await client.ask(door, sized(20, 30), 10)
        assert answer.token_ids == expected_output(prompt(20), 30)
        check_quiet(running)


async def single_requests_with_idle_between(running: Cluster, count: int) -> None:
    async with client_of(running) as client:
        for number in range(count):
            message = sized(3, 2, salt=number)
            answer = await client.ask(["generate", "complete"][number % 2], message, 1.0)
            assert answer.token_ids == expected_output(ids_of(message), 2)


async def test_b05_a_single_request_never_sleeps_until_another_comes(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        await single_requests_with_idle_between(running, 150)
        check_all_leave(running)


@pytest.mark.soak
async def test_b05_a_thousand_single_requests(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        await single_requests_with_idle_between(running, 1_000)
