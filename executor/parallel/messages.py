"""What the first rank tells the others before each step, as bytes. Pure numpy.

The arrays of `StepInputs` as they are in memory, after a head of int64 numbers that says how long they are.
The others compute and never sample, so they are not sent who asked for what. Of the stretches to score, they
only need to know which tokens of the step belong to them.

    head       | scored                 | token_ids, positions, ... block_tables
    int64 [8]  | int64 [num_scored, 2]  | each in its own type
"""

from typing import Final

import numpy as np

from executor.inputs import Scored, StepInputs
from executor.rows import PromptStretch

_HEAD: Final = np.dtype(np.int64)
_HEAD_LENGTH: Final = 8


def packed(inputs: StepInputs) -> bytes:
    """`inputs` as bytes."""
    head = [
        *(len(inputs.token_ids), len(inputs.seq_lens), inputs.block_tables.shape[1]),
        *(len(inputs.logits_indices), len(inputs.scored)),
        *(inputs.num_decodes, inputs.max_query_len, inputs.max_seq_len),
    ]
    scored = [(each.first_index, len(each.stretch.token_ids)) for each in inputs.scored]
    arrays = (
        *(inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.logits_indices),
        *(inputs.query_start_loc, inputs.seq_lens, inputs.block_tables),
    )
    return b"".join(
        [np.array(head, dtype=_HEAD).tobytes(), np.array(scored, dtype=_HEAD).tobytes()]
        + [array.tobytes() for array in arrays]
    )


def unpacked(message: bytes) -> StepInputs:
    """What `packed` was given, but for the tokens of scored stretches, which are zeros."""
    parts = _Parts(message)
    num_tokens, num_rows, max_blocks, num_sampling, num_scored, *counts = parts.int64(_HEAD_LENGTH).tolist()
    num_decodes, max_query_len, max_seq_len = counts
    scored = parts.int64(2 * num_scored).reshape(-1, 2).tolist()
    token_ids, positions, slot_mapping = (parts.int64(num_tokens) for _ in range(3))
    logits_indices = parts.int64(num_sampling)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        logits_indices=logits_indices,
        query_start_loc=parts.int32(num_rows + 1),
        seq_lens=parts.int32(num_rows),
        block_tables=parts.int32(num_rows * max_blocks).reshape(num_rows, max_blocks),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scored=tuple(_scored(first_index, count) for first_index, count in scored),
    )


def _scored(first_index: int, num_tokens: int) -> Scored:
    return Scored(first_index, PromptStretch(0, 1, [0] * num_tokens, 0))


class _Parts:
    """Arrays one after the other, each with memory of its own."""

    def __init__(self, message: bytes) -> None:
        self._message = memoryview(message)
        self._at = 0

    def int64(self, count: int) -> np.ndarray:
        return self._next(np.dtype(np.int64), count)

    def int32(self, count: int) -> np.ndarray:
        return self._next(np.dtype(np.int32), count)

    def _next(self, dtype: np.dtype, count: int) -> np.ndarray:
        array = np.frombuffer(self._message, dtype, count, self._at).copy()
        self._at += array.nbytes
        return array
