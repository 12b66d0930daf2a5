"""When to send the plan behind a running step: as late as possible without making the executor wait.

    result k-1 in ─────────── step k runs ───────────────► result k in
               sequences arriving here enter k+1 │◄ margin ►│
                                                 └ plan k+1 leaves

A plan sent early hides the network as well as one sent late, but a request that arrives after it waits for
one more step. The margin covers the round trip (the *way*), and steps that end before their predicted time:
most of them, not the worst case. A step that ends even earlier costs one round trip of idleness; a margin for
the worst case would cost newcomers a part of every step. Pure: time comes in as an argument.

The way can be measured in two cases: when nothing else was in flight, and when a plan was held for too long,
so that the executor idled longer than it usually does between steps. Any other plan only shows that the
margin was enough: then a shorter way is recorded. The 0.9 quantile is used, so that an executor that pauses
now and then is not mistaken for a distant one.
"""

from bisect import bisect_left, insort
from collections import deque

from scheduler.step_clock import Step, StepClock

SHORT_STEP_SECONDS = 0.004
"""Below this, waiting gains nothing: a timer is no finer than a millisecond."""
_TIMER_SECONDS = 0.001
_WAITED_SECONDS = 0.0005  # idling this much longer than twice its usual gap, an executor lacked a plan
_LESS = 0.7  # of the way that was allowed for and was enough
_NUM_KEPT = 64


class Quantile:
    """One quantile of the newest values."""

    __slots__ = ("_newest", "_share", "_sorted")

    def __init__(self, share: float) -> None:
        self._share = share
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, value: float) -> None:
        """Adds a value; beyond 64, the oldest one is dropped."""
        if len(self._newest) == _NUM_KEPT:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]
        self._newest.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float | None:
        """The quantile; None before the first value."""
        if not self._sorted:
            return None
        return self._sorted[min(int(self._share * len(self._sorted)), len(self._sorted) - 1)]


class Pace:
    """The rhythm of one executor during one epoch. Times in seconds."""

    __slots__ = ("_clock", "_early", "_gap", "_held_behind", "_was_held", "_way")

    def __init__(self, clock: StepClock) -> None:
        """`clock`: its steps in flight."""
        self._clock = clock
        self._way = Quantile(0.9)  # round trip
        self._early = Quantile(0.9)  # by how much results came before their predicted time
        self._gap = Quantile(0.5)  # what the executor takes between one step and the next
        self._held_behind: Step | None = None  # the newest step behind which a plan was held
        self._was_held = False  # whether the plan of the running step was held

    @property
    def way(self) -> float | None:
        """How long a plan and its result are on their way; None before it is known."""
        return self._way.value

    @property
    def margin(self) -> float | None:
        """How long before the end of a step the next plan leaves; None before the way is known."""
        way = self._way.value
        return None if way is None else way + (self._early.value or 0.0) + _TIMER_SECONDS

    def held_until(self, now: float) -> float | None:
        """When the plan behind the unanswered one may leave; None: now."""
        step, expected_end, margin = self._clock.running, self._clock.expected_end, self.margin
        if step is None or expected_end is None or margin is None or self._clock.num_under_way != 1:
            return None
        if step.predicted_seconds is None or step.predicted_seconds < SHORT_STEP_SECONDS:
            return None
        leave_at = expected_end - margin
        if now >= leave_at:
            return None
        self._held_behind = step
        return leave_at

    def answered(self, now: float, step_seconds: float, idle_seconds: float) -> float:
        """The running step was answered: how long it took, and how long the executor had waited for it.

        Returns how long it took as seen from here, including the network.
        """
        expected_end, began = self._clock.expected_end, self._clock.began
        way, gap = self._way.value, self._gap.value or 0.0
        step = self._clock.answered(now)
        if step.was_alone:
            self._way.observe(max(0.0, now - max(step.sent_at, began) - step_seconds))
        elif self._was_held and idle_seconds > 2 * gap + _WAITED_SECONDS:
            self._way.observe(max(0.0, began - step.sent_at + idle_seconds - gap))
        else:
            self._gap.observe(idle_seconds)
            if way is not None:
                self._way.observe(_LESS * way)
        self._was_held = step is self._held_behind
        if expected_end is not None:
            self._early.observe(max(0.0, expected_end - now))
        return now - began
