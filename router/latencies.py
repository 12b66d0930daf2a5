"""How long clients wait for tokens: two histograms, counted as the tokens come in. Pure."""

from dataclasses import dataclass, field
from typing import Final

from rpc.histogram import Histogram

# Upper bounds, seconds; the last bucket has none. Twice or so from one to the next: a glance tells the order.
FIRST_TOKEN_BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Latencies:
    """What all requests of this router have seen since it started."""

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    num_tokens: int = 0
    num_wasted_tokens: int = 0  # came behind a stop string

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
