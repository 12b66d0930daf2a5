"""Applies the search for a poisonous request to queue and batches: what waits, and what may enter where.

`suspects` says which requests are searched and which are on trial. Here that means: the sequences of the
group are passed over in the queue; those on trial enter one executor, the host, which admits no others until
the search is over. An empty executor is the best host, and the one that has just died is empty when it comes
back; if there is none, the one with the fewest sequences becomes the host after a while. All others serve as
usual.

Tokens that a sequence computed while the executor lived are known to be harmless (`num_proven_tokens`). A
suspect computes these again in steps of their own, with one plan in flight at a time, so that it can be told
whether the executor died in the same step as before, or by chance on the way there.

Pure: changes only the queue's holds on suspects, and what sequences have proven.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from scheduler.executor_state import ExecutorState
from scheduler.sequence import Sequence, State
from scheduler.suspects import Suspects
from scheduler.token_ids import NO_IDS
from scheduler.waiting import Hold, WaitingQueue

HOST_PATIENCE_SECONDS = 5.0  # how long to wait for an empty executor

Name = tuple[str, str]  # tenant and request id: the choices of a request are suspected together


def name_of(seq: Sequence) -> Name:
    """The name under which `seq` is suspected."""
    return seq.request.tenant, seq.request.request_id


class Inquiry:
    """The search, as far as it concerns sequences."""

    __slots__ = ("_executors", "_host", "_passed_over", "_since", "_waiting", "suspects")

    def __init__(self, waiting: WaitingQueue, executors: Mapping[str, ExecutorState]) -> None:
        self._waiting = waiting
        self._executors = executors
        self.suspects: Suspects[Name] = Suspects()
        self._passed_over: dict[Sequence, None] = {}  # in the order in which they began to wait
        self._host: str | None = None
        self._since = 0.0  # when the present group was formed

    def __bool__(self) -> bool:
        """Whether there are any suspects."""
        return bool(self.suspects)

    # --- what happens --------------------------------------------------------------------------------------

    def executor_died(self, state: ExecutorState, now: float) -> Name | None:
        """The executor died over its unanswered plans; returns the guilty request if it is known.

        Must be called while its sequences still have their seats.
        """
        under_way = _under_way(state)
        rows = list(under_way)
        is_elsewhere = True
        for seq, (begin, end) in under_way.items():
            is_elsewhere &= end <= seq.num_proven_tokens or begin >= seq.num_tokens_at_crash
            if end > seq.num_proven_tokens:
                seq.num_proven_tokens, seq.num_tokens_at_crash = begin, end
        if any(name_of(seq) in self.suspects.trial for seq in rows):
            # Sequences beside it were cleared, or have progressed far enough to be: see `Suspects`.
            rows = [seq for seq in rows if self.suspects.num_crashes(name_of(seq)) or not seq.has_progressed]
        rows.sort(key=lambda seq: (len(seq.token_ids) - seq.num_tokens_at_admission, -seq.order))
        guilty = self.suspects.crashed(map(name_of, rows), is_elsewhere=is_elsewhere)
        self._host = None
        self._since = now
        for seq in list(self._waiting) if self.suspects.group else ():
            self.began_to_wait(seq)  # it may be another choice of a suspected request
        self._let_go()
        return guilty

    def stepped(self, rows: Iterable[Sequence]) -> None:
        """These rows of a plan have been answered."""
        names = {name_of(seq): seq.has_progressed for seq in rows}
        num_cleared = sum(self.suspects.completed(name, is_past=is_past) for name, is_past in names.items())
        if num_cleared:
            self._let_go()

    def ended(self, seq: Sequence, *, is_last: bool) -> None:
        """`seq` has ended; with `is_last`, so has its request: no other choice of it is live."""
        self._passed_over.pop(seq, None)
        name = name_of(seq)
        if is_last and self.suspects.num_crashes(name):
            self.suspects.ended(name)
            self._let_go()

    def began_to_wait(self, seq: Sequence) -> None:
        """`seq` was queued: passes over it there if its request is searched."""
        if self.holds(seq):
            self._passed_over[seq] = None
            self._waiting.hold(seq, Hold.SEARCH)

    def cannot_try(self, seq: Sequence) -> None:
        """No attached executor can ever compute `seq`: those searched with it need not wait for it."""
        if self.holds(seq):
            self.suspects.set_aside(name_of(seq))
            self._let_go()

    # --- what follows --------------------------------------------------------------------------------------

    def is_watching(self, state: ExecutorState) -> bool:
        """Whether a suspect runs here: then it matters which step is the last one."""
        return any(self.suspects.num_crashes(name_of(seq)) for seq in state.running.values())

    def num_harmless(self, seq: Sequence) -> int | None:
        """Tokens that a suspect computes again before those that may have been fatal; None if it has none."""
        count = seq.num_proven_tokens - seq.num_computed_tokens
        return count if count > 0 and self.suspects.num_crashes(name_of(seq)) else None

    def holds(self, seq: Sequence) -> bool:
        """Whether `seq` is searched, and so does not enter in its turn."""
        group = self.suspects.group
        return bool(group) and name_of(seq) in group  # hardly ever is anybody searched

    def held_of(self, sequences: AbstractSet[Sequence]) -> set[Sequence]:
        """Those of them that it holds."""
        return set(filter(self.holds, sequences)) if self.suspects.group else set()

    def is_host(self, state: ExecutorState) -> bool:
        """Whether only suspects may enter here."""
        return self._host == state.executor_id

    def only_these(self, state: ExecutorState, now: float) -> list[Sequence] | None:
        """The only sequences that may enter here in this turn, in order; None if any may.

        Makes this executor the host of the trial if there is none and it is the best one.
        """
        if not self.suspects.trial:
            return None
        waiting = self._on_trial_and_waiting()
        if self._needs_another_host(waiting):
            self._host = state.executor_id if self._may_host(state, waiting, now) else None
        return waiting if self.is_host(state) else None

    def may_keep_out(self, state: ExecutorState) -> bool:
        """Whether this is the host, or may be once its sequences have left, so that no others enter here."""
        if not self.suspects.trial:
            return False
        waiting = self._on_trial_and_waiting()
        is_wanted = self._needs_another_host(waiting) and _takes_one_of(state, waiting)
        return is_wanted or self.is_host(state)

    def _on_trial_and_waiting(self) -> list[Sequence]:
        trial = self.suspects.trial
        return [seq for seq in self._passed_over if seq.state is State.WAITING and name_of(seq) in trial]

    def _needs_another_host(self, waiting: list[Sequence]) -> bool:
        """Whether there is no host, or one that can do nothing for these waiting sequences."""
        host = self._executors.get(self._host or "")
        if host is None:
            return True
        if any(name_of(seq) in self.suspects.trial for seq in host.running.values()):
            return False
        return bool(waiting) and not _takes_one_of(host, waiting)

    def _may_host(self, state: ExecutorState, waiting: list[Sequence], now: float) -> bool:
        if not _takes_one_of(state, waiting):
            return False
        if not state.running:
            return True
        takers = [item for item in self._executors.values() if _takes_one_of(item, waiting)]
        if takers == [state]:
            return True
        fewest = min(takers, key=lambda item: (len(item.running), item.executor_id), default=None)
        return fewest is state and now >= self._since + HOST_PATIENCE_SECONDS

    def _let_go(self) -> None:
        """Gives sequences that are no longer searched their places in the queue again."""
        for seq in [seq for seq in self._passed_over if not self.holds(seq)]:
            del self._passed_over[seq]
            self._waiting.let_go(seq, Hold.SEARCH)
        if not self.suspects.group:
            self._host = None


def _takes_one_of(state: ExecutorState, waiting: list[Sequence]) -> bool:
    """Whether one of these can be computed here, now or when other sequences have left."""
    return not (state.is_draining or state.is_away) and any(map(state.suits, waiting))


def _under_way(state: ExecutorState) -> dict[Sequence, tuple[int, int]]:
    """Sequences with rows in unanswered plans: from which position to which. Draft tokens count."""
    counts: dict[Sequence, tuple[int, int]] = {}
    for plan in state.session.unanswered:
        for seq, seq_id, num_tokens in zip(plan.rows, plan.seq_ids, plan.num_tokens, strict=True):
            if seq.seq_id == seq_id and not seq.is_padding:
                before, drafted = counts.get(seq, (0, 0))
                counts[seq] = before + num_tokens, drafted + len(plan.draft_tokens.get(seq_id, NO_IDS))
    ends = ((seq, planned, seq.num_computed_tokens + drafted) for seq, (planned, drafted) in counts.items())
    return {seq: (end - planned, end) for seq, planned, end in ends}
