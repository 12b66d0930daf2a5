"""`chairlift status` of a running server, and of one whose executor is gone."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import status
from protos.v1 import router_pb2
from rpc.version import version
from tests.integration.prompts import sized
from tests.rig import cluster
from tests.rig.client import client_of
from tests.rig.quiet import wait_until_idle
from tests.rig.scripted_executor import Script


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - the condition is another process's
            await asyncio.sleep(0.02)


def told(running: cluster.Cluster) -> router_pb2.GetStatusResponse:
    return running.router.GetStatus(router_pb2.GetStatusRequest(), timeout=10)


def shown(running: cluster.Cluster, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = status.main(["--address", running.address("router")])
    return code, capsys.readouterr().out


async def test_each_tier_is_told_with_its_version_and_load(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    script, flags = Script(step_seconds=0.005), ("--max-num-seqs", "1", "--reattach-seconds", "0")
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            streams = [client.growing(sized(8, 2_000, salt=i)) for i in range(3)]
            for stream in streams:
                await anext(stream)
            await anext(streams[0])
            answer = told(running)
            (scheduler,) = answer.schedulers
            (executor,) = scheduler.executors
            assert (answer.num_requests, scheduler.num_running, scheduler.num_waiting) == (3, 1, 2)
            assert {answer.version, scheduler.version, executor.version} == {version()}
            assert (executor.num_running, executor.max_num_seqs, executor.missing) == (1, 1, "")
            assert 0 < executor.num_free_blocks < executor.num_blocks
            code, text = await asyncio.to_thread(shown, running, capsys)
            assert code == 0
            addresses = (running.address("executor"), running.address("scheduler"))
            for part in ("serving", "attached", "1 of 1", *addresses):
                assert part in text
            for stream in streams:
                await stream.aclose()
        wait_until_idle(running)

        running.kill("executor")
        await until(lambda: told(running).refusal != "")
        (missing,) = told(running).schedulers[0].executors
        assert missing.executor_id == running.address("executor")
        assert missing.missing
        code, text = await asyncio.to_thread(shown, running, capsys)
        assert code == 1
        assert running.address("executor") in text

        running.kill("scheduler")
        await until(lambda: told(running).schedulers[0].scheduler_id == "")
        assert told(running).schedulers[0].refusal
        assert (await asyncio.to_thread(shown, running, capsys))[0] == 1


def test_nobody_at_the_address_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--address", f"unix:{tmp_path}/none.sock"]) == 1
    assert capsys.readouterr().err.startswith("chairlift status: nobody answers at unix:")
