"""A histogram of plain integers: counted where things happen, read by whoever exports it.

Pure: it knows no metric's name, no clock, no library.
"""

import bisect
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Observations: `counts[i]` of them lie above `bounds[i - 1]` and at or below `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts one observation, or several equal ones. A clock that went backwards counts as no time."""
        value = max(0.0, value)
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times
