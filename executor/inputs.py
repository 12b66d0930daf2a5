"""From the rows of a step to the arrays a model reads. Pure numpy.

Must not know: torch, protos, why a row was planned. None of this is sent over the wire: positions, slots and
lengths are derived from block tables and counts.

    rows (decode rows first)      row 0    row 1    row 2 .............   row 3 ......
    token_ids, positions, slots   [ t ]    [ t ]    [ t  t  t  t  t  t ]  [ t  t  t ]     T tokens, no padding
    query_start_loc               0        1        2                     8          11
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.rows import PromptStretch, Row, SampleRow


@dataclass(frozen=True, slots=True)
class Scored:
    """A stretch of one row's prompt of which log-probabilities are wanted.

    Attributes:
        first_index: index into T of the token before the stretch: its distribution speaks of the first one.
        stretch: the tokens, and how many alternatives beside each.
    """

    first_index: int
    stretch: PromptStretch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass over T tokens of R rows that sample S tokens. Decode rows (one token) come first.

    Attributes:
        token_ids: int64 [T]; IN_FLIGHT where the device alone knows it yet.
        positions: int64 [T], position of each token in its sequence.
        slot_mapping: int64 [T], where its KV is written: `block_id * block_size + offset`.
        query_start_loc: int32 [R + 1], where each row's tokens begin; the last entry is T.
        seq_lens: int32 [R], context of each row, its new tokens included.
        block_tables: int32 [R, max_blocks], padded with 0.
        logits_indices: int64 [S], index into T of the token after which each token is sampled: the last known
            one of a sampling row, and its draft tokens.
        num_decodes: rows with one token.
        max_query_len: most tokens of a row.
        max_seq_len: longest context.
        scored: stretches of prompts whose log-probabilities are wanted.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logits_indices: NDArray[np.int64]
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step ready for the device: its inputs, how its S tokens are chosen, and whose those are."""

    inputs: StepInputs
    sample_rows: list[SampleRow]
    sampled_seq_ids: list[int]


def build_inputs(rows: Sequence[Row], block_size: int) -> StepBatch:
    """Lay the rows out for one forward pass. At least one row."""
    ordered = [row for row in rows if len(row.token_ids) == 1]
    num_decodes = len(ordered)
    ordered += [row for row in rows if len(row.token_ids) > 1]

    query_lens = np.array([len(row.token_ids) for row in ordered], dtype=np.int32)
    query_start_loc = np.zeros(len(ordered) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    first_positions = np.array([row.first_position for row in ordered], dtype=np.int32)
    seq_lens = first_positions + query_lens

    # A row may own blocks past its context; only those that hold context matter to the kernels.
    used_blocks = -(-seq_lens // block_size)
    block_tables = np.zeros((len(ordered), int(used_blocks.max())), dtype=np.int32)
    for table, row, used in zip(block_tables, ordered, used_blocks.tolist(), strict=True):
        table[:used] = row.block_ids[:used]

    # Token i of the step is token (i - start of its row) of its row.
    row_of_token = np.repeat(np.arange(len(ordered)), query_lens)
    starts = (first_positions - query_start_loc[:-1]).astype(np.int64)
    positions = np.arange(query_start_loc[-1], dtype=np.int64) + starts[row_of_token]
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)

    # Tokens are sampled after the last ones of a row: after its draft tokens, and the one before them.
    sampling = [i for i, row in enumerate(ordered) for _ in row.sample_rows]
    from_end = np.array([i for row in ordered for i in range(len(row.sample_rows), 0, -1)], dtype=np.int64)
    return StepBatch(
        inputs=StepInputs(
            token_ids=np.array([t for row in ordered for t in row.token_ids], dtype=np.int64),
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            logits_indices=query_start_loc[1:][sampling].astype(np.int64) - from_end,
            num_decodes=num_decodes,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            scored=tuple(
                # The first token of the row is at `first_position`, and speaks of the one behind it.
                Scored(int(start) + row.scored.first_position - 1 - row.first_position, row.scored)
                for start, row in zip(query_start_loc[:-1], ordered, strict=True)
                if row.scored is not None
            ),
        ),
        sample_rows=[sample_row for row in ordered for sample_row in row.sample_rows],
        sampled_seq_ids=[ordered[i].seq_id for i in sampling],
    )
