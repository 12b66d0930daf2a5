"""Keeps track of what waits for an executor that is not there, and for how long.

While no executor is attached, every sequence waits for one. While some are, a sequence may still need another
one: it is too long for each of them, or needs an ability that each lacks. That executor may come back; until
then such sequences are parked in the queue, where they hold nothing back. None waits like this for more than
`recovery_timeout_seconds`.

Pure: changes only the queue's holds, and what time lines say about a wait.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from scheduler.executor_state import ExecutorState
from scheduler.explain import Reason, ReasonClocks
from scheduler.inquiry import Inquiry
from scheduler.sequence import Sequence
from scheduler.waiting import Hold, WaitingQueue


class Stranded:
    """The sequences that wait for an executor, and since when."""

    __slots__ = (
        "_alone_since",
        "_clocks",
        "_executors",
        "_inquiry",
        "_recovery_timeout_seconds",
        "_since",
        "_waiting",
    )

    def __init__(
        self,
        waiting: WaitingQueue,
        executors: Mapping[str, ExecutorState],
        inquiry: Inquiry,
        clocks: ReasonClocks,
        recovery_timeout_seconds: float,
    ) -> None:
        """`inquiry`: told about sequences that cannot be tried."""
        self._waiting = waiting
        self._executors = executors
        self._inquiry = inquiry
        self._clocks = clocks
        self._recovery_timeout_seconds = recovery_timeout_seconds
        # When the last executor was lost, or when a sequence arrived before there was one.
        self._alone_since: float | None = None
        self._since: dict[Sequence, float] = {}  # in the order of those times

    def holds(self, seq: Sequence) -> bool:
        """Whether no attached executor can ever compute `seq`."""
        return seq in self._since

    def held_of(self, sequences: AbstractSet[Sequence]) -> set[Sequence]:
        """Those of them that it holds."""
        return self._since.keys() & sequences

    def executor_came(self, now: float) -> None:
        """One was attached. Sequences that still need another have waited since the last one was lost."""
        since = now if self._alone_since is None else self._alone_since
        self._alone_since = None
        self._look_at_all(now, since)

    def executor_went(self, now: float) -> None:
        """One was detached."""
        if self._executors:
            self._look_at_all(now, now)
        else:
            self._alone_since = now

    def began_to_wait(self, seq: Sequence, now: float, since: float | None = None) -> None:
        """`seq` is in the queue; `since`: when it began to wait for an executor, if not now."""
        if not self._executors and self._alone_since is None:
            self._alone_since = now
        if self._executors and not self._can_be_computed(seq):
            self._since[seq] = now if since is None else since
            self._waiting.hold(seq, Hold.STRANDED)
            self._inquiry.cannot_try(seq)
            self._tell(seq, now, "no executor that is here can ever compute it", Reason.QUEUED_FOR_EXECUTOR)

    def waits_no_more(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self._since.pop(seq, None)

    def _look_at_all(self, now: float, since: float) -> None:
        for seq in list(self._waiting):
            if seq not in self._since:
                self.began_to_wait(seq, now, since)
            elif self._can_be_computed(seq):
                del self._since[seq]
                self._waiting.let_go(seq, Hold.STRANDED)
                self._tell(seq, now, "an executor came that can compute it", None)

    @property
    def next_time(self) -> float | None:
        """When `overdue` will next return something, as things are."""
        since = [next(iter(self._since.values()))] if self._since else []
        if self._alone_since is not None and self._waiting:
            since.append(self._alone_since)
        return min(since) + self._recovery_timeout_seconds if since else None

    def overdue(self, now: float) -> list[tuple[Sequence, str]]:
        """Sequences that have waited for too long, each with a sentence for its client."""
        next_time = self.next_time
        if next_time is None or now < next_time:
            return []
        seconds = self._recovery_timeout_seconds
        if self._alone_since is not None and now >= self._alone_since + seconds:
            lacks = [(seq, "no executor came back") for seq in self._waiting]
        else:
            overdue = [seq for seq, since in self._since.items() if now >= since + seconds]
            lacks = [(seq, self._lack(seq)) for seq in overdue]
        return [
            (seq, f"the request could not go on: {lack} within {seconds:g} seconds; try again")
            for seq, lack in lacks
        ]

    def _lack(self, seq: Sequence) -> str:
        """What did not come."""
        if not self._executors:
            return "no executor came back"
        needs = f" with the abilities {sorted(seq.request.needs)}" if seq.request.needs else ""
        return f"no executor{needs} came back that holds {seq.max_len} tokens, prompt and max_tokens together"

    def _can_be_computed(self, seq: Sequence) -> bool:
        """Whether an attached executor can compute `seq`."""
        return any(state.suits(seq) for state in self._executors.values())

    def _tell(self, seq: Sequence, now: float, detail: str, own: Reason | None) -> None:
        if seq.time_line is not None:
            seq.time_line.wait(now, self._clocks, step_id=0, detail=detail, own=own)
