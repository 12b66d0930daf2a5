"""`chairlift top` on a real pseudo-terminal, before a real router."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.lift import End
from chairlift.summaries import frame_of
from protos.v1 import common_pb2, router_pb2
from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.scripted_executor import Script

SECONDS = 30.0
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as running:
        for name in ("executor", "executor-2"):
            running.start_scripted_executor(Script(max_num_seqs=8, step_seconds=0.02), name=name)
        running.start_scheduler(executors=("executor", "executor-2"))
        running.start_router()
        running.wait()
        yield running


class Terminal:
    """What a program writes to a terminal of 120 by 40."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chairlift", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
        )
        os.close(slave)
        self._seen = b""

    def wait_for(self, *wanted: str) -> str:
        """Everything written until all of `wanted` (patterns) has been; colours left out."""
        deadline = time.monotonic() + SECONDS
        while True:
            text = _ESCAPE.sub(b"", self._seen).decode(errors="replace")
            missing = [word for word in wanted if not re.search(word, text)]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"{missing} did not appear in {text[-3000:]}"
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self._seen += os.read(self._master, 65536)
                except OSError as error:  # the program has ended
                    raise AssertionError(f"{missing} did not appear in {text[-3000:]}") from error

    def forget(self) -> None:
        """What was written before now does not count."""
        self._seen = b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def top(server: Cluster) -> Iterator[Terminal]:
    terminal = Terminal("top", "--address", server.address("router"))
    yield terminal
    terminal.close()


def test_both_executors_are_shown_with_who_rides_and_ctrl_c_ends_it(server: Cluster, top: Terminal) -> None:
    top.wait_for("The lift stands still")
    asked = [
        server.router.Generate(request([1, 2, 3 + i], max_tokens=4000, request_id=f"rider-{i}"))
        for i in range(4)
    ]
    try:
        riders = [f"rider-{i}" for i in range(4)]
        text = top.wait_for(*riders, "▐", "██", "tokens/s   4 riding", "nobody waits")
        assert text.count("of 8 seats") >= 2
        top.wait_for("first token .*█", "between tokens .*█", "half ≤ [0-9]+ms, 99 % ≤ ")
    finally:
        for call in asked:
            call.cancel()
    top.wait_for("✗")
    top.process.send_signal(signal.SIGINT)
    assert top.process.wait(SECONDS) == 130


def test_a_router_that_goes_away_is_told_of_and_asked_again(server: Cluster, top: Terminal) -> None:
    top.wait_for("The lift stands still")
    server.kill("router")
    top.wait_for("UNAVAILABLE")
    top.forget()
    server.restart("router")
    top.wait_for("0 tokens/s   0 riding")


def test_an_executor_that_is_gone_is_seen_and_so_is_its_return(server: Cluster, top: Terminal) -> None:
    top.wait_for("0 tokens/s   0 riding")
    server.kill("executor-2")  # idle: no request is suspected of it
    call = server.router.Generate(request([7, 8, 9], max_tokens=4000, request_id="survivor"))
    try:
        top.wait_for("survivor", "1 riding")
        server.kill("executor")
        top.wait_for("no step for", "   0 tokens/s   1 riding")
        server.restart("executor")
        top.forget()
        top.wait_for(r" [1-9]\d* tokens/s   1 riding")
    finally:
        call.cancel()


def test_no_router_is_one_sentence(tmp_path: Path) -> None:
    terminal = Terminal("top", "--address", f"unix:{tmp_path}/nobody.sock")
    terminal.wait_for("chairlift top: nobody answers at")
    assert terminal.process.wait(SECONDS) == 1
    terminal.close()


def test_what_is_no_terminal_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chairlift", "top"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "chairlift watch" in done.stderr


def test_a_summary_tells_chunks_samples_and_ends() -> None:
    summary = router_pb2.StepSummary(
        step_id=3,
        members=[
            router_pb2.StepMember(request_id="a", seq_id=1, num_tokens=64, prefill=True),
            router_pb2.StepMember(request_id="b", seq_id=2, num_tokens=9),
            router_pb2.StepMember(request_id="c", seq_id=3, num_tokens=1),
            router_pb2.StepMember(request_id="d", seq_id=4, num_tokens=1, padding=True),
        ],
        left=[
            router_pb2.StepLeaver(seq_id=5, reason=common_pb2.FINISH_REASON_STOP),
            router_pb2.StepLeaver(seq_id=6, reason=common_pb2.FINISH_REASON_ABORT),
            router_pb2.StepLeaver(seq_id=7),
        ],
    )
    frame = frame_of(summary)
    assert (frame.chunks, frame.num_sampled) == (frozenset({1, 2}), 2)
    assert frame.ends == {5: End.FINISHED, 6: End.CANCELLED, 7: End.PREEMPTED}
