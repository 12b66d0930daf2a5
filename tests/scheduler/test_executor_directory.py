"""Which executors there are: names are followed, nobody who answers is given up."""

import asyncio
import socket
from typing import Any

import pytest

from rpc.address import Address
from scheduler.executor_directory import ExecutorDirectory, _resolved
from tests.scheduler.shell import until


async def test_an_address_is_itself_and_a_name_is_every_address_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("executors", 50053)
        v4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("10.0.0.2", "10.0.0.1")]
        return [*v4, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0)), v4[0]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    plain = Address.parse("127.0.0.1:9", field="--executor")
    assert await _resolved(plain) == [plain]
    found = await _resolved(Address.parse("dns:///executors:50053", field="--executor"))
    assert found is not None
    assert [str(item) for item in found] == ["10.0.0.1:50053", "10.0.0.2:50053", "[fd00::1]:50053"]


@pytest.mark.parametrize("error", [socket.gaierror("no such name"), OSError("down"), UnicodeError("label")])
async def test_a_name_that_cannot_be_looked_up_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await _resolved(Address.parse("dns:///executors:1", field="--executor")) is None


class _Loop:
    """Stands for an ExecutorLoop: runs until cancelled, or fails."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_attached = False
        self.is_running = False
        self.fail = asyncio.Event()

    async def run(self) -> None:
        self.is_running = True
        try:
            await self.fail.wait()
            raise RuntimeError("the loop is broken")
        finally:
            self.is_running = False


def _directory(names: dict[str, list[str] | None], monkeypatch: pytest.MonkeyPatch) -> Any:
    loops: dict[str, _Loop] = {}

    async def resolved(address: Address) -> list[Address] | None:
        answer = names[str(address)]
        return None if answer is None else [Address.parse(item, field="x") for item in answer]

    def make(address: Address) -> Any:
        loops[str(address)] = _Loop(address)
        return loops[str(address)]

    monkeypatch.setattr("scheduler.executor_directory._resolved", resolved)
    monkeypatch.setattr("scheduler.executor_directory.RESOLVE_SECONDS", 0.01)
    return ExecutorDirectory([Address.parse(name, field="x") for name in names], make), loops


async def test_the_directory_follows_a_name_and_keeps_who_is_still_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, list[str] | None] = {"dns:///e:1": [], "10.1.1.1:1": ["10.1.1.1:1"]}
    directory, loops = _directory(names, monkeypatch)
    running = asyncio.create_task(directory.run())
    await until(lambda: set(loops) == {"10.1.1.1:1"})
    names["dns:///e:1"] = ["10.0.0.1:1", "10.0.0.2:1"]
    await until(lambda: len(loops) == 3)
    loops["10.0.0.1:1"].is_attached = True
    names["dns:///e:1"] = None  # the name server is away: nobody is given up
    await asyncio.sleep(0.05)
    assert all(loop.is_running for loop in loops.values())
    names["dns:///e:1"] = ["10.0.0.3:1"]
    await until(lambda: not loops["10.0.0.2:1"].is_running)
    assert loops["10.0.0.1:1"].is_running  # it still answers
    loops["10.0.0.1:1"].is_attached = False
    await until(lambda: not loops["10.0.0.1:1"].is_running)
    assert loops["10.1.1.1:1"].is_running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not any(loop.is_running for loop in loops.values())


async def test_a_loop_that_fails_ends_the_directory_and_the_other_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, loops = _directory({"10.0.0.1:1": ["10.0.0.1:1"], "10.0.0.2:1": ["10.0.0.2:1"]}, monkeypatch)
    running = asyncio.create_task(directory.run())
    await until(lambda: len(loops) == 2)
    await until(lambda: all(loop.is_running for loop in loops.values()))
    loops["10.0.0.1:1"].fail.set()
    with pytest.raises(RuntimeError, match="broken"):
        await running
    assert not loops["10.0.0.2:1"].is_running
