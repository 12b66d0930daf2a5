"""The promise: the bits of a token's logits depend on the model and its context alone."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor import self_test
from executor.inputs import StepInputs, build_inputs
from executor.plan import SamplingParams, TokenLogprobs
from executor.rows import Row, SampleRow
from executor.runner import ModelRunner
from tests.executor import family_models
from tests.executor.numerics import load, logits_by_steps, one_shot_logits
from tests.rig import tiny_model

torch.set_num_threads(1)

NUM_TOKENS = 200
PROBE = [(7 * place + place * place) % 256 for place in range(NUM_TOKENS)]
NEIGHBOURS = [[(31 * n + 5 * place) % 256 for place in range(1 + 3 * n)] for n in range(63)]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path, num_heads=6, num_kv_heads=2, hidden_size=96, head_dim=32, num_layers=3)


def runner_of(folder: Path, dtype: str, block_size: int = 16) -> ModelRunner:
    return load(folder, dtype=dtype, num_blocks=16_384 // block_size, block_size=block_size)


def chunks(budget: int) -> list[list[tuple[int, int]]]:
    return [[(0, min(budget, NUM_TOKENS - start))] for start in range(0, NUM_TOKENS, budget)]


@pytest.mark.parametrize("block_size", [16, 64, 12])
@pytest.mark.parametrize("budget", [1, 7, 64, 2048])
def test_b63_bits_are_the_same_in_every_chunk_and_block_size(
    budget: int, block_size: int, dtype: str, folder: Path
) -> None:
    alone = one_shot_logits(runner_of(folder, dtype), PROBE)
    cut = logits_by_steps(runner_of(folder, dtype, block_size), [PROBE], chunks(budget), seed=budget)[0]
    assert torch.equal(cut, alone)


def test_b63_bits_are_the_same_among_63_others(dtype: str, folder: Path) -> None:
    runner = runner_of(folder, dtype)
    alone = one_shot_logits(runner, PROBE)
    sequences = [PROBE, *NEIGHBOURS]
    rng = np.random.default_rng(0)
    left = [len(ids) for ids in sequences]
    steps = []
    while any(left):
        step = []
        for index in rng.permutation(len(sequences)).tolist():
            num_tokens = min(left[index], int(rng.choice([1, 1, 1, 5, 40])))
            if num_tokens:
                step.append((index, num_tokens))
                left[index] -= num_tokens
        steps.append(step)
    assert torch.equal(logits_by_steps(runner, sequences, steps, seed=3)[0], alone)


def test_b63_bits_are_the_same_after_preemptions_and_on_a_shared_prefix(dtype: str, folder: Path) -> None:
    runner = runner_of(folder, dtype)
    alone = one_shot_logits(runner, PROBE)
    free = iter(np.random.default_rng(1).permutation(runner.num_blocks).astype(np.int32))

    def computed(blocks: list[np.int32], start: int, end: int) -> torch.Tensor:
        row = Row(
            1, PROBE[start:end], start, np.array(blocks), (SampleRow(SamplingParams(max_tokens=1), 0, ()),)
        )
        inputs = build_inputs([row], 16).inputs
        return runner.logits(replace(inputs, logits_indices=np.arange(end - start))).clone()

    # Preempted after 50 and after 120 tokens: each time all is computed again, elsewhere.
    for preempted_at in (50, 120):
        computed([next(free) for _ in range(13)], 0, preempted_at)
    blocks = [next(free) for _ in range(13)]
    again = torch.cat([computed(blocks, 0, 120), computed(blocks, 120, NUM_TOKENS)])
    assert torch.equal(again, alone)
    # Another sequence takes the first six blocks over and computes the rest.
    hit = computed([*blocks[:6], *(next(free) for _ in range(7))], 96, NUM_TOKENS)
    assert torch.equal(hit, alone[96:])


def test_b63_bits_are_the_same_beside_wrong_guesses_and_where_those_are_overwritten(
    dtype: str, folder: Path
) -> None:
    runner = runner_of(folder, dtype)
    alone = one_shot_logits(runner, PROBE)
    blocks, params = np.arange(14, dtype=np.int32)[::-1].copy(), SamplingParams(max_tokens=NUM_TOKENS)
    found, start = [], 0
    while start < NUM_TOKENS:
        right, wrong = PROBE[start : start + 1 + start % 4], [255 - start % 256] * (start % 7)
        sample_rows = (SampleRow(params, 0, ()),) * (len(right) + len(wrong))
        rows = [
            Row(1, [*right, *wrong], start, blocks, sample_rows),
            Row(2, NEIGHBOURS[start % 60], 0, np.arange(14, 28, dtype=np.int32), (SampleRow(params, 0, ()),)),
        ]
        batch = build_inputs(rows, 16)
        logits = runner.logits(batch.inputs)
        first = batch.sampled_seq_ids.index(1)
        found.append(logits[first : first + len(right)].clone())
        start += len(right)
    assert torch.equal(torch.cat(found), alone)


def test_b63_reported_logprobs_are_the_same_floats_among_others(dtype: str, folder: Path) -> None:
    runner = runner_of(folder, dtype)
    params = SamplingParams(max_tokens=1, temperature=0.7, seed=11, logprobs=20)

    def sampled(sequences: list[list[int]]) -> tuple[int, TokenLogprobs | None]:
        """What the last of `sequences` gets, all of them in one step."""
        free = iter(np.random.default_rng(len(sequences)).permutation(runner.num_blocks).astype(np.int32))
        rows = [
            Row(seq_id, ids, 0, np.array([next(free) for _ in range(13)]), (SampleRow(params, 0, ()),))
            for seq_id, ids in enumerate(sequences)
        ]
        batch = build_inputs(rows, 16)
        result = runner.step(batch.inputs, batch.sample_rows).sampled
        place = batch.sampled_seq_ids.index(len(sequences) - 1)
        return result.token_ids[place], result.logprobs[place]

    alone = sampled([PROBE])
    assert alone[1] is not None
    assert len(alone[1].top_logprobs) == 20
    assert sampled([*NEIGHBOURS[:20], PROBE]) == alone


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen_2_moe", "qwen_3_moe_mixed"])
def test_b63_the_bits_of_a_mixture_of_experts_are_the_same_in_every_chunk_and_company(
    family: str, quantization: str, dtype: str, tmp_path: Path
) -> None:
    folder = family_models.build(tmp_path, family, max_position_embeddings=2048)
    runner = load(folder, dtype=dtype, num_blocks=1024, quantization=quantization)
    assert runner.row_invariant
    probe, others = ([[each % 128 for each in ids] for ids in some] for some in ([PROBE], NEIGHBOURS[:40:5]))
    alone = one_shot_logits(runner, probe[0])
    for budget in (1, 7):
        assert torch.equal(logits_by_steps(runner, probe, chunks(budget), seed=budget)[0], alone)
    steps = [[(0, 13), *((n, 1 + 3 * n) for n in range(1, 9))], [(0, 1)], [(0, 1)], [(0, 185)]]
    assert torch.equal(logits_by_steps(runner, [*probe, *others], steps)[0], alone)
    # More tokens than are mixed at a time.
    long = [(3 * place + place * place) % 128 for place in range(700)]
    steps = [[(0, 200), (1, 700)]]
    assert torch.equal(logits_by_steps(runner, [*probe, long], steps)[0], alone)


def test_the_executor_promises_what_its_self_test_finds(
    dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner_of(folder, dtype).row_invariant
    monkeypatch.setattr(self_test, "is_row_invariant", lambda *_, **__: False)
    assert not runner_of(folder, dtype).row_invariant


def test_the_self_test_finds_sums_that_depend_on_the_number_of_rows() -> None:
    def logits(inputs: StepInputs, noise: float) -> torch.Tensor:
        rows = torch.from_numpy(inputs.token_ids + 100 * inputs.positions).float()[:, None].repeat(1, 8)
        return rows + (noise if len(rows) > 20 else 0.0)

    def verdict(noise: float, block_size: int = 16) -> bool:
        return self_test.is_row_invariant(
            lambda inputs: logits(inputs, noise), vocab_size=50, max_seq_len=100, block_size=block_size
        )

    assert all(verdict(0.0, block_size) for block_size in (1, 5, 16, 64))
    assert not verdict(1.0)


@pytest.mark.model
def test_b63_the_real_models_bits_are_its_own(dtype: str) -> None:
    root = Path(__file__).parents[2]
    place = Path(os.environ.get("CHAIRLIFT_TEST_MODEL", root / "models" / "smollm2"))
    if not place.exists():
        pytest.skip(f"no model in {place}: run `chairlift pull smollm2`")
    runner = load(place, dtype=dtype, num_blocks=64)
    token_ids = [(1000 + 97 * place) % 49_152 for place in range(100)]
    alone = one_shot_logits(runner, token_ids)
    others = [[500 + n] * (3 * n) for n in range(1, 8)]
    steps = [[(0, 13), *((n, n) for n in range(1, 8))] for _ in range(3)]
    steps += [[(0, 1)] for _ in range(11)] + [[(0, 50)]]
    assert torch.equal(logits_by_steps(runner, [token_ids, *others], steps)[0], alone)
