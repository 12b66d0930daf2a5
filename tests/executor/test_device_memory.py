import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from executor.device_memory import (
    bytes_of_captures,
    check_weights_fit,
    largest_step,
    num_blocks_that_fit,
    num_profile_blocks,
)
from executor.kv_cache import bytes_per_block
from executor.model import ModelError
from executor.model.weights import weight_bytes
from tests.executor.late import load_late
from tests.rig.fake_device import FakeDevice

GIB = 1 << 30


def fit(
    device: FakeDevice,
    utilization: float = 0.9,
    useful: int = 10**9,
    *,
    profile_bytes: int = 0,
    captured_bytes: int = 0,
) -> int:
    ran = []
    num_blocks = num_blocks_that_fit(
        device,
        lambda: ran.append(True),
        lambda: captured_bytes,
        profile_bytes=profile_bytes,
        block_bytes=1 << 20,
        block_size=16,
        num_tokens=2048,
        memory_utilization=utilization,
        useful=useful,
    )
    assert ran == [True, True], "once for what it loads and keeps, once to be measured"
    return num_blocks


def test_the_cache_gets_what_weights_others_and_the_largest_step_leave() -> None:
    device = FakeDevice(total_bytes=80 * GIB, free_bytes=60 * GIB, peak=4 * GIB)
    assert fit(device, 0.5) == 16 * 1024 - 1  # 40 allowed - 20 taken - 4; one is the trash block
    assert fit(device, 1.0) == 56 * 1024 - 1


def test_the_cache_of_the_largest_step_is_given_back_and_captured_steps_keep_theirs() -> None:
    device = FakeDevice(total_bytes=80 * GIB, free_bytes=60 * GIB, peak=4 * GIB)
    # 40 allowed - 20 taken, 3 of which come back - 4 - 2
    assert fit(device, 0.5, profile_bytes=3 * GIB, captured_bytes=2 * GIB) == 17 * 1024 - 1


class Graphs:
    """What captures keep on a device: the largest one its rows' memory, each a graph, the first one code."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.is_loaded = False
        self.asked: list[tuple[int, ...]] = []

    def capture(self, sizes: Sequence[int]) -> object:
        self.asked.append(tuple(sizes))
        num_bytes = 100 * max(sizes) + 7 * len(sizes)
        if not self.is_loaded:
            self.device.free_bytes -= 5000
            self.is_loaded = True
        self.device.free_bytes -= num_bytes
        kept = set(sizes)
        weakref.finalize(captured := Captured(kept), self._give_back, num_bytes)
        return captured

    def _give_back(self, num_bytes: int) -> None:
        self.device.free_bytes += num_bytes


class Captured:
    def __init__(self, sizes: set[int]) -> None:
        self.sizes = sizes


def test_captured_steps_of_all_sizes_are_estimated_from_two() -> None:
    device = FakeDevice(total_bytes=GIB, free_bytes=GIB)
    graphs = Graphs(device)
    assert bytes_of_captures(device, graphs.capture, (1, 2, 4, 8)) == 100 * 8 + 7 * 4
    assert device.free_bytes == GIB - 5000, "nothing is kept but what was loaded"
    assert set(graphs.asked) == {(8,), (1, 8)}
    assert bytes_of_captures(device, graphs.capture, (1,)) == 100 + 7


def test_it_gets_no_more_than_all_sequences_can_fill() -> None:
    assert fit(FakeDevice(total_bytes=80 * GIB, free_bytes=60 * GIB), useful=77) == 77


def test_when_nothing_is_left_the_sentence_has_the_numbers() -> None:
    device = FakeDevice(total_bytes=80 * GIB, free_bytes=9 * GIB, peak=2 * GIB)
    with pytest.raises(ModelError) as raised:
        fit(device)
    said = str(raised.value)
    for number in (
        "80.00 GiB",
        "gpu_memory_utilization 0.9",
        "72.00 GiB",
        "71.00 GiB",
        "2048 tokens",
        "2.00 GiB",
    ):
        assert number in said
    assert "Lower max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization" in said


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    with pytest.raises(
        ModelError, match=r"weights need 15.00 GiB, and 10.00 GiB of the GPU's 80.00 GiB are free"
    ):
        check_weights_fit(FakeDevice(total_bytes=80 * GIB, free_bytes=10 * GIB), 15 * GIB)


def test_the_largest_step_has_all_tokens_and_all_sequences() -> None:
    step = largest_step(max_num_seqs=5, num_tokens=33, max_seq_len=512, block_size=16)
    assert len(step.inputs.token_ids) == 33
    assert len(step.sample_rows) == 5
    lone = largest_step(max_num_seqs=1, num_tokens=2048, max_seq_len=512, block_size=16)
    assert len(lone.inputs.token_ids) == 512


def test_a_runner_profiles_and_tells_its_blocks(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(total_bytes=1 << 26, free_bytes=1 << 25, peak=1 << 20)
    runner = load_late(tiny_folder, monkeypatch, device, num_blocks=None, memory_utilization=0.75)
    profiled = num_profile_blocks(2048, runner.max_seq_len, 16) + 1
    given_back = profiled * bytes_per_block(runner._config, 16, torch.float32)
    left = int(0.75 * (1 << 26)) - ((1 << 25) - given_back) - (1 << 20)
    assert runner.num_blocks == left // bytes_per_block(runner._config, 16, torch.float32) - 1
    with pytest.raises(ModelError, match="KV cache needs at least two blocks of 16 tokens"):
        load_late(tiny_folder, monkeypatch, device, num_blocks=None, memory_utilization=0.5)


def test_the_bytes_of_weights_are_what_they_take(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from structlog.testing import capture_logs

    with capture_logs() as logs:
        runner = load_late(tiny_folder, monkeypatch)
    (loaded,) = [line for line in logs if line["event"] == "model_loaded"]
    assert weight_bytes(runner._config, torch.float32) == loaded["weight_bytes"]
