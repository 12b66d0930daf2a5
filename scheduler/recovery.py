"""How fast those come back that were lost with their executor: soon, and without starving the others.

They come first in their class (`waiting`). But a hundred of them with long contexts would keep newcomers from
a first token, and prompts under way from their next chunk, for as long as all of that is computed again. So
while others wait in their class or a better one

    of two seats in a row one at least goes to one of the others, and
    of a step's tokens that decoding leaves, recomputing gets half at most.

While nobody as important wants them, seats and tokens are all theirs. Pure.
"""

import math
from collections.abc import Iterable

from scheduler.executor_state import ExecutorState
from scheduler.rows import Rows
from scheduler.sequence import Sequence
from scheduler.waiting import WaitingQueue


def recompute_budget(num_tokens: int) -> int:
    """How many of the tokens that decoding leaves may recover what was lost, while others want them."""
    return max(1, num_tokens // 2)


class RecoveryPace:
    """How seats and tokens are shared between recovering sequences and the others, on all executors."""

    __slots__ = ("_had_last_seat",)

    def __init__(self) -> None:
        self._had_last_seat = False  # one of those that recover

    def begin(
        self,
        state: ExecutorState,
        unfinished: Iterable[Sequence],
        rows: Rows,
        waiting: WaitingQueue,
        now: float,
    ) -> None:
        """Decoding has its tokens: the rest of a plan's budget is about to be given out."""
        rows.recompute_budget = recompute_budget(rows.budget)
        if not (waiting.has_recovering or any(seq.is_recovering for seq in unfinished)):
            return
        others = [seq.importance for seq in unfinished if not seq.is_recovering]
        if len(state.running) < state.max_num_seqs:
            newcomer = waiting.peek(now, at=state.executor_id, skip_recovering=True)
            if newcomer is not None:
                others.append(waiting.importance(newcomer, now))
        rows.best_other = min(others, default=math.inf)

    def next(
        self, state: ExecutorState, waiting: WaitingQueue, now: float, *, may_recompute: bool
    ) -> Sequence | None:
        """Who is served next by this executor; `may_recompute`: tokens are left to those that recover."""
        head = waiting.peek(now, at=state.executor_id)
        if head is None or not head.is_recovering:
            return head
        if self._had_last_seat or not may_recompute:
            other = waiting.peek(now, at=state.executor_id, skip_recovering=True)
            if other is not None and other.request.priority <= head.request.priority:
                return other
        return head

    def seated(self, seq: Sequence) -> None:
        """`seq` has the newest seat."""
        self._had_last_seat = seq.is_recovering
