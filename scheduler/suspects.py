"""Who is to blame when executors die: a search by halves that clears the innocent on the way.

An executor that dies takes nobody's request with it: all are computed again. Unless one of them is what it
died of; then the next one dies as well, and the next. So:

    1st crash   everybody with a row in the fatal plan becomes a suspect; all are computed again, as ever
    2nd crash   those of the fatal plan who were suspects already are searched: half of them, newcomers first,
                is on trial, among themselves; the others wait
    trial       whoever completes two steps, and gets past where it was, is cleared; all cleared: the next
                half; it dies again: it is one of those in the fatal plan, half of whom are the next trial
    one alone   in the fatal plan, for the second time or on trial: guilty

With one guilty among n that is at most log2(n) + 2 crashes. Crashes that nobody is to blame for (a machine is
switched off) cost those they hit a moment on trial. One alone that is hit at another place of its tokens than
before is excused: what is deadly is mostly so at one place. Three times at most, and so many crashes more it
takes to find one that is deadly at no certain place. To be found guilty by mistake, a request must be hit
while it is alone, in the very step in which it was hit before.

An executor that lives, and answers what does not fit, counts as one that died; whether that speaks against
anybody but itself, its rehearsal tells (`rehearsal`).

Pure: names what is suspected (a request: its choices share the prompt, and so the blame), and knows neither
sequences nor executors.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

NUM_STEPS_TO_CLEAR = 2
MAX_EXCUSES = 3

T = TypeVar("T")


class Suspects(Generic[T]):
    """Suspects of all executors of one scheduler."""

    __slots__ = ("_num_crashes", "_num_excuses", "_num_steps", "group", "trial")

    def __init__(self) -> None:
        self._num_crashes: dict[T, int] = {}  # since it was last cleared
        self._num_steps: dict[T, int] = {}  # completed since its last crash
        self._num_excuses: dict[T, int] = {}  # crashes of those that do not count against it
        self.group: list[T] = []
        """Who is searched, newcomers first. One of them is to blame, if anybody is."""
        self.trial: list[T] = []
        """The part of the group that runs now, among itself; the rest of it waits."""

    def __bool__(self) -> bool:
        """Whether there is anybody to watch."""
        return bool(self._num_crashes)

    def num_crashes(self, item: T) -> int:
        """How many executors have died under it since it was last cleared."""
        return self._num_crashes.get(item, 0)

    def crashed(self, rows: Iterable[T], *, is_elsewhere: bool = False) -> T | None:
        """An executor died computing these, newcomers first; returns who is guilty, if that is known.

        `is_elsewhere`: each of them was at another place than when it was hit before.
        """
        rows = list(dict.fromkeys(rows))
        if is_elsewhere and len(rows) == 1 and self._is_excused(rows[0]):
            return None
        again = [item for item in rows if item in self._num_crashes]
        for item in rows:
            self._num_crashes[item] = self._num_crashes.get(item, 0) + 1
            self._num_steps[item] = 0
        tried = [item for item in rows if item in self.trial]
        if len(rows) == 1 and again:
            self._forget(rows[0])
            return rows[0]  # guilty
        if tried:
            self._search(tried)
        elif again:
            # Another search may go on: these come after it.
            self._search([*self.group, *(item for item in again if item not in self.group)])
        return None

    def completed(self, item: T, *, is_past: bool) -> bool:
        """It completed a step; `is_past`: it is further than at its last crash. True when it is cleared."""
        if item not in self._num_crashes:
            return False
        self._num_steps[item] += 1
        if not is_past or self._num_steps[item] < NUM_STEPS_TO_CLEAR:
            return False
        self._forget(item)
        return True

    def ended(self, item: T) -> None:
        """It is over, for whatever reason: nothing is left to search for."""
        if item in self._num_crashes:
            self._forget(item)

    def set_aside(self, item: T) -> None:
        """It cannot be tried for now: the search goes on without it, and what it has met is remembered."""
        if item in self.group:
            self.group.remove(item)
        if item in self.trial:
            self.trial.remove(item)
            if not self.trial:
                self._search(self.group)

    def _is_excused(self, item: T) -> bool:
        num_excuses = self._num_excuses.get(item, 0)
        if item not in self._num_crashes or num_excuses >= MAX_EXCUSES:
            return False
        self._num_excuses[item] = num_excuses + 1
        self._num_steps[item] = 0
        return True

    def _search(self, group: list[T]) -> None:
        self.group = group
        self.trial = group[: max(1, len(group) // 2)]

    def _forget(self, item: T) -> None:
        """Drops what is remembered against it, whether it was cleared, found guilty, or is over."""
        del self._num_crashes[item], self._num_steps[item]
        self._num_excuses.pop(item, None)
        self.set_aside(item)
