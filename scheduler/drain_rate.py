"""How fast the queue drains, and so how long one more request would wait.

Only times when sequences wait count, and only starts within them: what starts while none wait shows how many
arrived, not how many could have started. Pure.
"""

import math

_MEMORY_SECONDS = 30.0
_MIN_WAIT_SECONDS = 0.05
_MAX_WAIT_SECONDS = 60.0
_UNKNOWN_SECONDS = 1.0


class DrainRate:
    """Sequences started per second of waiting, weighted towards the last half minute of it."""

    __slots__ = ("_count", "_updated", "_waited", "_waiting_since")

    def __init__(self) -> None:
        self._waited = 0.0  # seconds in which the queue was not empty: the clock of all below
        self._waiting_since: float | None = None  # on the caller's clock; None while ours stands still
        self._count = 0.0
        self._updated = 0.0

    def queue_is(self, now: float, *, empty: bool) -> None:
        """Whether, from now on, there are sequences that could not start at once."""
        self._waited = self._clock(now)
        self._waiting_since = None if empty else now

    def observe(self, now: float) -> None:
        """A sequence has left the queue."""
        if self._waiting_since is not None:
            clock = self._clock(now)
            self._count = self._decayed(clock) + 1.0
            self._updated = clock

    def _clock(self, now: float) -> float:
        since = self._waiting_since
        return self._waited if since is None else self._waited + max(0.0, now - since)

    def _decayed(self, clock: float) -> float:
        return self._count * math.exp(-(clock - self._updated) / _MEMORY_SECONDS)

    def predicted_wait(self, num_ahead: int, now: float) -> float:
        """Seconds until `num_ahead` sequences have left and one more may; between 0.05 and 60."""
        clock = self._clock(now)
        if not self._count:  # none has started yet: the first takes at least as long again
            return min(_MAX_WAIT_SECONDS, max(_UNKNOWN_SECONDS, clock))
        # A short history has not filled the memory yet: divide by what it could hold so far.
        span = _MEMORY_SECONDS * (1.0 - math.exp(-max(clock, 0.1) / _MEMORY_SECONDS))
        rate = self._decayed(clock) / span
        if rate <= 0:
            return _MAX_WAIT_SECONDS
        return min(_MAX_WAIT_SECONDS, max(_MIN_WAIT_SECONDS, (num_ahead + 1) / rate))
