"""What became of the requests of a run, in columns: a few bytes a request, so that a million fit. Pure."""

import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Doubles = array[float]
    Integers = array[int]
else:  # Python 3.11 cannot subscript it at run time
    Doubles = Integers = array

_BUCKETS_PER_E = 200  # of the gaps' histogram: half a per cent wide
NEVER = math.nan


class Histogram:
    """Durations by the logarithm, half a per cent wide: bounded however many there are."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` times the same duration, above 0."""
        bucket = round(_BUCKETS_PER_E * math.log(max(seconds, 1e-9)))
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.count += count
        self.total += seconds * count

    def quantile(self, share: float) -> float:
        """What `share` of them do not exceed, within a quarter per cent; never, when there are none."""
        wanted, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return math.exp(bucket / _BUCKETS_PER_E)
        return NEVER


class Records:
    """One entry a request, in the order in which they came.

    Times in seconds; `NEVER` where it never came to that.
    """

    def __init__(self) -> None:
        self.arrival: Doubles = array("d")
        self.first_token: Doubles = array("d")
        self.ended: Doubles = array("d")
        self.num_prompt_tokens: Integers = array("I")
        self.num_output_tokens: Integers = array("I")  # delivered
        self.tenant: Integers = array("I")  # index into `tenants`
        self.in_time = bytearray()  # it ended by itself, and before its deadline if it had one
        self.tenants: dict[str, int] = {}
        self.gaps = Histogram()  # between a request's tokens
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self.arrival)

    def add(self, arrival: float, num_prompt_tokens: int, tenant: str) -> int:
        """One more; returns its index."""
        self.arrival.append(arrival)
        self.first_token.append(NEVER)
        self.ended.append(NEVER)
        self.num_prompt_tokens.append(num_prompt_tokens)
        self.num_output_tokens.append(0)
        self.tenant.append(self.tenants.setdefault(tenant, len(self.tenants)))
        self.in_time.append(0)
        return len(self.arrival) - 1

    def first_token_seconds(self, tenant: str | None = None) -> list[float]:
        """From arrival to first token, of those that got one, sorted."""
        return sorted(self._since_arrival(self.first_token, tenant))

    def total_seconds(self) -> list[float]:
        """From arrival to end, of those that got a token, sorted."""
        return sorted(
            end - start
            for start, first, end in zip(self.arrival, self.first_token, self.ended, strict=True)
            if first == first and end == end  # noqa: PLR0124 - NaN is not itself
        )

    def seconds_per_output_token(self) -> list[float]:
        """Whole time by output tokens ("normalised latency"), of those that ended by themselves, sorted."""
        columns = zip(self.arrival, self.ended, self.num_output_tokens, strict=True)
        return sorted((end - start) / count for start, end, count in columns if count and end == end)  # noqa: PLR0124

    def _since_arrival(self, column: Doubles, tenant: str | None) -> Iterable[float]:
        wanted = None if tenant is None else self.tenants.get(tenant, -1)
        for start, end, whose in zip(self.arrival, column, self.tenant, strict=True):
            if end == end and wanted in {None, whose}:  # noqa: PLR0124
                yield end - start


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values, the one that `share` of them do not exceed; never, when there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else NEVER
