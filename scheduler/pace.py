"""When the plan behind a running step leaves: as late as it can without making the executor wait.

    result k-1 in ─────────── step k runs ───────────────► result k in
                     who comes here enters k+1   │◄ margin ►│
                                                 └ plan k+1 leaves

A plan that leaves early hides the network as well as one that leaves late, but whoever comes after it waits
for one step more. The margin covers the way there and back (nearly always: p99 of the newest ones) and steps
that end before their time (mostly: a step caught out costs one way of idleness, waiting for the worst of them
would cost newcomers a part of every step). Pure: time comes in as an argument.
"""

from bisect import bisect_left, insort
from collections import deque

SHORT_STEP_SECONDS = 0.004
"""Below this nothing is won by waiting: a timer is no finer than a millisecond."""
_TIMER_SECONDS = 0.001
_WAITED_SECONDS = 0.0002  # a gap at the executor above which it was waiting for its plan
_NUM_KEPT = 128


class Quantile:
    """One quantile of the newest values."""

    __slots__ = ("_newest", "_share", "_sorted")

    def __init__(self, share: float) -> None:
        self._share = share
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, value: float) -> None:
        """Takes a value in; the oldest one leaves."""
        if len(self._newest) == _NUM_KEPT:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float | None:
        """The quantile; None before anything was seen."""
        if not self._sorted:
            return None
        return self._sorted[min(int(self._share * len(self._sorted)), len(self._sorted) - 1)]


class Pace:
    """The rhythm of one executor under one epoch. Times in seconds."""

    __slots__ = ("_early", "_expected_end", "_leave_at", "_predicted", "_round_trip", "_sent_at")

    def __init__(self) -> None:
        self._round_trip = Quantile(0.99)
        self._early = Quantile(0.9)  # by how much results came before their time
        self._sent_at: deque[tuple[float, bool]] = deque()  # of each unanswered plan; whether it was alone
        self._predicted: deque[float | None] = deque()  # duration of each unanswered step
        self._expected_end: float | None = None  # when the oldest unanswered plan's result is due
        self._leave_at: float | None = None

    def held_until(self, now: float) -> float | None:
        """When the plan behind those that are unanswered may leave; None is now."""
        if self._leave_at is None or now >= self._leave_at or len(self._sent_at) != 1:
            return None
        return self._leave_at

    def sent(self, now: float, predicted_seconds: float | None) -> None:
        """A plan leaves whose step will probably take so long; None when nobody knows."""
        alone = not self._sent_at
        self._sent_at.append((now, alone))
        self._predicted.append(predicted_seconds)
        if alone:
            self._expect(now)

    def answered(self, now: float, step_seconds: float, idle_seconds: float) -> None:
        """The oldest plan's result is in: how long its step took, and how long the executor waited for it."""
        sent_at, alone = self._sent_at.popleft()
        self._predicted.popleft()
        if alone or idle_seconds > _WAITED_SECONDS:
            self._round_trip.observe(max(0.0, now - sent_at - step_seconds))
        if self._expected_end is not None:
            self._early.observe(max(0.0, self._expected_end - now))
        self._expect(now)

    def _expect(self, begin: float) -> None:
        """The oldest unanswered step has begun; what it sends back is counted from here to here."""
        predicted = self._predicted[0] if self._predicted else None
        round_trip = self._round_trip.value
        self._expected_end = self._leave_at = None
        if predicted is None or round_trip is None:
            return
        self._expected_end = begin + predicted
        if predicted >= SHORT_STEP_SECONDS:
            self._leave_at = self._expected_end - round_trip - (self._early.value or 0.0) - _TIMER_SECONDS
