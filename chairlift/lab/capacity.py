"""How much a setup can take: the highest rate that keeps stated limits, and how many executors a rate needs.

Both are found by bisection, which assumes that more requests a second never make any request faster. That is
true of rates on the whole, but not of every two that are close: what is found is a rate that keeps the
limits, while another, at most a tolerance higher, does not. Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.lab.run import Summary

_SLOWEST = 1e-6  # requests a second: each is alone
_FASTEST = 1e8  # they come as good as all at once


@dataclass(frozen=True, slots=True)
class Targets:
    """What must hold. Times in seconds; None asks nothing. Nobody may be refused."""

    first_token_p50: float | None = None
    first_token_p99: float | None = None
    between_tokens_p50: float | None = None
    between_tokens_p99: float | None = None
    per_output_token_p50: float | None = None

    def missed(self, summary: Summary) -> str | None:
        """The first that does not hold, in words; None when all do."""
        wanted = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        for name, limit in wanted.items():
            got = getattr(summary, name)
            if got > limit:
                return f"{name} {got:.4g} s > {limit:g} s"
        if summary.refused:
            return f"{summary.refused} refused"
        for name in wanted:
            if math.isnan(getattr(summary, name)):
                return f"{name} is not known: nobody had tokens enough"
        return None


@dataclass(frozen=True, slots=True)
class Found:
    """A rate that keeps the limits, and one a little higher that does not."""

    rate: float
    summary: Summary
    missed_at: float | None  # None: no rate tried was too much
    missed: str | None


class TargetsError(ValueError):
    """Limits that cannot be kept at all: a sentence."""


def highest_rate(
    at: Callable[[float], Summary], targets: Targets, *, start: float = 1.0, tolerance: float = 0.02
) -> Found:
    """Requests a second, within `tolerance` of it. Raises TargetsError when none keeps the limits."""
    good: tuple[float, Summary] | None = None
    bad: tuple[float, str] | None = None
    rate = start
    while good is None or bad is None or bad[0] > good[0] * (1 + tolerance):
        summary = at(rate)
        missed = targets.missed(summary)
        if missed is None:
            good = rate, summary
            if rate >= _FASTEST:
                break
        else:
            bad = rate, missed
            if rate <= _SLOWEST:
                raise TargetsError(f"not even {rate:.3g} requests a second keep the limits: {missed}")
        if good is None:
            rate = _SLOWEST  # where it misses them too, no rate keeps them
        else:
            rate = min(2 * rate, _FASTEST) if bad is None else (good[0] + bad[0]) / 2
    return Found(*good, *(bad or (None, None)))


def fewest_executors(
    with_count: Callable[[int], Summary], targets: Targets, *, at_most: int
) -> tuple[int, Summary]:
    """How many keep the limits, and the figures with them. Raises TargetsError when `at_most` do not."""
    low, high = 0, 1
    best: tuple[int, Summary] | None = None
    while best is None:
        summary = with_count(high)
        missed = targets.missed(summary)
        if missed is None:
            best = high, summary
        elif high >= at_most:
            raise TargetsError(f"not even {high} executors keep the limits: {missed}")
        else:
            low, high = high, min(2 * high, at_most)
    while low + 1 < best[0]:
        middle = (low + best[0]) // 2
        summary = with_count(middle)
        if targets.missed(summary) is None:
            best = middle, summary
        else:
            low = middle
    return best
