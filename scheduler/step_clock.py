"""The steps of one executor that have no result yet: when they end as far as one can tell, when one is late.

    sent k ├──── step k ────┤├── step k + 1 ──┤      a step begins when it is sent, or when the one before has
           sent k + 1 ┴      answered ┴              answered

Pure: time is an argument, seconds.
"""

from collections import deque
from dataclasses import dataclass

LATE_FACTOR = 20.0  # times its predicted duration, and a step is late


@dataclass(frozen=True, slots=True)
class Step:
    """A plan that was sent."""

    sent_at: float
    predicted_seconds: float | None  # None: nobody knows
    was_alone: bool  # nothing was under way when it was sent


class StepClock:
    """What is under way."""

    __slots__ = ("_steps", "began")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()  # the one that runs first
        self.began = 0.0
        """When the step that runs began."""

    @property
    def num_under_way(self) -> int:
        """Plans without a result."""
        return len(self._steps)

    @property
    def running(self) -> Step | None:
        """The step that runs; None when none does."""
        return self._steps[0] if self._steps else None

    @property
    def expected_end(self) -> float | None:
        """When the step that runs should have answered; None when nobody knows, or none runs."""
        step = self.running
        if step is None or step.predicted_seconds is None:
            return None
        return self.began + step.predicted_seconds

    def sent(self, predicted_seconds: float | None, now: float) -> None:
        """One more plan is on its way, whose step will probably take so long."""
        if not self._steps:
            self.began = now
        self._steps.append(Step(now, predicted_seconds, was_alone=not self._steps))

    def answered(self, now: float) -> Step:
        """The step that ran has its result; returns it."""
        self.began = now
        return self._steps.popleft()

    def resumed(self, now: float) -> None:
        """A new stream: what was under way is counted from now."""
        self.began = now

    def seconds_left(self, now: float) -> float:
        """How long until all of them are expected to have answered.

        One that is over its time is taken to need as long again as it has taken so far: nobody should go on
        waiting for an executor because it is always just about to be done.
        """
        if not self._steps:
            return 0.0
        predicted = [step.predicted_seconds or 0.0 for step in self._steps]
        elapsed = max(0.0, now - self.began)
        left = predicted[0] - elapsed
        return (left if left >= 0 else elapsed) + sum(predicted[1:])

    def late_at(self, least_seconds: float) -> float | None:
        """When the step that runs is late: after `least_seconds`, or 20 times what was predicted for it."""
        step = self.running
        if step is None:
            return None
        return self.began + max(least_seconds, LATE_FACTOR * (step.predicted_seconds or 0.0))
