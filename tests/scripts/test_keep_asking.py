"""The load of `make rolling-restart` sees a stream that fails, and only that."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.rig import cluster
from tests.rig.scripted_executor import Script


def asking(address: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "scripts/keep_asking.py", "--address", address, "--clients", "4"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_ends_well_when_told_to_and_badly_when_a_stream_fails(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script(step_seconds=0.002)) as running:
        for how in ("told to stop", "its router dies"):
            before = running.load().num_steps
            with asking(running.address("router")) as process:
                while running.load().num_steps < before + 200:
                    assert process.poll() is None, process.communicate()
                if how == "told to stop":
                    process.send_signal(signal.SIGTERM)
                else:
                    running.kill("router")
                told, complaints = process.communicate(timeout=60)
            assert process.returncode == (0 if how == "told to stop" else 1)
            assert "no stream failed" in told if how == "told to stop" else "failed after" in complaints
