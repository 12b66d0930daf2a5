"""The decoder against transformers: the same logits, however the work is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.numerics import load, logits_by_steps, one_shot_logits, reference_logits
from tests.rig import tiny_model

TEXT = list(b"The slowest rider does not hold the others up: chairs keep moving.")


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 144},
        {"head_dim": 32},
        {"num_layers": 3, "intermediate_size": 96},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 1e-2, "rope_theta": 100_000.0},
    ],
    ids=["gqa", "mha", "mqa", "nine_heads", "wide_heads", "deep", "bias", "eps_and_theta"],
)
def test_logits_equal_the_reference(shape: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, **shape)
    logits = one_shot_logits(load(folder), TEXT)
    torch.testing.assert_close(logits, reference_logits(folder, TEXT), atol=1e-4, rtol=0)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "both"])
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3"])
def test_b116_rope_kinds_equal_the_reference_in_every_spelling(
    kind: str, spelling: str, tmp_path: Path
) -> None:
    names = ("type", "rope_type") if spelling == "both" else (spelling,)
    scaling = ROPE.get(kind, {}) | dict.fromkeys(names, kind)
    folder = tiny_model.build(tmp_path, rope_scaling=scaling, max_seq_len=512)
    token_ids = (TEXT * 7)[:401]
    logits = one_shot_logits(load(folder), token_ids)
    reference = reference_logits(folder, token_ids)
    for position in (10, 100, 400):
        torch.testing.assert_close(logits[position], reference[position], atol=1e-4, rtol=0)
    if kind in {"linear", "llama3"}:
        plain = one_shot_logits(load(tiny_model.build(tmp_path / "plain")), token_ids)
        assert (logits[100] - plain[100]).abs().max() > 0.1


def test_b116_rope_parameters_in_one_entry_equal_the_reference(tmp_path: Path) -> None:
    entry = LLAMA3 | {"rope_type": "llama3", "rope_theta": 50_000.0}
    folder = tiny_model.build(tmp_path, rope_parameters=entry)
    logits = one_shot_logits(load(folder), TEXT)
    torch.testing.assert_close(logits, reference_logits(folder, TEXT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_b114_tied_and_untied_heads_equal_the_reference(tied: bool, tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, tie_word_embeddings=tied)
    logits = one_shot_logits(load(folder), TEXT)
    torch.testing.assert_close(logits, reference_logits(folder, TEXT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [1, 7, 16, 17, 64])
def test_b22_chunks_of_any_size_equal_one_shot(budget: int, tiny_folder: Path) -> None:
    runner = load(tiny_folder)
    whole = one_shot_logits(runner, TEXT)
    chunks = [[(0, min(budget, len(TEXT) - start))] for start in range(0, len(TEXT), budget)]
    cut = logits_by_steps(runner, [TEXT], chunks, seed=1)[0]
    torch.testing.assert_close(cut, whole, atol=1e-4, rtol=0)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Sequences of some lengths, and steps that compute all of their tokens in random pieces."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    left = list(lengths)
    steps = []
    while any(left):
        step = []
        for index, remaining in enumerate(left):
            if remaining and (not step or draw(st.booleans())):
                num_tokens = draw(st.integers(1, remaining))
                step.append((index, num_tokens))
                left[index] -= num_tokens
        steps.append(step)
    return lengths, steps


@settings(max_examples=25, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, 2**32 - 1))
def test_mixed_batches_equal_each_sequence_alone(
    schedule: tuple[list[int], list[list[tuple[int, int]]]], seed: int, tiny_folder: Path
) -> None:
    lengths, steps = schedule
    sequences = [[(index * 31 + place * 7) % 256 for place in range(n)] for index, n in enumerate(lengths)]
    runner = load(tiny_folder)
    together = logits_by_steps(runner, sequences, steps, seed=seed)
    for token_ids, logits in zip(sequences, together, strict=True):
        alone = one_shot_logits(runner, token_ids)
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


def test_b119_bfloat16_is_no_further_from_float32_than_the_reference(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, dtype="bfloat16")
    exact = one_shot_logits(load(folder), TEXT)
    rounded = one_shot_logits(load(folder, dtype="bfloat16"), TEXT)
    reference = reference_logits(folder, TEXT, torch.bfloat16).float()
    assert rounded.dtype == torch.float32
    assert rounded.isfinite().all()
    error, reference_error = ((other - exact).norm() / exact.norm() for other in (rounded, reference))
    assert error <= reference_error < 2e-2
