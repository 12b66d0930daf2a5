"""When the steps under way are expected to end, and when the first of them is late.

    sent k ├──── step k ────┤├── step k + 1 ──┤      a step begins when it is sent, or when the one before has
           sent k + 1 ┴      answered ┴              answered

Pure: time is an argument, seconds.
"""

from collections import deque

LATE_FACTOR = 20.0  # times its predicted duration, and a step is late


class StepClock:
    """The steps of one executor that have no result yet."""

    __slots__ = ("_predicted", "began")

    def __init__(self) -> None:
        self._predicted: deque[float] = deque()  # durations, the step that runs first; 0 is not known
        self.began = 0.0
        """When the step that runs began."""

    def sent(self, predicted_us: float | None, now: float) -> None:
        """One more plan is on its way."""
        if not self._predicted:
            self.began = now
        self._predicted.append((predicted_us or 0.0) / 1e6)

    def answered(self, now: float) -> float:
        """The first of them has its result. Returns how long it took, the wire included."""
        self._predicted.popleft()
        took, self.began = now - self.began, now
        return took

    def resumed(self, now: float) -> None:
        """A new stream: what was under way is counted from now."""
        self.began = now

    def seconds_left(self, now: float) -> float:
        """How long until all of them are expected to have answered.

        One that is over its time is taken to need as long again as it has taken so far: nobody should go on
        waiting for an executor because it is always just about to be done.
        """
        if not self._predicted:
            return 0.0
        elapsed = max(0.0, now - self.began)
        left = self._predicted[0] - elapsed
        return (left if left >= 0 else elapsed) + sum(self._predicted) - self._predicted[0]

    def late_at(self, least_seconds: float) -> float | None:
        """When the step that runs is late: after `least_seconds`, or 20 times what was predicted for it."""
        if not self._predicted:
            return None
        return self.began + max(least_seconds, LATE_FACTOR * self._predicted[0])
