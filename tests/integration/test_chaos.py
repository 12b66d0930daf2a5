"""Anything may be killed, frozen or cut while clients are served: nothing is lost, nothing comes twice.

Real processes. The short form has the tiny model; the long one (soak) the real one, at saturation.
"""

import random
from pathlib import Path

import pytest

from tests.rig.chaos import ROUTERS, SCHEDULERS, Chaos, Question, Tally, chaos

REAL_MODEL = Path("models/smollm2")


def questions(num_questions: int, *, max_tokens: int) -> list[Question]:
    """Seeds, several choices, stop strings, greedy ones between them."""
    rng = random.Random(7)
    asked = []
    for number in range(num_questions):
        options: dict[str, object] = {"max_tokens": rng.randint(max_tokens // 4, max_tokens)}
        if number % 4:
            options |= {"temperature": 1.0, "seed": number}
        else:
            options |= {"temperature": 0.0}
        if number % 3 == 0:
            options["n"] = 2
        if number % 5 == 0:
            options["stop"] = ["e", "qu"]
        asked.append(Question(f"Question {number} of {num_questions}: why " + "so " * (number % 7), options))
    return asked


def check(tally: Tally) -> None:
    assert not tally.wrong, "\n".join(tally.wrong[:5])
    # What was computed: each prompt and each token once, and what the faults cost.
    assert 0 < tally.num_computed <= tally.num_prompt + 4 * tally.num_delivered, tally


async def test_b105_b106_whatever_is_killed_frozen_or_cut_every_stream_is_the_undisturbed_one(
    tiny_model_folder: Path,
) -> None:
    asked = questions(16, max_tokens=60)
    flags = ("--num-blocks", "64", "--max-num-seqs", "6")
    async with (
        chaos(tiny_model_folder, asked, num_executors=2, executor_flags=flags) as one,
        one.load(8, at_least=100) as tally,
    ):
        await one.progress()
        await one.crash("executor0")
        one.ways["executor0"].cut()
        one.ways["executor1"].cut()
        await one.progress()
        await one.crash(await one.leader())
        await one.progress()
        await one.crash(ROUTERS[0])
        await one.progress()
        await freeze_the_leader(one)
        await one.progress()
    check(tally)


async def freeze_the_leader(one: Chaos) -> None:
    """Past its lease: the standby leads from then on, and the old leader knows it when it has thawed."""
    old = await one.leader()
    (new,) = set(SCHEDULERS) - {old}
    await one.freeze(old, 3 * one.lease_seconds)
    assert await one.leader() == new
    await one.progress()
    assert not await one.cluster_is_serving(old)
    assert "stepped_down" in one.cluster.process(old).stderr


@pytest.mark.soak  # a minute and more of two cores
async def test_everything_is_restarted_one_after_the_other_and_no_stream_fails(
    tiny_model_folder: Path,
) -> None:
    """SIGTERM and a new process, as an upgrade does it: executors, the standby, the leader, routers."""
    asked = questions(12, max_tokens=60)
    flags = ("--num-blocks", "64", "--max-num-seqs", "6", "--grace-seconds", "1")
    async with (
        chaos(tiny_model_folder, asked, num_executors=3, executor_flags=flags) as one,
        one.load(8, at_least=60) as tally,
    ):
        leader = await one.leader()
        (standby,) = set(SCHEDULERS) - {leader}
        for name in (*one.executors, standby, leader, *ROUTERS):
            await one.progress()
            assert await one.stop(name) == 0
        await one.progress()
    check(tally)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not REAL_MODEL.exists(), reason="chairlift pull smollm2")
async def test_a_thousand_requests_at_saturation_while_everything_dies_again_and_again() -> None:
    """Executors every five seconds, the scheduler five times, a router three times, freezes and cuts.

    An executor is killed when the one before it serves again, for they take longer than that to load.
    """
    asked = questions(40, max_tokens=48)
    flags = ("--num-blocks", "256", "--max-num-seqs", "16")
    async with (
        chaos(REAL_MODEL, asked, num_executors=2, executor_flags=flags, lease_seconds=5.0) as one,
        one.load(32, at_least=1_000) as tally,
        one.crashing(one.executors, every_seconds=5.0) as crashes,
    ):
        for turn in range(6):
            await one.progress(20)
            await one.crash(await one.leader())
            await one.progress(20)
            if turn % 2:
                await one.crash(ROUTERS[turn // 2 % 2])
            for way in one.ways.values():
                way.cut()
            if turn == 2:
                await freeze_the_leader(one)
            if turn == 3:
                async with crashes:
                    await one.freeze("executor0", 15.0)
        while tally.num_answered < 1_000:
            await one.progress()
    check(tally)
    print(tally)  # noqa: T201 - the figures of docs/results.md
