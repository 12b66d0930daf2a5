"""Kind 16 through real processes: beyond a stated amount the answer is no, at once, and says when to come."""

import asyncio
import contextlib
import itertools
import os
import signal
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.integration.prompts import prompt, sized
from tests.integration.test_many_give_up import resident_bytes
from tests.rig import cluster
from tests.rig.client import Answer, Client, client_of
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_all_leave, check_quiet, wait_until_idle
from tests.rig.scripted_executor import Script, expected_output

NUM_SEATS, NUM_QUEUED = 4, 10
PATIENT = ("--step-timeout", "600")  # with an executor that stands still
SLOW = Script(step_seconds=0.01, max_num_seqs=NUM_SEATS)
MAX_GROWTH_BYTES = 50 * 2**20


def retry_seconds(refusal: grpc.aio.AioRpcError) -> float:
    """What the refusal says of when to come again; it must be one for load, and say so."""
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, refusal
    status = rpc_status.from_call(refusal)  # type: ignore[arg-type]  # it has what a call has
    assert status is not None
    retry_info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry_info) for detail in status.details)
    return retry_info.retry_delay.ToTimedelta().total_seconds()


async def all_at_once(client: Client, lengths: list[int], max_tokens: int) -> list[Answer | BaseException]:
    return await asyncio.gather(*asked(client, lengths, max_tokens), return_exceptions=True)


def asked(client: Client, lengths: list[int], max_tokens: int) -> "list[asyncio.Task[Answer]]":
    return [
        asyncio.create_task(client.generate(sized(length, max_tokens, salt=salt)))
        for salt, length in enumerate(lengths)
    ]


async def storm(
    running: Cluster, client: Client, lengths: list[int], max_tokens: int, num_refused: int
) -> list[Answer | BaseException]:
    """All at once, while the executor stands still: it goes on when so many are refused."""
    os.kill(running.process("executor").pid, signal.SIGSTOP)
    try:
        tasks = asked(client, lengths, max_tokens)
        async with asyncio.timeout(60):
            for _, refused in zip(range(num_refused), asyncio.as_completed(tasks), strict=False):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await refused
    finally:
        os.kill(running.process("executor").pid, signal.SIGCONT)
    return await asyncio.gather(*tasks, return_exceptions=True)


def taken(outcomes: list[Answer | BaseException], lengths: list[int], max_tokens: int) -> int:
    """How many were answered, and rightly; the others were refused for load and told when to come again."""
    num_taken = 0
    for salt, (outcome, length) in enumerate(zip(outcomes, lengths, strict=True)):
        if isinstance(outcome, Answer):
            assert outcome.token_ids == expected_output(prompt(length, salt), max_tokens)
            num_taken += 1
        else:
            assert isinstance(outcome, grpc.aio.AioRpcError), outcome
            assert 0 < retry_seconds(outcome) <= 60
    return num_taken


@pytest.mark.parametrize("num_requests", [200, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_b94_a_storm_fills_seats_and_queue_and_the_rest_is_refused(
    num_requests: int, tiny_model_folder: Path
) -> None:
    flags = ("--max-queued", str(NUM_QUEUED), *PATIENT)
    num_taken = NUM_SEATS + NUM_QUEUED
    with cluster.running(tiny_model_folder, script=SLOW, scheduler_flags=flags) as running:
        lengths = [5] * num_requests
        async with client_of(running) as client:
            before = {name: resident_bytes(running, name) for name in ("router", "scheduler")}
            outcomes = await storm(running, client, lengths, 9, num_requests - num_taken)
            assert taken(outcomes, lengths, 9) == num_taken
            for name, size in before.items():
                assert resident_bytes(running, name) - size < MAX_GROWTH_BYTES
        check_quiet(running)
        check_all_leave(running)


async def test_b95_a_limit_of_queued_tokens_counts_them_and_comes_back_to_nothing(
    tiny_model_folder: Path,
) -> None:
    length, num_waiting = 1_000, 8
    script = Script(max_num_seqs=1, max_num_batched_tokens=2_048, max_seq_len=16_384, step_seconds=0.005)
    flags = ("--max-queued-tokens", str(num_waiting * length + length // 2), *PATIENT)
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            first = client.growing(sized(10, 400))
            while not (await anext(first)).token_ids:
                pass
            lengths = [length] * 40
            outcomes = await storm(running, client, lengths, 2, 40 - num_waiting)
            await first.aclose()
            assert taken(outcomes, lengths, 2) == num_waiting
            lengths = [length] * num_waiting
            assert taken(await all_at_once(client, lengths, 2), lengths, 2) == num_waiting
            with pytest.raises(grpc.aio.AioRpcError, match="the whole queue at most 8500") as refusal:
                await client.generate(sized(9_000, 2))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        check_quiet(running)


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.soak)])
async def test_b96_after_a_storm_of_calls_that_time_out_nobody_is_refused(
    seconds: float, tiny_model_folder: Path
) -> None:
    flags = ("--max-queued", str(NUM_QUEUED))
    with cluster.running(tiny_model_folder, script=SLOW, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            codes: set[grpc.StatusCode] = set()
            salts = itertools.count()

            async def keep_asking() -> None:
                while True:
                    try:
                        await client.generate(sized(5, 40, salt=next(salts)), timeout_seconds=0.6)
                    except grpc.aio.AioRpcError as error:
                        codes.add(error.code())
                        await asyncio.sleep(0.05)

            storm = [asyncio.create_task(keep_asking()) for _ in range(40)]
            await asyncio.wait(storm, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in storm:
                task.cancel()
            ends = await asyncio.gather(*storm, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
            assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
            wait_until_idle(running)
            lengths = [5] * (NUM_SEATS + NUM_QUEUED)
            assert taken(await all_at_once(client, lengths, 10), lengths, 10) == len(lengths)
        check_quiet(running)
        check_all_leave(running)
