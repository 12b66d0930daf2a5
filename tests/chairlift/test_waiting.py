"""Commands that are typed before their router serves, in one process."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from chairlift import generate, status
from protos.v1 import common_pb2, router_pb2_grpc
from rpc.address import Address
from rpc.health import Health
from rpc.tls import Tls
from tests.chairlift.fake_router import FakeRouter, delta, finished, listening
from tests.rig.certificates import Authority
from tests.rig.tls_faults import serving


def answering() -> FakeRouter:
    router = FakeRouter()
    router.events = [delta("Paris."), finished(common_pb2.FINISH_REASON_STOP)]
    return router


async def said_by(process: asyncio.Task[int], capsys: pytest.CaptureFixture[str]) -> str:
    """What stood on stderr once anything did."""
    said = ""
    while not said:
        assert not process.done()
        await asyncio.sleep(0.01)
        said = capsys.readouterr().err
    return said


async def test_a_router_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/router.sock"
    asking = asyncio.create_task(
        asyncio.to_thread(generate.main, ["Hi", "--address", address, "--wait", "60"])
    )
    said = await said_by(asking, capsys)
    assert said.startswith("chairlift generate: waiting since ")
    assert said.endswith(f", at most 60 s, for the router at {address} to serve: nobody answers\n")
    async with listening(answering(), tmp_path):
        assert await asking == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("Paris.\n", "")  # one line in all


async def test_a_router_without_an_executor_is_waited_for_and_not_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router, health = answering(), Health([])
    server = grpc.aio.server()
    await health.register(server)
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    address = f"unix:{tmp_path}/router.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        asking = asyncio.create_task(
            asyncio.to_thread(generate.main, ["Hi", "--address", address, "--wait", "60"])
        )
        assert "to serve: it has nobody to compute yet\n" in await said_by(asking, capsys)
        assert router.requests == []
        health.serving(True)
        assert await asking == 0
    finally:
        await server.stop(None)
    assert len(router.requests) == 1


@pytest.mark.parametrize("command", [generate, status])
def test_after_the_time_the_error_is_that_of_asking(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    prompt = ["Hi"] if command is generate else []
    assert command.main([*prompt, "--address", address, "--wait", "0.1"]) == 1  # type: ignore[attr-defined]
    waiting, failed = capsys.readouterr().err.splitlines()
    assert "at most 0.1 s" in waiting
    assert f"nobody answers at {address} (is `chairlift serve` running there?)" in failed


async def test_what_time_does_not_mend_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    before = time.monotonic()
    async with serving(Tls(ca.issue("server").files(None)), demand=False) as address:
        flags = ["--address", str(address), "--tls-ca", str(other.cert), "--wait", "600"]
        assert await asyncio.to_thread(status.main, flags) == 1
    assert "its certificate is not signed by a CA we believe" in capsys.readouterr().err
    assert time.monotonic() - before < 300


async def test_who_serves_is_asked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with listening(answering(), tmp_path) as address:  # without health, as others' servers are
        assert await asyncio.to_thread(generate.main, ["Hi", "--address", address, "--wait", "60"]) == 0
    assert capsys.readouterr().err == ""


def test_the_address_may_be_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = Address.parse(f"unix:{tmp_path}/nobody.sock", field="")
    monkeypatch.setenv("CHAIRLIFT_ADDRESS", str(address))
    assert status.main([]) == 1
    assert f"nobody answers at {address}" in capsys.readouterr().err
