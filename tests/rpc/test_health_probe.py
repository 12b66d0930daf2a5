import asyncio

import pytest

from rpc.health_probe import main
from tests.rpc.conftest import StartGreeter


async def test_the_probe_follows_the_health_of_the_process(
    greeter: StartGreeter, capsys: pytest.CaptureFixture[str]
) -> None:
    server = greeter("--grace-seconds", "0")

    async def probe(*argv: str) -> int:
        return await asyncio.to_thread(main, list(argv))

    while await probe(server.address) != 0:  # noqa: ASYNC110 - the probe is what is tested
        await asyncio.sleep(0.02)
    assert await probe(server.address, "chairlift.v1.Router") == 0
    assert await probe(server.address, "chairlift.v1.Nobody") == 1
    assert "NOT_FOUND" in capsys.readouterr().err
    server.terminate()
    await server.ended()
    assert await probe(server.address) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_a_wrong_address_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert "ADDRESS is 'nonsense'" in capsys.readouterr().err
