"""KV memory without paging: one run of neighbouring slots for each sequence, as long as it may become.

Two ways to find a run. Pure.

    first fit    the first gap that is long enough; runs are as long as asked, gaps are joined when runs end
    buddy        lengths are rounded up to powers of two; a free run is halved until it fits, and halves that
                 are both free are joined again
"""

from bisect import bisect_left
from typing import Protocol


class Ranges(Protocol):
    """All slots of one executor."""

    num_held: int  # slots that nobody else can have
    longest: int  # run that there is room for when nothing is held

    def take(self, length: int) -> int | None:
        """Where a run of `length` slots begins that is held from now on; None when there is no such run."""
        ...

    def give_back(self, start: int) -> None:
        """The run that begins there is free."""
        ...


class FirstFit:
    """Gaps in their order."""

    def __init__(self, num_slots: int) -> None:
        self.num_held = 0
        self.longest = num_slots
        self._gaps = [(0, num_slots)] if num_slots else []  # start, end
        self._lengths: dict[int, int] = {}

    def take(self, length: int) -> int | None:
        """As `Ranges.take`."""
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= length:
                self._gaps[index : index + 1] = [(start + length, end)] if start + length < end else []
                self._lengths[start] = length
                self.num_held += length
                return start
        return None

    def give_back(self, start: int) -> None:
        """As `Ranges.give_back`."""
        length = self._lengths.pop(start)
        self.num_held -= length
        end = start + length
        at = bisect_left(self._gaps, (start, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == start:
            at -= 1
            start = self._gaps.pop(at)[0]
        self._gaps.insert(at, (start, end))


class Buddy:
    """Free runs by their length, a power of two; what is no power of two in all begins as several."""

    def __init__(self, num_slots: int) -> None:
        self.num_held = 0
        self.longest = 1 << num_slots.bit_length() - 1 if num_slots else 0
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # starts, by exponent
        self._exponents: dict[int, int] = {}  # of runs held
        start = 0
        for exponent in reversed(range(num_slots.bit_length())):
            if num_slots >> exponent & 1:
                self._free[exponent].add(start)
                start += 1 << exponent

    def take(self, length: int) -> int | None:
        """As `Ranges.take`."""
        wanted = (length - 1).bit_length()
        found = next((e for e in range(wanted, len(self._free)) if self._free[e]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for exponent in reversed(range(wanted, found)):
            self._free[exponent].add(start + (1 << exponent))
        self._exponents[start] = wanted
        self.num_held += 1 << wanted
        return start

    def give_back(self, start: int) -> None:
        """As `Ranges.give_back`."""
        exponent = self._exponents.pop(start)
        self.num_held -= 1 << exponent
        while (buddy := start ^ (1 << exponent)) in self._free[exponent]:
            self._free[exponent].remove(buddy)
            start, exponent = min(start, buddy), exponent + 1
        self._free[exponent].add(start)
