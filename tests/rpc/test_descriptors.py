import asyncio
import resource

import pytest

from rpc.descriptors import watch
from tests.rig import descriptors
from tests.rpc.conftest import StartGreeter


def test_a_service_takes_all_that_it_may_have(greeter: StartGreeter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        server = greeter()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


async def test_that_none_is_left_is_told_once_and_its_end_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""

    async def until(event: str) -> None:
        """Waits for it, and for several looks more."""
        nonlocal told
        async with asyncio.timeout(20):
            while event not in told:
                await asyncio.sleep(0.01)
                told += capsys.readouterr().out
        await asyncio.sleep(0.1)
        told += capsys.readouterr().out

    watching = asyncio.create_task(watch(look_seconds=0.01))
    await asyncio.sleep(0.05)
    assert "descriptors" not in capsys.readouterr().out
    with descriptors.none_left():
        await until("descriptors_used_up")
    await until("descriptors_free")
    assert told.count("descriptors_used_up") == told.count("descriptors_free") == 1
    watching.cancel()
