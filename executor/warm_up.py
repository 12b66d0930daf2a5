"""Steps that a GPU computes before its executor is ready, so that no kernel is built while a request waits.

There is a step for each form that attention can have: decode rows whose contexts are cut into parts, decode
rows whose contexts are not, and chunks. The filters, which come after a step's logits, are run as well. A
kernel that is compiled at its first launch is compiled then, for every kind of layer that the model has.
These steps write to the block that belongs to no sequence.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from executor.attention.splits import num_whole_rows
from executor.captured import nothing_but_padding
from executor.inputs import StepInputs

NUM_CHUNK_TOKENS = 2


def steps(*, num_kv_heads: int, max_num_seqs: int, trash_block_id: int, block_size: int) -> list[StepInputs]:
    """The forms that a plan of `max_num_seqs` rows may have; one row of each is brought to its logits."""
    sizes = [1, *(rows for rows in (num_whole_rows(num_kv_heads),) if 1 < rows <= max_num_seqs)]
    decodes = [
        replace(
            nothing_but_padding(rows, 1, trash_block_id, block_size), logits_indices=np.zeros(1, np.int64)
        )
        for rows in sizes
    ]
    return [*decodes, _chunk(trash_block_id, block_size)]


def filtered_row(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What `late_sampler.FilterRows` takes: a row, and every filter."""
    weights = torch.ones(1, vocab_size, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    return weights, rows, torch.tensor([[1.0, 0.5, 0.5]], dtype=torch.float64, device=device)


def _chunk(trash_block_id: int, block_size: int) -> StepInputs:
    positions = np.arange(NUM_CHUNK_TOKENS, dtype=np.int64)
    return StepInputs(
        token_ids=np.zeros(NUM_CHUNK_TOKENS, dtype=np.int64),
        positions=positions,
        slot_mapping=trash_block_id * block_size + positions % block_size,
        query_start_loc=np.array([0, NUM_CHUNK_TOKENS], dtype=np.int32),
        seq_lens=np.array([NUM_CHUNK_TOKENS], dtype=np.int32),
        block_tables=np.full((1, -(-NUM_CHUNK_TOKENS // block_size)), trash_block_id, dtype=np.int32),
        logits_indices=np.array([NUM_CHUNK_TOKENS - 1]),
        num_decodes=0,
        max_query_len=NUM_CHUNK_TOKENS,
        max_seq_len=NUM_CHUNK_TOKENS,
    )
