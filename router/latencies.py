"""How long clients wait for tokens: two histograms, counted as the tokens come in. Pure."""

import bisect
from dataclasses import dataclass, field
from typing import Final

# Upper bounds, seconds; the last bucket has none. Twice or so from one to the next: a glance tells the order.
FIRST_TOKEN_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Observations, seconds: `counts[i]` of them lie above `bounds[i - 1]` and at or below `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts one observation, or several equal ones. A clock that went backwards counts as no time."""
        seconds = max(0.0, seconds)
        self.counts[bisect.bisect_left(self.bounds, seconds)] += times
        self.sum_seconds += seconds * times


@dataclass(slots=True)
class Latencies:
    """What all requests of this router have seen since it started."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    num_tokens: int = 0

    def tokens(self, count: int, *, since: float, first: bool, now: float) -> None:
        """`count` ids of one choice have come; `since` is when the one before came, or the request.

        Ids that come together share the time since the one before.
        """
        if not count:
            return
        self.num_tokens += count
        if first:
            self.time_to_first_token.observe(now - since)
            count, since = count - 1, now
        if count:
            self.inter_token.observe((now - since) / count, count)
