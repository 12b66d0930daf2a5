"""Decode steps that were captured once, each for one number of rows, and are replayed for other sequences.

A step of R rows with one token each is padded to the next size that was captured; rows of padding write to
and read from the block that belongs to no sequence. A captured step reads from the same memory each time:

    token_ids, positions, slot_mapping, seq_lens   [largest size]
    block_tables                                   [largest size | blocks of the longest sequence]
    result                                         [largest size | hidden_size]

A step's arrays are copied into the first rows of these, on the device. A table's columns past the longest
context keep their old contents, and are not read. All sizes are views of the same memory, so one runs at a
time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from executor.accelerator import Accelerator, Graph
from executor.inputs import StepInputs
from executor.kv_cache import KVCache
from executor.model.decoder import Decoder
from executor.operations.plain import PlainOperations
from executor.staging import StepArrays, on_device

MOST_ROWS: Final = 512
_STRIDE: Final = 16


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of sixteen, until one holds `max_num_seqs` or is the largest."""
    most = min(-(-max_num_seqs // _STRIDE) * _STRIDE, MOST_ROWS)
    sizes = (1, 2, 4, 8, *range(_STRIDE, most + 1, _STRIDE))
    return tuple(size for size in sizes if size < 2 * max_num_seqs)


def is_decode(inputs: StepInputs) -> bool:
    """Whether all of a step's rows have one token, and nothing is asked of a prompt."""
    return inputs.max_query_len == 1 and not inputs.scored


def padded(inputs: StepInputs, num_rows: int, trash_block_id: int, block_size: int) -> StepInputs:
    """A decode step with rows of padding at its end, each a context of one token in the trash block."""
    missing = num_rows - len(inputs.seq_lens)
    tables = np.full((missing, inputs.block_tables.shape[1]), trash_block_id, dtype=np.int32)
    return replace(
        inputs,
        token_ids=np.concatenate([inputs.token_ids, np.zeros(missing, dtype=np.int64)]),
        positions=np.concatenate([inputs.positions, np.zeros(missing, dtype=np.int64)]),
        slot_mapping=np.concatenate(
            [inputs.slot_mapping, np.full(missing, trash_block_id * block_size, dtype=np.int64)]
        ),
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=np.concatenate([inputs.seq_lens, np.ones(missing, dtype=np.int32)]),
        block_tables=np.concatenate([inputs.block_tables, tables]),
        num_decodes=num_rows,
    )


def nothing_but_padding(num_rows: int, max_blocks: int, trash_block_id: int, block_size: int) -> StepInputs:
    """A decode step of padding alone, whose tables have `max_blocks` columns."""
    no_row = StepInputs(
        token_ids=np.empty(0, dtype=np.int64),
        positions=np.empty(0, dtype=np.int64),
        slot_mapping=np.empty(0, dtype=np.int64),
        query_start_loc=np.zeros(1, dtype=np.int32),
        seq_lens=np.empty(0, dtype=np.int32),
        block_tables=np.empty((0, max_blocks), dtype=np.int32),
        logits_indices=np.arange(num_rows),
        num_decodes=0,
        max_query_len=1,
        max_seq_len=max_blocks * block_size,
    )
    return padded(no_row, num_rows, trash_block_id, block_size)


class CapturedDecode:
    """The captured decode steps of one model over one cache."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Decoder,
        operations: PlainOperations,
        kv_cache: KVCache,
        *,
        sizes: Sequence[int],
        max_seq_len: int,
    ) -> None:
        """Captures all `sizes`, the largest first: the smaller ones fit into the memory that it took."""
        self._kv_cache = kv_cache
        self._sizes = sorted(sizes)
        max_blocks = -(-max_seq_len // kv_cache.block_size)
        idle = nothing_but_padding(self._sizes[-1], max_blocks, kv_cache.trash_block_id, kv_cache.block_size)
        self._arrays = on_device(idle, accelerator.device)
        self._result: Tensor | None = None
        self._graphs: dict[int, Graph] = {}
        for size in reversed(self._sizes):
            inputs = nothing_but_padding(size, max_blocks, kv_cache.trash_block_id, kv_cache.block_size)
            arrays = self._first(size)

            def work(inputs: StepInputs = inputs, arrays: StepArrays = arrays, size: int = size) -> None:
                hidden = model.layers(operations.arrange(inputs, arrays), kv_cache)
                if self._result is None:
                    self._result = torch.empty_like(hidden.normed)
                self._result[:size].copy_(hidden.normed)

            self._graphs[size] = accelerator.capture(work)

    def size_for(self, inputs: StepInputs) -> int | None:
        """The size that the step is to be padded to; None when it must run as it is."""
        if not is_decode(inputs):
            return None
        return next((size for size in self._sizes if size >= len(inputs.seq_lens)), None)

    def padded(self, inputs: StepInputs, size: int) -> StepInputs:
        """The step as it is captured."""
        return padded(inputs, size, self._kv_cache.trash_block_id, self._kv_cache.block_size)

    def run(self, arrays: StepArrays, size: int) -> Tensor:
        """What the layers make of a padded step's tokens, `[size, hidden_size]`; good until the next run."""
        ours = self._first(size)
        ours.token_ids.copy_(arrays.token_ids)
        ours.positions.copy_(arrays.positions)
        ours.slot_mapping.copy_(arrays.slot_mapping)
        ours.seq_lens.copy_(arrays.seq_lens)
        ours.block_tables[:, : arrays.block_tables.shape[1]].copy_(arrays.block_tables)
        self._graphs[size].replay()
        assert self._result is not None, "made by the first capture"
        return self._result[:size]

    def _first(self, size: int) -> StepArrays:
        arrays = self._arrays
        return StepArrays(
            token_ids=arrays.token_ids[:size],
            positions=arrays.positions[:size],
            slot_mapping=arrays.slot_mapping[:size],
            query_start_loc=arrays.query_start_loc[: size + 1],
            seq_lens=arrays.seq_lens[:size],
            block_tables=arrays.block_tables[:size],
            logits_indices=arrays.logits_indices[:size],
        )
