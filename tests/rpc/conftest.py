"""A service process of its own, made of rpc alone, to try how processes of ours behave."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
import pytest

from rpc.address import Address
from rpc.channel import connect


class Greeter:
    """The process `python -m tests.rpc.greeter`, started, with its announced address."""

    def __init__(self, *flags: str, stderr: int = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.greeter", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert self.process.stdout is not None
        announced = self.process.stdout.readline().decode().strip()
        self.address = announced.removeprefix("listening on ")

    def connect(self, max_message_bytes: int = 64 * 1024 * 1024) -> grpc.aio.Channel:
        return connect(Address.parse(self.address, field="address"), max_message_bytes=max_message_bytes)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)

    def close(self) -> bytes:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self.process.communicate()[1] or b""


StartGreeter = Callable[..., Greeter]


@pytest.fixture
def greeter() -> Iterator[StartGreeter]:
    """Starts greeters with the flags given and ends them all."""
    started: list[Greeter] = []

    def start(*flags: str, stderr: int = subprocess.PIPE) -> Greeter:
        started.append(Greeter(*flags, stderr=stderr))
        return started[-1]

    yield start
    for one in started:
        one.close()
