"""The steps of one executor that are in flight: when they are expected to end, and when one is late.

    sent k ├──── step k ────┤├── step k + 1 ──┤      a step begins when it is sent, or when the one before is
           sent k + 1 ┴      answered ┴              answered

Pure: time is an argument, in seconds.
"""

from collections import deque
from dataclasses import dataclass

LATE_FACTOR = 20.0  # a step is late after this many times its predicted duration


@dataclass(frozen=True, slots=True)
class Step:
    """A plan that was sent."""

    sent_at: float
    predicted_seconds: float | None  # None: unknown
    was_alone: bool  # nothing else was in flight when it was sent


class StepClock:
    """The steps in flight."""

    __slots__ = ("_steps", "began")

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()  # the one that runs first
        self.began = 0.0
        """When the running step began."""

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
        """When the running step should be answered; None if unknown, or if none runs."""
        step = self.running
        if step is None or step.predicted_seconds is None:
            return None
        return self.began + step.predicted_seconds

    def sent(self, predicted_seconds: float | None, now: float) -> None:
        """One more plan was sent, with this predicted duration of its step."""
        if not self._steps:
            self.began = now
        self._steps.append(Step(now, predicted_seconds, was_alone=not self._steps))

    def answered(self, now: float) -> Step:
        """The running step was answered; returns it."""
        self.began = now
        return self._steps.popleft()

    def resumed(self, now: float) -> None:
        """A new stream was opened: the running step is timed from now."""
        self.began = now

    def seconds_left(self, now: float) -> float:
        """How long until all steps in flight are expected to be answered.

        A step that is overdue is assumed to need as long again as it has taken so far: otherwise sequences
        would go on waiting for an executor that seems always just about to be done.
        """
        if not self._steps:
            return 0.0
        predicted = [step.predicted_seconds or 0.0 for step in self._steps]
        elapsed = max(0.0, now - self.began)
        left = predicted[0] - elapsed
        return (left if left >= 0 else elapsed) + sum(predicted[1:])

    def late_at(self, least_seconds: float) -> float | None:
        """When the running step is late: after `least_seconds`, or 20 times its prediction if longer."""
        step = self.running
        if step is None:
            return None
        return self.began + max(least_seconds, LATE_FACTOR * (step.predicted_seconds or 0.0))
