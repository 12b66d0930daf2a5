"""Times at which a sequence must be looked at: deadline, end of orphan grace, end of a kept result.

A heap of (time, sequence). An entry only says "look": what is due depends on the sequence's own fields, so no
entry needs to be removed when a time changes. Pure: time comes in as an argument.
"""

import heapq

from scheduler.sequence import Sequence, State


def next_due(seq: Sequence) -> float | None:
    """The earliest time at which something happens to `seq` by itself, or None."""
    if seq.state is State.FINISHED:
        return seq.forget_at
    times = [time for time in (seq.request.deadline, seq.orphaned_until) if time is not None]
    return min(times, default=None)


class Timers:
    """When to look at which sequence."""

    __slots__ = ("_heap", "_next_entry")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._next_entry = 0

    def watch(self, seq: Sequence, num_live: int) -> None:
        """Will look at `seq` when its next time comes. `num_live` bounds how many stale entries stay."""
        due = next_due(seq)
        if due is None:
            return
        self._next_entry += 1
        heapq.heappush(self._heap, (due, self._next_entry, seq))
        if len(self._heap) > 64 + 4 * num_live:
            newest = {seq: (time, entry) for time, entry, seq in sorted(self._heap, key=lambda item: item[1])}
            self._heap = [
                (time, entry, seq) for seq, (time, entry) in newest.items() if next_due(seq) is not None
            ]
            heapq.heapify(self._heap)

    @property
    def next_time(self) -> float | None:
        """When to call `due` again, or None."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Sequence]:
        """Sequences whose time has come, each once."""
        found: dict[Sequence, None] = {}
        while self._heap and self._heap[0][0] <= now:
            seq = heapq.heappop(self._heap)[2]
            time = next_due(seq)
            if time is not None and time <= now:
                found[seq] = None
            elif time is not None:  # its time has moved: look again then
                self._next_entry += 1
                heapq.heappush(self._heap, (time, self._next_entry, seq))
        return list(found)
