"""Padded request-level batches: the baseline that goes on computing finished rows until the batch ends.

The seat, blocks and context of a finished member go to a padding row, which decodes on and delivers nothing.
For comparison only; pure, and called by the core in one place each.
"""

from scheduler.batching import Batching
from scheduler.executor_state import ExecutorState
from scheduler.sequence import Event, Finish, FinishReason, Sequence


def keeps_seat(state: ExecutorState, seq: Sequence, finish: Finish) -> bool:
    """Whether a padding row takes the place of `seq`, which ends with `finish`."""
    return (
        state.batching is Batching.REQUEST_PADDED
        and not seq.is_padding
        and finish.reason in {FinishReason.STOP, FinishReason.LENGTH}
        and len(seq.token_ids) < state.max_total_tokens
        and seq.num_computed_tokens >= len(seq.token_ids) - 1  # else its KV is not there
        and any(other is not seq and not other.is_padding for other in state.running.values())
    )


def padding_of(state: ExecutorState, seq: Sequence, block_table: list[int]) -> Sequence:
    """A row that continues where `seq` has ended."""
    pad = Sequence(
        seq.request, seq.tenant, seq.token_ids[:], len(seq.token_ids), state.max_total_tokens, seq.order
    )
    pad.is_padding = True
    pad.num_computed_tokens = len(pad.token_ids) - 1  # its KV is there; the last token was never fed
    pad.num_computable_tokens = len(pad.token_ids)
    pad.block_table = block_table
    pad.move(Event.ADMIT)
    return pad


def is_all_padding(state: ExecutorState) -> bool:
    """Whether only padding is left in the batch."""
    return all(seq.is_padding for seq in state.running.values())
