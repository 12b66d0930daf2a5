"""The picture this server is made for: the batch is re-formed at every iteration."""

import asyncio
from pathlib import Path

from protos.v1 import router_pb2
from tests.integration.prompts import sized
from tests.rig import cluster
from tests.rig.client import LENGTH, client_of
from tests.rig.scripted_executor import Script
from tests.rig.watching import watching

NUM_TOKENS = {"A": 9, "B": 5, "C": 3, "D": 14, "E": 20, "F": 20, "G": 20}


def seats(steps: list[router_pb2.StepSummary]) -> list[str]:
    """Who sits where, one row for each change: whoever enters takes the seat of the one who has left."""
    rows: list[str] = []
    taken = [" "] * 4
    for step in steps:
        for leaver in step.left:
            taken[taken.index(leaver.request_id)] = " "
        for member in step.members:
            if member.entered:
                taken[taken.index(" ")] = member.request_id
        if not rows or rows[-1] != "".join(taken):
            rows.append("".join(taken))
    return rows


async def picture(tiny_model_folder: Path, window: int) -> list[router_pb2.StepSummary]:
    script = Script(max_num_seqs=4, step_seconds=0.1)  # all have come before the third step, C's last, ends
    # When a plan leaves is the window's matter here, not the clock's.
    flags = ("--window", str(window), "--no-late-plans")
    with (
        cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running,
        watching(running) as watcher,
    ):
        async with client_of(running) as client:
            asking = []
            for name, num_tokens in NUM_TOKENS.items():
                answers = client.growing(sized(1, num_tokens, salt=ord(name), request_id=name))
                await anext(answers)  # accepted: the queue has the order of the letters
                asking.append(answers)
            for answers in asking:
                assert [answer async for answer in answers][-1].choice.reason == LENGTH
        return await asyncio.to_thread(watcher.steps_until_gone, "D")


async def test_the_finished_leave_and_the_waiting_take_their_seats_in_the_very_next_iteration(
    tiny_model_folder: Path,
) -> None:
    steps = await picture(tiny_model_folder, window=1)
    rows = seats(steps)
    start = rows.index("ABCD")
    assert rows[start : start + 4] == ["ABCD", "ABED", "AFED", "GFED"]
    for leaver, newcomer in ("CE", "BF", "AG"):
        assert first_step(steps, newcomer) == last_step(steps, leaver) + 1


async def test_with_window_two_a_newcomer_comes_one_iteration_later(tiny_model_folder: Path) -> None:
    # Plan k+1 leaves before result k is in. That C ends with step k is foreseen (its length is known), so C
    # has no row in k+1; but its seat and its blocks come back with result k, when plan k+1 has left already.
    # So E enters with plan k+2: the same picture, one iteration later, in which the seat stays empty.
    steps = await picture(tiny_model_folder, window=2)
    for leaver, newcomer in ("CE", "BF", "AG"):
        assert first_step(steps, newcomer) == last_step(steps, leaver) + 2


def first_step(steps: list[router_pb2.StepSummary], name: str) -> int:
    return min(step.step_id for step in steps for member in step.members if member.request_id == name)


def last_step(steps: list[router_pb2.StepSummary], name: str) -> int:
    return max(step.step_id for step in steps for member in step.members if member.request_id == name)
