"""Where service processes of the tests come from: forked from one that has imported what takes long.

A service's imports take seconds of a processor, and the suite starts hundreds of services. `Nursling` is used
like `subprocess.Popen`, for `python -m chairlift.child PARENT MODULE FLAGS…`: a process of its own, with its
own argv, folder, environment, stdout and stderr, and an end of its own. Each test process has one nursery,
made when it is first needed; it and all that came from it end with that process, however it ends.

It is one thread that has called nothing: what is forked has no lock that is held, and no state but imports.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from chairlift import child

_ROOT: Final = Path(__file__).parents[2]
_MAX_ASKED_BYTES: Final = 1 << 20
_RUN: Final = ("executor.__main__", "scheduler.__main__", "router.__main__", "tests.rig.scripted_executor")
_IMPORTED: Final = ("torch", "executor.model", "executor.runner")  # by what is run, and only then


class Nursling:
    """A running `python -m chairlift.child PARENT MODULE FLAGS…`."""

    def __init__(self, module: str, *flags: str, cwd: Path | None = None) -> None:
        asked = {"module": module, "flags": flags, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ)}
        (out, theirs_out), (err, theirs_err), (ended, theirs_ended) = (os.pipe() for _ in range(3))
        theirs = [theirs_out, theirs_err, theirs_ended]
        try:
            socket.send_fds(_nursery(), [json.dumps(asked).encode()], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._ended = os.fdopen(ended)
        self.pid = int(self._ended.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs. Minus the signal when one ended it."""
        return self._code if self._code is not None or not self._has_ended(0) else self.wait()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Its exit code, once it has one. Raises TimeoutExpired."""
        if self._code is None:
            if not self._has_ended(timeout_seconds):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_seconds or 0.0)
            self._code = int(self._ended.readline())
            self._ended.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """To one that has ended: nothing."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_seconds: float | None) -> bool:
        return bool(select.select([self._ended], [], [], timeout_seconds)[0])


def started(module: str, *flags: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    """The same without a nursery."""
    return subprocess.Popen(
        [sys.executable, "-m", "chairlift.child", str(os.getpid()), module, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


_lock = threading.Lock()
_made: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def _nursery() -> socket.socket:
    """Where the nursery of this process is asked; it is made by the first who needs it."""
    with _lock:
        if not _made:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            _made.append((ours, process))
        return _made[0][0]


# --- in the nursery ---------------------------------------------------------------------------------


def _serve(asking: socket.socket) -> list[str]:
    """Forks what is asked for, until nobody is left who could ask.

    Returns in what is forked alone: the arguments of `chairlift.child`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's ^C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for minders
    while True:
        message, descriptors, _, _ = socket.recv_fds(asking, _MAX_ASKED_BYTES, 3)
        if not message:
            sys.exit()
        if os.fork() == 0:
            asking.close()
            return _mind(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(asked: dict[str, Any], out: int, err: int, ended: int) -> list[str]:
    """Forks the process and tells of its beginning and end. Returns in it alone: its arguments."""
    child.end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in (out, err, ended):
            os.close(descriptor)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        return [str(os.getppid()), asked["module"], *asked["flags"]]
    for descriptor in (0, 1, 2, out, err):
        os.close(descriptor)
    os.write(ended, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(ended, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _main(descriptor: int) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in _RUN:  # which it can be once it is no longer known as imported
        importlib.import_module(name)
        del sys.modules[name]
    assert threading.active_count() == 1, "what is forked must have one thread"
    gc.collect()
    gc.freeze()
    child.main(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
