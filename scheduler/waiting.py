"""The waiting sequences, in order of service.

A heap with lazy deletion: entering and leaving cost O(log n), giving up while waiting costs O(1) and the
stale entry is swept out when it comes up, or when stale entries outnumber live ones. So neither a step nor a
cancel depends on how many wait. Pure.
"""

import heapq
from collections.abc import Iterator

from scheduler.policy import waiting_key
from scheduler.sequence import Sequence, State

_PARKED = 0  # no entry of the heap has this number


class WaitingQueue:
    """Sequences in state WAITING. The caller moves states; a sequence that is no longer WAITING is gone."""

    __slots__ = ("_entries", "_entry_of", "_next_entry", "num_tokens")

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[int, bool, float, int], int, Sequence]] = []
        self._entry_of: dict[Sequence, int] = {}  # the entry that counts: one may wait more than once
        self._next_entry = 0
        self.num_tokens = 0  # of all that wait: what is known of them stays as it is until they enter

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._entry_of)

    def push(self, seq: Sequence) -> None:
        """Adds a sequence that waits."""
        assert seq.state is State.WAITING
        assert seq not in self._entry_of
        self.num_tokens += len(seq.token_ids)
        self._add_entry(seq)

    def _add_entry(self, seq: Sequence) -> None:
        self._next_entry += 1
        self._entry_of[seq] = self._next_entry
        heapq.heappush(self._entries, (waiting_key(seq), self._next_entry, seq))

    def peek(self) -> Sequence | None:
        """Who is served next, or None."""
        while self._entries:
            _, entry, seq = self._entries[0]
            if self._entry_of.get(seq) == entry:
                return seq
            heapq.heappop(self._entries)
        return None

    def park(self, seq: Sequence) -> None:
        """`seq` still waits, but is not served before `unpark`."""
        self._entry_of[seq] = _PARKED

    def unpark(self, seq: Sequence) -> None:
        """Back into its place, if it still waits and was parked."""
        if self._entry_of.get(seq) == _PARKED:
            self._add_entry(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        del self._entry_of[seq]
        self.num_tokens -= len(seq.token_ids)
        if len(self._entries) > 64 + 2 * len(self._entry_of):
            self._entries = [item for item in self._entries if self._entry_of.get(item[2]) == item[1]]
            heapq.heapify(self._entries)
