"""How fast the queue drains, and so how long one more request would wait. Pure."""

import math

_MEMORY_SECONDS = 30.0
_MIN_WAIT_SECONDS = 0.05
_MAX_WAIT_SECONDS = 60.0


class DrainRate:
    """Sequences that start in a second, the last half minute counting most."""

    __slots__ = ("_count", "_since", "_updated")

    def __init__(self) -> None:
        self._count = 0.0
        self._updated = 0.0
        self._since: float | None = None

    def observe(self, now: float) -> None:
        """One has left the queue."""
        self._count = self._decayed(now) + 1.0
        self._updated = now
        if self._since is None:
            self._since = now

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(0.0, now - self._updated) / _MEMORY_SECONDS)

    def predicted_wait(self, num_ahead: int, now: float) -> float:
        """Seconds until `num_ahead` have left and one more may; between 0.05 and 60."""
        if self._since is None:
            return 1.0
        # A short history has not filled the memory yet: divide by what it could hold so far.
        span = _MEMORY_SECONDS * (1.0 - math.exp(-max(now - self._since, 0.1) / _MEMORY_SECONDS))
        rate = self._decayed(now) / span
        if rate <= 0:
            return _MAX_WAIT_SECONDS
        return min(_MAX_WAIT_SECONDS, max(_MIN_WAIT_SECONDS, (num_ahead + 1) / rate))
