"""Paces the return of sequences that lost their executor: soon, and without starving the others.

They come first in their class (`waiting`). But a hundred of them with long contexts would keep newcomers from
a first token, and prompts in progress from their next chunk, until all of that is computed again. So while
others wait in their class or a better one

    of two consecutive seats, at least one goes to one of the others, and
    of a step's tokens that decoding leaves, recomputing gets at most half.

While no sequence as important wants them, all seats and tokens are theirs. Pure.
"""

import math
from collections.abc import Iterable

from scheduler.executor_state import ExecutorState
from scheduler.plan_builder import PlanBuilder
from scheduler.sequence import Sequence
from scheduler.waiting import WaitingQueue


def recompute_budget(num_tokens: int) -> int:
    """Tokens for recomputing, of those that decoding leaves, while others want them too."""
    return max(1, num_tokens // 2)


class RecoveryPace:
    """Shares seats and tokens between recovering sequences and the others, on all executors."""

    __slots__ = ("_had_last_seat",)

    def __init__(self) -> None:
        self._had_last_seat = False  # whether a recovering sequence took it

    def begin(
        self,
        state: ExecutorState,
        unfinished: Iterable[Sequence],
        builder: PlanBuilder,
        waiting: WaitingQueue | None,
        now: float,
    ) -> None:
        """Called when decoding has its tokens and the rest of a plan's budget is about to be given out.

        `waiting` is None where nothing of the queue may enter in its turn, as at the host of a trial: a share
        that is kept for a newcomer would be nobody's.
        """
        builder.recompute_budget = recompute_budget(builder.budget)
        has_recovering = waiting is not None and waiting.has_recovering
        if not (has_recovering or any(seq.is_recovering for seq in unfinished)):
            return
        others = [seq.importance for seq in unfinished if not seq.is_recovering]
        if waiting is not None and len(state.running) < state.max_num_seqs:
            newcomer = waiting.peek(now, at=state.executor_id, skip_recovering=True)
            if newcomer is not None:
                others.append(waiting.importance(newcomer, now))
        builder.best_other = min(others, default=math.inf)

    def next(
        self, state: ExecutorState, waiting: WaitingQueue, now: float, *, may_recompute: bool
    ) -> Sequence | None:
        """The sequence to be served next here; `may_recompute`: tokens are left for recovering ones."""
        head = waiting.peek(now, at=state.executor_id)
        if head is None or not head.is_recovering:
            return head
        if self._had_last_seat or not may_recompute:
            other = waiting.peek(now, at=state.executor_id, skip_recovering=True)
            if other is not None and other.request.priority <= head.request.priority:
                return other
        return head

    def seated(self, seq: Sequence) -> None:
        """`seq` has taken a seat."""
        self._had_last_seat = seq.is_recovering
