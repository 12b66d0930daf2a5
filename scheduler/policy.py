"""Who runs next, who may enter, who must go: decisions from counts.

Pure functions over numbers and sequences' numbers: no block ids, no clock, no I/O. Laws of these functions
are tested with integers. The order of service is FCFS within a priority class:

- Waiting: lower priority value first; then those that ran before and lost their blocks; then arrival.
- Running: every sequence with one token to compute (it decodes) before those with more (they catch up on
  prompts in chunks), each group in order of admission. So a long prompt never stalls running streams.
- Out of blocks: the victim is the least important, latest arrived one that has won a token since it was
  admitted. So nothing is thrown out twice without progress.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows. None leaves it to the executor's own ceiling."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    window: int = 2
    max_step_us: float | None = None  # wanted step duration while anything decodes
    prefix_caching: bool = True
    watermark: float = 0.01  # share of blocks kept free at admission, for the running to grow into
    orphan_grace_seconds: float = 10.0
    result_keep_seconds: float = 60.0


def waiting_key(seq: Sequence) -> tuple[int, bool, float, int]:
    """Sort key of the waiting: the smallest is served first."""
    return (seq.request.priority, not seq.has_started, seq.request.arrival, seq.order)


def victim(running: Iterable[Sequence]) -> Sequence | None:
    """Whom to preempt, or None when everybody has only just come.

    A padding row goes before any real one.
    """
    candidates = [seq for seq in running if seq.has_progressed or seq.is_padding]
    return max(
        candidates,
        key=lambda seq: (seq.is_padding, seq.request.priority, seq.request.arrival, seq.order),
        default=None,
    )


def blocks_to_enter(
    seq: Sequence, running: Iterable[Sequence], block_size: int, watermark_blocks: int
) -> int:
    """Free blocks that must be there before `seq` enters beside `running`.

    Its whole context, never just the next chunk. A newcomer leaves a watermark free for the others to grow
    into. One that was preempted must be expected to run at least as long as its recompute is large: it also
    waits for the room that it and the running will take over that many tokens. Otherwise it would be thrown
    out again before the recompute has paid, for ever.
    """
    context = -(-len(seq.token_ids) // block_size)
    if not seq.num_preemptions:
        return context + watermark_blocks
    horizon = len(seq.token_ids)
    return context + sum(_growth(other, horizon, block_size) for other in [seq, *running])


def _growth(seq: Sequence, num_tokens: int, block_size: int) -> int:
    """Blocks beyond its present ones that `seq` takes while it wins `num_tokens` more tokens."""
    held = len(seq.block_table) or -(-len(seq.token_ids) // block_size)
    future = min(len(seq.token_ids) + num_tokens, seq.max_len - 1)
    return max(0, -(-future // block_size) - held)
