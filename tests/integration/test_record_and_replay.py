"""What a real scheduler wrote down replays to equal plans, whatever happened to it; and it wrote no token."""

import asyncio
import subprocess
import sys
from pathlib import Path

from chairlift.lab.replay import Report, UnreadableError, replay_file
from scheduler.record_file import chunks
from scheduler.sequence import FinishReason
from tests.integration.prompts import ids_of, sized
from tests.rig import cluster
from tests.rig.client import Client, client_of
from tests.rig.cluster import Cluster
from tests.rig.scripted_executor import Script, expected_output

EXECUTORS = ("executor", "second")
TIGHT = Script(num_blocks=24, block_size=4, max_num_seqs=6, step_seconds=0.004)
FLAGS = ("--watermark", "0", "--admission", "optimistic", "--recovery-timeout", "60")


async def until(running: Cluster, num_executors: int) -> None:
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(running.load)).num_executors != num_executors:  # noqa: ASYNC110 - seen through a door
            await asyncio.sleep(0.02)


async def given_up(client: Client, salt: int) -> None:
    async for answer in client.growing(sized(9, 60, salt=salt)):
        if len(answer.token_ids) >= 3:
            return


def record_of(running: Cluster) -> Path:
    return running.folder / "record"


async def test_preemptions_cancels_a_killed_executor_and_a_lost_router_replay_equal(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        for name in EXECUTORS:
            running.start_scripted_executor(TIGHT, name=name)
        running.start_scheduler("--record", str(record_of(running)), *FLAGS, executors=EXECUTORS)
        running.start_router()
        running.wait()
        await until(running, 2)
        messages = [sized(12, 40, salt=salt % 8) for salt in range(24)]
        async with client_of(running) as client:
            asked = [asyncio.create_task(client.generate(message)) for message in messages]
            await asyncio.gather(*(given_up(client, 20 + salt) for salt in range(4)))
            running.kill("second")
            for message, answer in zip(messages, await asyncio.gather(*asked), strict=True):
                assert answer.token_ids == expected_output(ids_of(message), 40)
            await until(running, 1)
            running.restart("second")
            await until(running, 2)
            await asyncio.gather(*map(client.generate, messages[:8]))
        running.kill("router")
        assert running.stop("scheduler") == 0
        report = replay_file(record_of(running))
        check_seen(report)
        done = replay_command(record_of(running), "--policy", "fair", "--max-num-seqs", "2")
        assert done.returncode == 0, done.stderr
        assert f"{report.num_plans:,} plans, all equal to those recorded" in done.stdout
        assert "what if" in done.stdout


def check_seen(report: Report) -> None:
    assert report.preemptions > 0
    assert report.num_lost >= 1
    reasons = [seen.reason for seen in report.seen]
    assert reasons.count(FinishReason.LENGTH) >= 32
    assert reasons.count(FinishReason.ABORT) == 4
    assert all(seen.num_output_tokens == 40 for seen in report.seen if seen.reason is FinishReason.LENGTH)


async def test_the_real_executor_with_repeated_prompts_and_ends_replays_equal(
    tiny_model_folder: Path,
) -> None:
    """Prefix hits, among them outputs that are prompts later; end tokens; log-probabilities."""
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "256")
        running.start_scheduler("--record", str(record_of(running)))
        running.start_router()
        running.wait()
        async with client_of(running) as client:
            first = await client.complete(sized(40, 40))
            again = sized(40, 40)
            again.token_ids.ids.extend(first.token_ids)
            await client.complete(again)
            await asyncio.gather(
                *(
                    client.complete(sized(50, 30, salt=i % 2, ignore_eos=False, n=2, seed=i))
                    for i in range(6)
                ),
                client.complete(sized(30, 5, logprobs=1, prompt_logprobs=1)),
            )
        assert running.stop("scheduler") == 0
        report = replay_file(record_of(running))
        assert report.num_tokens > 0
        with record_of(running).open("rb") as file:
            lines = b"".join(chunk.lines for chunk in chunks(file))
        ids = ",".join(map(str, first.token_ids[:6]))
        assert ids.encode() not in lines


async def test_a_record_of_a_killed_scheduler_is_told_as_far_as_it_is_whole(tiny_model_folder: Path) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(TIGHT)
        running.start_scheduler("--record", str(record_of(running)))
        running.start_router()
        running.wait()
        async with client_of(running) as client:
            await client.complete(sized(10, 10))
            async with asyncio.timeout(30):
                while num_plans_so_far(record_of(running)) < 10:  # noqa: ASYNC110 - what another process writes
                    await asyncio.sleep(0.05)
        running.kill("scheduler")
        done = replay_command(record_of(running))
        assert done.returncode == 2
        assert "the record is cut off in chunk" in done.stderr
        assert "--cut replays what is whole" in done.stderr
        assert num_plans_so_far(record_of(running)) >= 10


def num_plans_so_far(record: Path) -> int:
    """Of what is whole; 0 before anything is."""
    try:
        return replay_file(record, may_be_cut=True).num_plans
    except UnreadableError:
        return 0


def replay_command(record: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "chairlift", "replay", str(record), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
