"""A service of ours (or a stranger's) as a process of its own: started, waited for, stopped or killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.address import Address

START_SECONDS = 60.0


class ServiceProcess:
    """`python -m MODULE FLAGS`, which announces `listening on ADDRESS` on stdout. Its stderr is kept."""

    def __init__(self, module: str, *flags: str, cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(
            # Its life is bound to ours: not even a test run that is killed leaves it behind.
            [sys.executable, "-m", "chairlift.child", str(os.getpid()), module, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._keep_stderr, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        announced = self._process.stdout.readline().strip()
        if not announced.startswith("listening on "):
            self.kill()
            raise RuntimeError(f"{module} did not start: {announced}\n{self.stderr}")
        self.address = announced.removeprefix("listening on ")

    def next_line(self) -> str:
        """The next line on its stdout, such as where another of its doors is."""
        assert self._process.stdout is not None
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
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self.wait()

    def wait(self, timeout_seconds: float = 30.0) -> int:
        """Its exit code, once it has one."""
        code = self._process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def close(self) -> None:
        """End it at once if it still runs."""
        if self.exit_code is None:
            self.kill()
        else:
            self.wait()

    def _keep_stderr(self) -> None:
        assert self._process.stderr is not None
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
