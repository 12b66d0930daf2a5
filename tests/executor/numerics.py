"""Runs our model through chosen steps, and transformers beside it."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from executor.inputs import build_inputs
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow
from executor.runner import ModelRunner

torch.set_num_threads(1)


def load(
    path: Path,
    *,
    dtype: str = "float32",
    num_blocks: int = 64,
    block_size: int = 16,
    quantization: str = "none",
) -> ModelRunner:
    """Load a model with room for a few short sequences."""
    return ModelRunner.load(
        path,
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=8,
    )


def reference_logits(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` of transformers for one sequence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def one_shot_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` of one sequence, computed in one step."""
    return logits_by_steps(runner, [token_ids], [[(0, len(token_ids))]])[0]


def logits_by_steps(
    runner: ModelRunner, sequences: list[list[int]], steps: list[list[tuple[int, int]]], seed: int = 0
) -> list[torch.Tensor]:
    """Run `sequences` through mixed batches, and return the logits of all their tokens.

    `steps` lists, for each step, the index of each sequence that has a row and how many tokens it computes.
    Blocks are given out at random.
    """
    free = list(np.random.default_rng(seed).permutation(runner.num_blocks))
    tables = [
        np.array([free.pop() for _ in range(-(-len(ids) // runner.block_size))], dtype=np.int32)
        for ids in sequences
    ]
    computed = [0] * len(sequences)
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        rows = []
        for index, num_tokens in step:
            start = computed[index]
            token_ids = sequences[index][start : start + num_tokens]
            rows.append(
                Row(index, token_ids, start, tables[index], (SampleRow(SamplingParams(max_tokens=1), 0, ()),))
            )
        batch = build_inputs(rows, runner.block_size)
        bounds = batch.inputs.query_start_loc.tolist()
        every_token = np.arange(bounds[-1], dtype=np.int64)
        logits = runner.logits(dataclasses.replace(batch.inputs, logits_indices=every_token))
        for index, start, end in zip(batch.sampled_seq_ids, bounds[:-1], bounds[1:], strict=True):
            pieces[index].append(logits[start:end].clone())
            computed[index] += end - start
    return [torch.cat(parts) for parts in pieces]
