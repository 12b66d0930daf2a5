"""One service process as its starter sees it: its announced address, health, last output and end.

It is started by exec and knows its parent (see child.py); the variables that configure us are not handed on,
because flags say everything.
"""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift.child_lines import lines_of
from rpc import log
from rpc.address import Address
from rpc.announcing import announce
from rpc.cancel import heed_cancel
from rpc.channel import connect
from rpc.settings import PREFIX

_ANNOUNCEMENT = "listening on "
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Service:
    """What to run: a module, with these flags, the first of which is `--listen`.

    It may listen at several addresses, separated by commas: at the first for others, at the last for us.
    `ready_when` is what its health is asked for: empty, whether it serves.
    """

    name: str
    argv: tuple[str, ...]
    module: str
    ready_when: str = ""

    @property
    def listens_at(self) -> list[str]:
        """Its addresses."""
        return self.argv[1].split(",")


class ChildProcess:
    """A service process that can be started again. The lines of its log are lines of ours."""

    def __init__(self, service: Service) -> None:
        self.name = service.name
        self.address: Address | None = None
        """Where it listens, once announced; kept over a restart, so that a free port stays the same."""
        self.ended: asyncio.Future[Any]
        """The exit code of the present process, as asyncio tells it; there from the first start on."""
        self._service = service
        self._process: asyncio.subprocess.Process | None = None
        self._announced: asyncio.Future[Address]
        self._readers: list[asyncio.Future[Any]] = []
        self._said = ""

    async def start(self) -> None:
        """Starts the process, with the address of the time before if there was one."""
        argv = self._service.argv
        if self.address is not None:
            argv = ("--listen", ",".join([str(self.address), *self._service.listens_at[1:]]), *argv[2:])
        self._said = ""
        self._announced = asyncio.get_running_loop().create_future()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chairlift.child", str(os.getpid()), self._service.module, *argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
            process_group=0,  # Ctrl-C reaches us alone: we end them in order
        )
        assert process.stdout is not None  # both are pipes
        assert process.stderr is not None
        self._process = process
        self.ended = asyncio.ensure_future(process.wait())
        self._readers = [
            asyncio.ensure_future(self._read_stdout(process.stdout)),
            asyncio.ensure_future(self._read_stderr(process.stderr)),
        ]

    async def serving(self) -> None:
        """Returns once the process has announced its address and its health is what it is asked for."""
        address = await asyncio.shield(self._announced)
        if self._service.listens_at[1:]:
            address = Address.parse(self._service.listens_at[-1], field="--listen")
        async with connect(address, max_message_bytes=1024 * 1024) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=self._service.ready_when)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for answer in stub.Watch(asked):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                heed_cancel()
                await asyncio.sleep(_RETRY_SECONDS)

    async def last_words(self) -> str:
        """Why the process ended: the line it closed with, else its exit code. To be asked after its end."""
        await asyncio.wait(self._readers)
        if self._said:
            return self._said
        code: int = await self.ended
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} {how}"

    async def stop(self, kill_after_seconds: float) -> None:
        """SIGTERM, and SIGKILL if that is not enough; returns when the process is gone."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        await asyncio.wait([self.ended], timeout=kill_after_seconds)
        self.kill()
        await asyncio.wait([self.ended, *self._readers])

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not asyncio's send_signal: that polls first, and takes the exit code away from who waits for it.
        if self._process is not None and not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _read_stdout(self, stream: asyncio.StreamReader) -> None:
        async for line in lines_of(stream):
            text = line.decode(errors="replace").strip()
            if text.startswith(_ANNOUNCEMENT):
                if not self._announced.done():
                    self.address = Address.parse(text.removeprefix(_ANNOUNCEMENT), field="listening on")
                    self._announced.set_result(self.address)
            else:
                announce(text)  # where its other doors are

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        """Hands lines on, but for `NAME: why it cannot start`, which its starter tells."""
        async for line in lines_of(stream):
            if line.removeprefix(b"chairlift ").startswith(f"{self._service.module}: ".encode()):
                self._said = line.decode(errors="replace").strip()
                continue
            log.write(line.decode(errors="backslashreplace"))
