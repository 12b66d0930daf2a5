"""Decides which sequences must leave a draining executor: those that it is not expected to finish in time.

Sequences that end in time stay to their end, since a move costs a recompute. Those that would be cut off move
while there is time, and their clients see a short pause. A sequence that no other executor can take stays: it
progresses here, and continues from where it is when an executor is back. Pure.
"""

from collections.abc import Iterable

from scheduler.executor_state import ExecutorState
from scheduler.forecast import LengthModel
from scheduler.sequence import Sequence

MARGIN = 1.5  # half of all answers are longer than expected


def who_must_move(
    state: ExecutorState, others: Iterable[ExecutorState], lengths: LengthModel, now: float
) -> list[Sequence]:
    """Sequences of a draining executor that are not expected to end before it leaves."""
    others = [other for other in others if not (other.is_draining or other.is_away)]
    seconds_left = max(0.0, state.leaves_at - now)
    return [
        seq
        for seq in state.running.values()
        if not seq.is_padding
        and any(other.suits(seq) for other in others)
        and MARGIN * _remaining_seconds(state, lengths, seq) > seconds_left
    ]


def _remaining_seconds(state: ExecutorState, lengths: LengthModel, seq: Sequence) -> float:
    line = state.step_time.line
    if line is None:
        return float("inf")
    base, per_token = line
    num_steps = lengths.remaining(seq.num_output_tokens, seq.request.max_tokens)
    to_compute = max(0, len(seq.token_ids) - seq.num_computed_tokens)
    return (num_steps * (base + len(state.running) * per_token) + to_compute * per_token) / 1e6
