"""An open-loop load and its figures: which request comes when, and how good the answers were. Pure.

Open: who comes does not wait for those before to be answered, as the world does not. So every time counts
from the moment at which a request was due, and not from when the generator came round to sending it.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

LATE_SECONDS = 0.01
"""A request that leaves this long after it was due left late."""
MOST_LATE = 0.01
"""Share of late requests from which on the generator did not keep the rate."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Due:
    """One request of a load: when it is due, seconds from the beginning, and its lengths in tokens."""

    seconds: float
    num_in: int
    num_out: int


@dataclass(slots=True)
class Seen:
    """What became of one request. Seconds from the beginning of the load."""

    due: Due
    sent: float = math.inf
    arrivals: list[float] = field(default_factory=list)
    """When tokens came: one entry for each message that brought some."""
    num_tokens: int = 0
    num_cached: int | None = None
    """Tokens of the prompt that the server had in its cache; None: it does not tell."""
    failure: str = ""

    @property
    def first_token_seconds(self) -> float:
        """From when it was due to its first token."""
        return self.arrivals[0] - self.due.seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def mean_gap(self) -> float:
        """Seconds for each token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be worth something: seconds, None is no limit."""

    first_token: float | None
    mean_gap: float | None

    def kept_by(self, seen: Seen) -> bool:
        """Whether it was answered, and in time."""
        if seen.failure or not seen.arrivals:
            return False
        in_time = self.first_token is None or seen.first_token_seconds <= self.first_token
        return in_time and (self.mean_gap is None or seen.mean_gap <= self.mean_gap)


# --- who comes ----------------------------------------------------------------------------------------


def poisson(rate: float, lengths: Iterable[tuple[int, int]], seed: int) -> Iterator[Due]:
    """Requests that come on their own, `rate` a second, with these lengths in turn; the seed says when."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    at = 0.0
    for num_in, num_out in lengths:
        at += rng.expovariate(rate)
        yield Due(at, num_in, num_out)


def until(dues: Iterable[Due], *, seconds: float | None, count: int | None) -> list[Due]:
    """Those of the first `seconds`, and no more than `count`."""
    taken = []
    for due in islice(dues, count):
        if seconds is not None and due.seconds > seconds:
            break
        taken.append(due)
    return taken


def prompts(dues: Sequence[Due], vocab_size: int, seed: int) -> list[list[int]]:
    """A prompt of random ids for each, always the same from the same seed: a cache may know them by then."""
    rng = random.Random(f"prompts {seed}")  # noqa: S311 - nothing secret
    lowest = min(1000, vocab_size // 2)  # control tokens come first
    return [[rng.randrange(lowest, vocab_size) for _ in range(due.num_in)] for due in dues]


# --- what it was worth --------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of 100 are not above, between two neighbours in proportion.

    NumPy's and everybody's default ("linear"). Raises ValueError without values.
    """
    if not values:
        raise ValueError("there is no percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def report(seen: Sequence[Seen], limits: Limits, *, seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """What is written to the result file. Times in seconds; `seconds` is the whole load with its tail."""
    answered = [each for each in seen if not each.failure and each.arrivals]
    late = [each.sent - each.due.seconds for each in seen if math.isfinite(each.sent)]
    num_late = sum(lateness > LATE_SECONDS for lateness in late) + len(seen) - len(late)
    last_due = max((each.due.seconds for each in seen), default=0.0)
    cached = [each.num_cached for each in answered if each.num_cached is not None]
    num_good = sum(limits.kept_by(each) for each in seen)
    failures: dict[str, int] = {}
    for each in seen:
        if each.failure:
            failures[each.failure] = failures.get(each.failure, 0) + 1
    return {
        "num_requests": len(seen),
        "num_answered": len(answered),
        "failures": failures,
        "seconds": seconds,
        "offered_requests_per_second": len(seen) / last_due if len(seen) > 1 and last_due else None,
        "answered_requests_per_second": len(answered) / seconds,
        "output_tokens_per_second": sum(each.num_tokens for each in answered) / seconds,
        "num_prompt_tokens": sum(each.due.num_in for each in answered),
        "num_cached_tokens": sum(cached) if cached else None,
        "time_to_first_token_seconds": _spread([each.first_token_seconds for each in answered]),
        "inter_token_seconds": _spread([gap for each in answered for gap in each.gaps]),
        "goodput": {
            "first_token_limit_seconds": limits.first_token,
            "mean_inter_token_limit_seconds": limits.mean_gap,
            "requests_per_second": num_good / seconds,
            "share": num_good / max(1, len(seen)),
        },
        "generator": {
            "cpu_seconds": cpu_seconds,
            "lateness_seconds": _spread(late),
            "num_late": num_late,
            "kept_the_rate": num_late <= MOST_LATE * len(seen),
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    spread = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return spread | {"mean": math.fsum(values) / len(values), "max": max(values)}
