"""Whether a loaded model's bits depend on the batch: tested at the start, not assumed.

The same few tokens are computed at once, and then in pieces beside another sequence. Kernels that sum in one
order whatever the batch give the same bits; a compiler, a processor or an emulator that breaks this is found
here, before anything is promised to a client.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
from torch import Tensor

from executor.inputs import StepInputs, build_inputs
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow

NUM_TOKENS: Final = 35
"""More than the rows of one product, and no round number of them."""
CUTS: Final = (0, 1, 17, NUM_TOKENS)
NUM_NEIGHBOUR_TOKENS: Final = 7


def num_blocks(block_size: int) -> int:
    """Blocks of the cache that `is_row_invariant` writes into."""
    return 2 * -(-NUM_TOKENS // block_size) + -(-NUM_NEIGHBOUR_TOKENS // block_size)


def is_row_invariant(
    logits: Callable[[StepInputs], Tensor], *, vocab_size: int, max_seq_len: int, block_size: int
) -> bool:
    """Whether the logits of a step, `[num_sampling_rows, vocab_size]`, have the same bits in every company.

    `logits` computes a step over a cache of at least `num_blocks(block_size)` blocks. Which steps are made
    does not depend on what they give: the ranks of a model make them together.
    """
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, vocab_size, min(NUM_TOKENS, max_seq_len)).tolist()
    neighbour = rng.integers(0, vocab_size, min(NUM_NEIGHBOUR_TOKENS, max_seq_len)).tolist()
    free = np.arange(num_blocks(block_size), dtype=np.int32)
    per_sequence = -(-NUM_TOKENS // block_size)
    first, second, third = np.split(free, [per_sequence, 2 * per_sequence])

    def row(ids: list[int], start: int, end: int, block_ids: np.ndarray) -> Row:
        return Row(0, ids[start:end], start, block_ids, (SampleRow(SamplingParams(max_tokens=1), 0, ()),))

    def every_logit(rows: list[Row]) -> Tensor:
        inputs = build_inputs(rows, block_size).inputs
        return logits(replace(inputs, logits_indices=np.arange(len(inputs.token_ids))))

    at_once = every_logit([row(token_ids, 0, len(token_ids), first)]).clone()
    company = row(neighbour, 0, len(neighbour), third)
    is_invariant = True
    for start, end in pairwise(CUTS):
        piece = row(token_ids, start, min(end, len(token_ids)), second[::-1])
        if not piece.token_ids:
            break
        # Rows of one token come first: the piece stands before its company or after it.
        together = every_logit([company, piece] if len(piece.token_ids) > 1 else [piece, company])
        at = len(neighbour) if len(piece.token_ids) > 1 else 0
        ours = together[at : at + len(piece.token_ids)]
        is_invariant &= ours.equal(at_once[start : start + len(ours)])
    return is_invariant
