"""The rig can be trusted: it leaves nothing behind, sees what is not quiet, kills and restarts processes."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.client import client_of
from tests.rig.quiet import check_all_leave, check_quiet, wait_until_idle
from tests.rig.scripted_executor import Script, expected_output

SLOW = Script(step_seconds=0.005)


def test_no_process_and_no_file_outlives_a_cluster(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script()) as running:
        pids = [running.process(name).pid for name in running.names]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not running.folder.exists()


def test_a_failing_test_is_told_what_the_processes_said(tiny_model_folder: Path) -> None:
    with pytest.raises(RuntimeError) as failure:
        fail_beside_a_cluster(tiny_model_folder)
    (note,) = failure.value.__notes__
    assert all(f"--- {name} " in note for name in ("executor", "scheduler", "router"))
    assert "executor_attached" in note


def fail_beside_a_cluster(model: Path) -> None:
    with cluster.running(model, script=Script()):
        raise RuntimeError("a test fails")


async def test_the_quiet_check_sees_a_request_that_runs(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=SLOW) as running:
        async with client_of(running) as client:
            answers = client.growing(sized(5, 4_000))
            while not (await anext(answers)).token_ids:
                pass
            with pytest.raises(AssertionError, match="'numRunning': 1"):
                wait_until_idle(running, within_seconds=0.2)
            await answers.aclose()
        check_quiet(running)


@pytest.mark.parametrize("name", ["executor", "scheduler"])
async def test_a_killed_tier_comes_back_and_no_client_notices(name: str, tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=SLOW) as running:
        async with client_of(running) as client:
            answers = client.growing(sized(5, 200))
            while len((await anext(answers)).token_ids) < 5:
                pass
            await asyncio.to_thread(running.kill, name)
            await asyncio.to_thread(running.restart, name)
            assert [answer async for answer in answers][-1].token_ids == expected_output(prompt(5), 200)
        running.wait()
        check_quiet(running)
        check_all_leave(running)
