"""Captured decode steps, done again for other sequences, beside the same steps that were not captured."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor.accelerator import DeviceMemory
from executor.attention import paged_triton
from executor.attention.base import AttentionBackend
from executor.attention.flash2 import Flash2Attention
from executor.attention.flash3 import Flash3Attention
from executor.captured import captured_sizes, padded
from executor.inputs import StepBatch, StepInputs, build_inputs
from executor.plan import SamplingParams
from executor.rows import IN_FLIGHT, Row, SampleRow
from executor.runner import ModelRunner
from tests.executor.late import load_late
from tests.rig import fake_flash
from tests.rig.fake_device import FakeDevice, as_one_kernel

torch.set_num_threads(1)


def test_sizes_are_small_ones_then_multiples_of_sixteen_up_to_the_most_sequences() -> None:
    assert captured_sizes(1) == (1,)
    assert captured_sizes(5) == (1, 2, 4, 8)
    assert captured_sizes(33) == (1, 2, 4, 8, 16, 32, 48)
    assert captured_sizes(256)[-1] == 256
    assert captured_sizes(10_000)[-1] == 512
    for most in range(1, 513):
        assert captured_sizes(most)[-1] >= most


def decode_step(
    lengths: list[int], num_blocks: int, block_size: int, seed: int, params: SamplingParams | None = None
) -> StepBatch:
    """Rows with one token at the end of contexts of `lengths`, on random blocks, each of which samples."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(num_blocks))
    params = params or SamplingParams(max_tokens=9, temperature=1.0, seed=seed)
    rows = []
    for seq_id, length in enumerate(lengths, start=1):
        blocks = np.array([free.pop() for _ in range(-(-length // block_size))], dtype=np.int32)
        rows.append(Row(seq_id, [int(rng.integers(256))], length - 1, blocks, (SampleRow(params, 0, ()),)))
    return build_inputs(rows, block_size)


def test_padding_changes_no_row_and_writes_where_nobody_reads() -> None:
    inputs = decode_step([5, 40, 17], 10, 16, 0).inputs
    whole = padded(inputs, 8, trash_block_id=10, block_size=16)
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "block_tables"):
        assert (getattr(whole, name)[:3] == getattr(inputs, name)).all()
        assert len(getattr(whole, name)) == 8
    assert (whole.slot_mapping[3:] // 16 == 10).all()
    assert (whole.block_tables[3:] == 10).all()
    assert (whole.logits_indices == inputs.logits_indices).all()


def contexts(runner: ModelRunner, seed: int) -> None:
    """Numbers in the cache, as if something had been computed."""
    rng = np.random.default_rng(seed)
    for layer in runner._kv_cache._layers:
        for side in (layer.keys, layer.values):
            side.copy_(torch.from_numpy(rng.standard_normal(side.shape)))


def capturing(
    backend: type[AttentionBackend],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    device: FakeDevice,
    **options: Any,
) -> ModelRunner:
    """A runner that takes the back end though it stands on a CPU."""
    monkeypatch.setattr(backend, "refusal", classmethod(lambda cls, spec: None))
    return load_late(folder, monkeypatch, device, attention=backend.name, **({"max_num_seqs": 5} | options))


class TritonInOneCall(paged_triton.TritonAttention):
    """Our kernels in the interpreter, which a graph of torch's operations does not see."""

    def forward(self, query: Any, cache: Any, metadata: Any, *, window: int | None) -> Any:
        attended = super().forward
        return as_one_kernel(lambda: attended(query, cache, metadata, window=window))


PLANS = [[3, 40, 17, 1, 33], [60, 2, 9], [16], [1, 1, 1, 1, 90]]
"""Lengths of the rows' contexts."""


@pytest.mark.parametrize(
    ("backend", "options", "plans"),
    [
        (Flash3Attention, {"dtype": "bfloat16"}, PLANS),
        (Flash2Attention, {"dtype": "bfloat16", "block_size": 256, "num_blocks": 8}, PLANS),
        (TritonInOneCall, {"dtype": "float32", "max_num_seqs": 2}, [[3, 40], [20, 5]]),
    ],
    ids=["flash3", "flash2", "triton"],
)
def test_two_different_plans_through_one_capture_equal_steps_that_were_not_captured(
    backend: type[AttentionBackend],
    options: dict[str, Any],
    plans: list[list[int]],
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend is TritonInOneCall:
        pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
        monkeypatch.setattr("executor.selection.BACKENDS", (TritonInOneCall,))
        monkeypatch.setattr(paged_triton, "num_splits", lambda *_: 2)  # the interpreter is slow
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash.flash_attn())
    device = FakeDevice()
    runner = capturing(backend, monkeypatch, tiny_folder, device, **options)
    sizes = captured_sizes(options.get("max_num_seqs", 5))
    assert len(device.graphs) == len(sizes)
    contexts(runner, 1)
    pipeline = runner.pipeline
    assert pipeline is not None
    for seed, lengths in enumerate(plans):
        batch = decode_step(lengths, runner.num_blocks, runner.block_size, seed)
        size = next(size for size in sizes if size >= len(lengths))
        num_replays = sum(graph.num_replays for graph in device.graphs)
        output = pipeline.collect(pipeline.launch(batch, lambda: None))
        assert sum(graph.num_replays for graph in device.graphs) == num_replays + 1
        # The same padded step, operation by operation.
        eager = padded(batch.inputs, size, runner._kv_cache.trash_block_id, runner.block_size)
        expected = runner.step(eager, batch.sample_rows)
        assert output.sampled == expected.sampled
        captured = pipeline._captured
        assert captured is not None
        with torch.inference_mode():
            hidden = runner._model.forward(eager, runner._kv_cache)
            assert captured._result is not None
            assert captured._result[:size].equal(hidden.normed)


def test_a_step_that_is_no_decode_step_or_too_large_runs_as_it_is(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    device = FakeDevice()
    runner = capturing(Flash3Attention, monkeypatch, tiny_folder, device, dtype="bfloat16")
    pipeline = runner.pipeline
    assert pipeline is not None
    params = SamplingParams(max_tokens=9, temperature=0.0)
    chunk = Row(1, [1, 2, 3], 0, np.array([0], dtype=np.int32), (SampleRow(params, 0, ()),))
    for batch in (build_inputs([chunk], 16), decode_step([3] * 9, 64, 16, 0)):
        output = pipeline.collect(pipeline.launch(batch, lambda: None))
        assert len(output.sampled.token_ids) == len(batch.sample_rows)
    assert not any(graph.num_replays for graph in device.graphs)


def test_the_reference_is_not_captured(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    load_late(tiny_folder, monkeypatch, device)
    assert device.graphs == []


def test_a_back_end_that_works_out_numbers_on_the_host_is_found_by_the_capture(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake graph's own proof: what is stale in a graph shows."""

    class Stale(Flash3Attention):
        name = "stale"

        def prepare(self, inputs: StepInputs, arrays: Any) -> Any:
            metadata = super().prepare(inputs, arrays)
            return replace(metadata, seq_lens=metadata.seq_lens.clone() * 0 + int(inputs.seq_lens.max()))

    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    monkeypatch.setattr("executor.selection.BACKENDS", (Stale,))
    device = FakeDevice()
    runner = capturing(Stale, monkeypatch, tiny_folder, device, dtype="bfloat16")
    contexts(runner, 1)
    pipeline = runner.pipeline
    assert pipeline is not None
    batch = decode_step([60], 64, 16, 0)
    pipeline.collect(pipeline.launch(batch, lambda: None))
    with torch.inference_mode():
        hidden = runner._model.forward(batch.inputs, runner._kv_cache)
    assert pipeline._captured is not None
    assert pipeline._captured._result is not None
    assert not pipeline._captured._result[:1].equal(hidden.normed)


def test_a_captured_step_is_fed_by_the_step_before_on_the_device(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    device = FakeDevice()
    runner = capturing(Flash3Attention, monkeypatch, tiny_folder, device, dtype="bfloat16")
    contexts(runner, 1)
    pipeline = runner.pipeline
    assert pipeline is not None
    first = pipeline.launch(decode_step([30, 8, 21], 64, 16, 0), lambda: None)
    # The second step has its rows in another order, one row of the first not at all, and one that is new.
    batch = decode_step([22, 31, 5], 64, 16, 1)
    late = replace(
        batch,
        inputs=replace(batch.inputs, token_ids=np.array([IN_FLIGHT, IN_FLIGHT, batch.inputs.token_ids[2]])),
        sampled_seq_ids=[3, 1, 9],
    )
    second = pipeline.launch(late, lambda: None)
    chosen = pipeline.collect(first).sampled.token_ids
    fed = pipeline.collect(second).sampled
    assert sum(graph.num_replays for graph in device.graphs) == 2
    token_ids = np.array([chosen[2], chosen[0], batch.inputs.token_ids[2]])
    pipeline.forget()
    known = replace(batch, inputs=replace(batch.inputs, token_ids=token_ids))
    assert pipeline.collect(pipeline.launch(known, lambda: None)).sampled == fed


def test_what_a_blocks_last_owner_left_does_no_harm_to_the_next_one(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3 multiplies the slots behind a context with zero, and NaN times zero is NaN."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    runner = capturing(Flash3Attention, monkeypatch, tiny_folder, FakeDevice(), dtype="bfloat16")
    pipeline = runner.pipeline
    assert pipeline is not None
    params = SamplingParams(max_tokens=9, temperature=0.0)
    blocks = np.array([5, 9, 2], dtype=np.int32)

    def row(tokens: list[int], first: int) -> StepBatch:
        return build_inputs([Row(1, tokens, first, blocks, (SampleRow(params, 0, ()),))], 16)

    def launched(batch: StepBatch) -> Any:
        return pipeline.collect(pipeline.launch(batch, lambda: None)).sampled

    def at_once(batch: StepBatch) -> Any:
        return runner.step(batch.inputs, batch.sample_rows).sampled

    chosen = []
    for computed in (launched, at_once):
        for layer in runner._kv_cache._layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        # A chunk, a token in the block that it began, a token that begins one.
        sampled = [computed(row([7] * 20, 0)), computed(row([8], 20)), computed(row([9] * 11, 21))]
        sampled.append(computed(row([10], 32)))
        assert [each.errors for each in sampled] == [[None]] * 4
        chosen.append([each.token_ids for each in sampled])
    assert chosen[0] == chosen[1]


class WithLargeGraphs(FakeDevice):
    """Each graph takes ten bytes, for good."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free_bytes - 10 * len(self.graphs), self.total_bytes)


def test_the_memory_of_captured_steps_is_left_to_them(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    device = WithLargeGraphs(total_bytes=1 << 26, free_bytes=1 << 25)
    with capture_logs() as logs:
        capturing(Flash3Attention, monkeypatch, tiny_folder, device, dtype="bfloat16", num_blocks=None)
    (profiled,) = [line for line in logs if line["event"] == "memory_profiled"]
    (captured,) = [line for line in logs if line["event"] == "decode_captured"]
    assert profiled["captured_bytes"] == 10 * len(captured["sizes"]) == 40
