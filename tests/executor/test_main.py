"""The executor as a process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor import __main__, runner, selection
from executor.config import ExecutorSettings
from executor.model import opening
from rpc.errors import StartError
from tests.rig.fake_device import FakeDevice

LOADS_FOR_EVER = """
import os, sys
import executor.__main__ as main
from rpc.server import main as run_service

def load_for_ever(config):
    import torch
    print("loading", flush=True)
    while True:
        torch.ones(1 << 20).add_(1)

main.load_runner = load_for_ever
run_service(main.PROG, main.run)
"""


def test_a_signal_while_the_model_is_loading_ends_the_process_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADS_FOR_EVER, "--model", str(tmp_path)]
    command += ["--listen", f"unix:{tmp_path}/executor.sock", "--grace-seconds", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening")
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    assert "terminate called" not in said
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flag", "limits", "num_threads"), [(None, [3, 2], 2), (None, [], 4), (None, [64], 4), (6, [2], 6)]
)
def test_there_are_no_more_threads_than_the_container_may_keep_busy(
    flag: int | None, limits: list[int], num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(__main__, "processors", lambda _: limits)
    config = ExecutorSettings(model=tmp_path / "none", listen="unix:/x", device="cpu", num_threads=flag)
    with pytest.raises(StartError, match="does not exist"):
        __main__.load_runner(config)
    assert chosen[-1] == num_threads


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PermissionError(13, "Permission denied"), "Permission denied"), (MemoryError(), "no memory is left")],
)
def test_a_model_that_the_system_does_not_let_us_load_is_one_sentence(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise error

    monkeypatch.setattr(opening.Path, "exists", refuse)
    with pytest.raises(StartError, match=f"the model {tmp_path} cannot be loaded: .*{reason}"):
        __main__.load_runner(ExecutorSettings(model=tmp_path, listen="unix:/x", device="cpu"))


def test_a_gpu_without_memory_for_the_model_is_said_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(runner.ModelRunner, "load", load)
    device = FakeDevice(free_bytes=1 << 29, total_bytes=80 << 30)
    monkeypatch.setattr(selection, "accelerator_of", lambda _: device)
    config = ExecutorSettings(model=tmp_path / "some", listen="unix:/x", device="cpu")
    with pytest.raises(StartError) as raised:
        __main__.load_runner(config)
    said = str(raised.value)
    assert "some: 0.50 GiB of its 80.00 GiB are free" in said
    assert "gpu_memory_utilization" in said
