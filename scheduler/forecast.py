"""How many blocks the running sequences are expected to need at the peak, before enough of them have ended.

Each running sequence grows by one token a step until it ends. Sorted by remaining tokens, longest first, the
need peaks at one of the ends: when the i-th ends, it and the i - 1 that go on longer hold what they hold now,
and each has grown by the i-th's remaining tokens ("Past-Future Scheduler for LLM Serving", ASPLOS'25, uses
the same peak). Remaining tokens are bounded by the request's limit, and expected from the lengths seen.

Pure.
"""

from collections.abc import Iterable
from operator import itemgetter

_BUCKETS = 24  # output lengths by powers of two
_FORGET = 0.999  # weight of the past at each end: a memory of about a thousand ends
_FIRST_GUESS = 256  # output tokens
_MIN_WEIGHT = 16.0  # ends before an expectation is worth anything


class LengthModel:
    """Expected remaining output, from the lengths of sequences that have ended."""

    __slots__ = ("_means", "_sums", "_weights")

    def __init__(self) -> None:
        self._means: list[int | None] | None = None  # by bucket, once asked for; outdated by the next end
        self._weights = [0.0] * _BUCKETS
        self._sums = [0.0] * _BUCKETS

    def observe(self, num_output_tokens: int) -> None:
        """Learns from one sequence that came to its natural end."""
        self._means = None
        for index in range(_BUCKETS):
            self._weights[index] *= _FORGET
            self._sums[index] *= _FORGET
        index = min(_BUCKETS - 1, num_output_tokens.bit_length())
        self._weights[index] += 1.0
        self._sums[index] += num_output_tokens

    def remaining(self, num_output_tokens: int, limit: int) -> int:
        """Expected further tokens of a sequence that has `num_output_tokens` and may have `limit` in all.

        The mean of the observed lengths in its own and the longer buckets. With too few observed, all it may
        have, but no more than a first guess: limits are often left at the model's length, and hardly ever
        reached.
        """
        at_most = limit - num_output_tokens
        means = self._means
        if means is None:
            means = self._means = self._means_by_bucket()
        if not means:
            return min(at_most, max(_FIRST_GUESS, num_output_tokens))
        mean = means[min(_BUCKETS - 1, num_output_tokens.bit_length())]
        if mean is None:
            return at_most
        # At least a tenth of what it has, once more: the longer it runs, the longer it will go on.
        expected = mean - num_output_tokens
        at_least = num_output_tokens // 10 + 1
        expected = max(expected, at_least)
        return max(0, at_most) if expected > at_most else expected

    def _means_by_bucket(self) -> list[int | None]:
        """Mean length in each bucket and the longer ones; empty when too few lengths were observed.

        Needed for every running sequence whenever one might enter, so it is kept until the next end.
        """
        if sum(self._weights) < _MIN_WEIGHT:
            return []
        weights = [sum(self._weights[first:]) for first in range(_BUCKETS)]
        return [
            round(sum(self._sums[first:]) / weight) if weight >= 1.0 else None
            for first, weight in enumerate(weights)
        ]


def peak_blocks(members: Iterable[tuple[int, int]], block_size: int) -> int:
    """Blocks expected at the peak, for members of (tokens now, tokens remaining).

    An expectation, not a bound: the last block of each member is assumed to be half full, as it is on
    average. The true peak may be higher by half a block per member, and one.
    """
    by_remaining = sorted(members, key=itemgetter(1), reverse=True)
    half_a_block = block_size // 2
    held = 0
    peak = 0
    for count, (num_tokens, remaining) in enumerate(by_remaining, start=1):
        held += num_tokens
        # Every member still there has grown by `remaining`; each leaves half a block empty.
        at_its_end = held + count * (remaining + half_a_block)
        peak = max(peak, at_its_end)
    return -(-peak // block_size)
