"""A service of ours (or a stranger's) as a process of its own: started, waited for, stopped or killed."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.address import Address
from tests.rig.nursery import Nursling, started

START_SECONDS = 60.0


class ServiceProcess:
    """`python -m MODULE FLAGS`, which announces `listening on ADDRESS` on stdout. Its stderr is kept.

    One that is `fresh` imports everything itself.
    """

    def __init__(self, module: str, *flags: str, cwd: Path | None = None, fresh: bool = False) -> None:
        # Its life is bound to ours: not even a test run that is killed leaves it behind.
        self._process = (started if fresh else Nursling)(module, *flags, cwd=cwd)
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._keep_stderr, daemon=True)
        self._reader.start()
        announced = self._process.stdout.readline().strip()
        if not announced.startswith("listening on "):
            self.kill()
            raise RuntimeError(f"{module} did not start: {announced}\n{self.stderr}")
        self.address = announced.removeprefix("listening on ")

    def next_line(self) -> str:
        """The next line on its stdout, such as where another of its doors is."""
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_until_serving(self, service: str = "") -> None:
        target = Address.parse(self.address, field="address").target
        deadline = time.monotonic() + START_SECONDS
        with grpc.insecure_channel(target, options=[("grpc.default_authority", "localhost")]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.RpcError):
                    response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                    if response.status == response.SERVING:
                        return
                if self.exit_code is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the service never said SERVING:\n{self.stderr}")
                time.sleep(0.05)

    def terminate(self) -> None:
        """SIGTERM: it drains."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self.wait()

    def wait(self, timeout_seconds: float = 30.0) -> int:
        """Its exit code, once it has one."""
        code = self._process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()
        return code

    def close(self) -> None:
        """End it at once if it still runs."""
        if self.exit_code is None:
            self.kill()
        else:
            self.wait()

    def _keep_stderr(self) -> None:
        with contextlib.suppress(ValueError):  # closed while reading
            for line in self._process.stderr:
                self._stderr.append(line)


@contextlib.contextmanager
def running(module: str, *flags: str, wait: bool = True) -> Iterator[ServiceProcess]:
    """The process, serving unless `wait` is false; ended at the latest when the block is left."""
    process = ServiceProcess(module, *flags)
    try:
        if wait:
            process.wait_until_serving()
        yield process
    finally:
        process.close()
