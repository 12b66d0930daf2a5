"""Kind 6 through real processes: giving up leaves nothing that adds up. The long forms are soak."""

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.v1 import common_pb2, scheduler_pb2
from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.client import Client, client_of
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_all_leave, check_quiet, wait_until_idle
from tests.rig.scripted_executor import Script, expected_output

STREAMS, TOKENS_READ = 8, 3
CLOSE_SECONDS = 30.0
SERVICES = ("executor", "scheduler", "router")


def num_open_files(running: Cluster) -> dict[str, int]:
    return {name: len(list(Path(f"/proc/{running.process(name).pid}/fd").iterdir())) for name in SERVICES}


def num_open_when_quiet(running: Cluster) -> dict[str, int]:
    """The look itself opens a connection to each process the first time."""
    check_quiet(running)
    return num_open_files(running)


def resident_bytes(running: Cluster, name: str) -> int:
    pages = Path(f"/proc/{running.process(name).pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def read_and_leave(client: Client, salt: int) -> float:
    """Reads a few tokens and drops the stream; the seconds to the first one."""
    started = time.monotonic()
    first = 0.0
    stream = client.growing(sized(20, 1000, salt=salt))
    async for answer in stream:
        if answer.token_ids and not first:
            first = time.monotonic() - started
        if len(answer.token_ids) >= TOKENS_READ:
            break
    await stream.aclose()
    return first


async def abort_rounds(client: Client, num_rounds: int) -> list[float]:
    """The median seconds to the first token of each round."""
    medians = []
    salts = itertools.count()
    for _ in range(num_rounds):
        firsts = await asyncio.gather(*(read_and_leave(client, next(salts)) for _ in range(STREAMS)))
        medians.append(statistics.median(firsts))
    return medians


async def aborting_leaves_no_file_open(running: Cluster, num_rounds: int) -> list[float]:
    """Over one connection: how soon another one's end is seen is the library's affair."""
    async with client_of(running) as client:
        await abort_rounds(client, 2)
        before = await asyncio.to_thread(num_open_when_quiet, running)
        medians = await abort_rounds(client, num_rounds)
        await asyncio.to_thread(check_quiet, running)
        async with asyncio.timeout(CLOSE_SECONDS):
            while any(count > before[name] for name, count in num_open_files(running).items()):
                await asyncio.to_thread(check_quiet, running)
    return medians


async def test_b27_aborted_streams_leave_no_file_and_no_block(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        await aborting_leaves_no_file_open(running, 20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_b27_a_thousand_rounds_of_aborted_streams_slow_nothing_down(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        medians = await aborting_leaves_no_file_open(running, 1000)
        assert statistics.median(medians[-50:]) <= 1.5 * statistics.median(medians[:50])
        await asyncio.to_thread(check_all_leave, running)


def cancels(count: int, start: int) -> Iterator[scheduler_pb2.RouterMessage]:
    """Hello, and so many cancels of requests that never were."""
    yield scheduler_pb2.RouterMessage(
        hello=scheduler_pb2.Hello(router_id=f"canceller-{start}", protocol_revision=1)
    )
    for number in range(start, start + count):
        yield scheduler_pb2.RouterMessage(
            cancel=scheduler_pb2.Cancel(key=number.to_bytes(16), reason=common_pb2.FINISH_REASON_ABORT)
        )


def cancel_many(running: Cluster, count: int, start: int) -> None:
    for _ in running.scheduler.Connect(cancels(count, start), timeout=300):
        pass  # the stream ends when our side has said all


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_b30_cancels_of_what_never_was_leave_no_memory_behind(tiny_model_folder: Path, count: int) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        cancel_many(running, 2_000, 1)  # what the process needs once
        before = resident_bytes(running, "scheduler")
        cancel_many(running, count, 1_000_000)
        assert resident_bytes(running, "scheduler") - before < 5 * 2**20
        check_quiet(running)


@pytest.mark.parametrize("num_rounds", [10, pytest.param(300, marks=pytest.mark.soak)])
async def test_b29_all_choices_of_a_cancelled_request_stop_and_leave_no_record(
    num_rounds: int, tiny_model_folder: Path
) -> None:
    with cluster.running(tiny_model_folder, script=Script(step_seconds=0.002)) as running:
        async with client_of(running) as client:
            for salt in range(num_rounds):
                stream = client.growing(sized(20, 1000, salt=salt, n=4))
                async for answer in stream:
                    if min(len(choice.token_ids) for choice in answer.choices) >= TOKENS_READ:
                        break
                await stream.aclose()
                await asyncio.to_thread(wait_until_idle, running)
        rows = [step["rows"] for step in running.scripted().steps()]
        assert len(rows) < num_rounds * 40, "they did not go on"
        check_quiet(running)
        check_all_leave(running)


@pytest.mark.parametrize("flags", [(), ("--no-prefix-caching",)])
async def test_b32_blocks_come_back_whatever_the_length(
    flags: tuple[str, ...], tiny_model_folder: Path
) -> None:
    with cluster.running(tiny_model_folder, script=Script(), scheduler_flags=flags) as running:
        async with client_of(running) as client:
            for first in (0, 30):
                asked = [sized(1 + (first + i) % 60, 1 + (first + i) % 7, salt=first + i) for i in range(30)]
                await asyncio.gather(*map(client.complete, asked))
                await asyncio.to_thread(wait_until_idle, running)
        check_quiet(running)


async def test_b28_of_two_calls_with_one_id_the_second_is_refused_and_the_first_is_untouched(
    tiny_model_folder: Path,
) -> None:
    with cluster.running(tiny_model_folder, script=Script(step_seconds=0.005)) as running:
        async with client_of(running) as client:
            asked = sized(9, 60, request_id="the same")
            first = client.growing(asked)
            await anext(first)
            for door in ("generate", "complete"):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await client.ask(door, asked)
                assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS
            answers = [answer async for answer in first]
            assert answers[-1].token_ids == expected_output(prompt(9), 60)
        check_quiet(running)


async def check_b84(model: Path, warm_up: int, count: int) -> None:
    """The router as server of its clients and as client of the scheduler: fifty streams at once, dropped."""
    with cluster.running(model, script=Script(step_seconds=0.002)) as running:
        async with client_of(running) as client:

            async def leave(how_many: int) -> None:
                left = iter(range(how_many))

                async def one_after_the_other() -> None:
                    for salt in left:
                        await read_and_leave(client, salt)

                await asyncio.gather(*(one_after_the_other() for _ in range(50)))

            await leave(warm_up)
            before = {name: resident_bytes(running, name) for name in ("router", "scheduler")}
            await leave(count)
            for name, size in before.items():
                assert resident_bytes(running, name) - size < 20 * 1024 * 1024, name
        await asyncio.to_thread(check_quiet, running)


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_b84_thirty_thousand_dropped_streams_leave_router_and_scheduler_as_they_were(
    tiny_model_folder: Path,
) -> None:
    await check_b84(tiny_model_folder, 5_000, 30_000)
