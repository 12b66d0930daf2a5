"""The plan that is being made, as columns. Pure; lives for one call of `schedule`."""

import math

from scheduler.blocks import BlockManager
from scheduler.plan import NewSequence
from scheduler.sequence import Sequence
from scheduler.token_ids import TokenIds


class PlanBuilder:
    """Columns that grow row by row; `budget` is the number of tokens that may still be given out."""

    __slots__ = (
        "admitted",
        "best_other",
        "budget",
        "draft_tokens",
        "filled",
        "grown_seq_ids",
        "new_block_ids",
        "num_new_blocks",
        "num_samples",
        "num_tokens",
        "outgrown",
        "positions_sum",
        "recompute_budget",
        "rows",
        "seq_ids",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.recompute_budget = budget  # the part of it for sequences lost with their executor
        self.best_other = math.inf  # best importance among those that also want the rest
        self.rows: list[Sequence] = []
        self.seq_ids: list[int] = []
        self.num_tokens: list[int] = []
        self.num_samples: list[int] = []
        self.positions_sum = 0
        self.draft_tokens: dict[int, TokenIds] = {}
        self.admitted: list[NewSequence] = []
        self.grown_seq_ids: list[int] = []
        self.num_new_blocks: list[int] = []
        self.new_block_ids: list[int] = []
        self.filled: list[tuple[Sequence, int, int]] = []  # chunks, which may fill blocks
        self.outgrown: list[tuple[Sequence, int, int]] = []  # decoding rows whose previous block is full

    def chunk(self, seq: Sequence, limit: int) -> None:
        """Gives `seq` as many of its uncomputed tokens as `limit` allows."""
        position = seq.num_computed_tokens
        count = min(seq.num_computable_tokens - position, limit)
        reached = position + count == seq.num_computable_tokens
        self.rows.append(seq)
        self.seq_ids.append(seq.seq_id)
        self.num_tokens.append(count)
        self.num_samples.append(1 if reached else 0)
        self.positions_sum += position
        self.budget -= count
        seq.num_computed_tokens = position + count
        self.filled.append((seq, seq.seq_id, position + count))
        if reached and seq.num_computable_tokens < seq.max_len - 1:
            seq.num_computable_tokens += 1  # the token this step will sample

    def grow(self, growing: list[Sequence], blocks: BlockManager) -> None:
        """Gives each of these one more block."""
        block_ids = blocks.allocate(len(growing))
        self.num_new_blocks += [1] * len(growing)
        self.new_block_ids += block_ids
        for seq, block_id in zip(growing, block_ids, strict=True):
            seq.block_table.append(block_id)
            seq.num_slots += blocks.block_size
            self.grown_seq_ids.append(seq.seq_id)
            # The blocks before it are fully computed once this plan has been answered.
            self.outgrown.append((seq, seq.seq_id, seq.num_computed_tokens))

    def add_draft_tokens(self, row: int, token_ids: TokenIds) -> None:
        """Adds draft tokens to a row of one token, which is the last known one of its sequence."""
        seq = self.rows[row]
        self.draft_tokens[seq.seq_id] = token_ids
        self.num_tokens[row] += len(token_ids)
        self.budget -= len(token_ids)
        seq.num_computable_tokens = seq.num_computed_tokens
