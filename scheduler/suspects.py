"""Finds the request that kills executors: a search by halves that clears the innocent on the way.

An executor that dies takes no request with it: all are computed again. But if it died because of one of them,
the next executor dies as well, and the next. So:

    1st crash   all with a row in the fatal plan become suspects; all are computed again, as usual
    2nd crash   those in the fatal plan that were suspects already are searched: half of them, newcomers
                first, is on trial, with no others beside them; the rest waits
    trial       a suspect that completes two steps, and passes the point where it was, is cleared; all
                cleared: the next half; another crash: it is one of those in the fatal plan, and half of
                these are the next trial
    one alone   in the fatal plan, for the second time or on trial: guilty

With one guilty among n, that is at most log2(n) + 2 crashes. Crashes without a culprit (a machine is switched
off) cost those that they hit a moment on trial. A suspect that is hit alone, but at another place in its
tokens than before, is excused: most deadly requests kill at one place. This happens at most three times,
so it takes that many more crashes to find one that kills at no particular place. To be found guilty by
mistake, a request must be hit while it is alone, in the very step in which it was hit before.

An executor that lives but gives answers that do not fit counts as one that died; its rehearsal tells whether
that speaks against anything but itself (`rehearsal`).

Pure: deals in names of suspects (a request: its choices share the prompt, and so the blame), and knows
neither sequences nor executors.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

NUM_STEPS_TO_CLEAR = 2
MAX_EXCUSES = 3

T = TypeVar("T")


class Suspects(Generic[T]):
    """The suspects on all executors of one scheduler."""

    __slots__ = ("_num_crashes", "_num_excuses", "_num_steps", "group", "trial")

    def __init__(self) -> None:
        self._num_crashes: dict[T, int] = {}  # since it was last cleared
        self._num_steps: dict[T, int] = {}  # completed since its last crash
        self._num_excuses: dict[T, int] = {}  # crashes that do not count against it
        self.group: list[T] = []
        """The suspects being searched, newcomers first. If any request is to blame, it is one of these."""
        self.trial: list[T] = []
        """The part of the group that may run now, with no others; the rest of the group waits."""

    def __bool__(self) -> bool:
        """Whether there are any suspects."""
        return bool(self._num_crashes)

    def num_crashes(self, item: T) -> int:
        """How many executors have died while computing it since it was last cleared."""
        return self._num_crashes.get(item, 0)

    def crashed(self, rows: Iterable[T], *, is_elsewhere: bool = False) -> T | None:
        """An executor died computing these, newcomers first; returns the guilty one, if it is known.

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
            # Another search may be going on: these come after it.
            self._search([*self.group, *(item for item in again if item not in self.group)])
        return None

    def completed(self, item: T, *, is_past: bool) -> bool:
        """`item` completed a step; `is_past`: further than at its last crash. True when it is cleared."""
        if item not in self._num_crashes:
            return False
        self._num_steps[item] += 1
        if not is_past or self._num_steps[item] < NUM_STEPS_TO_CLEAR:
            return False
        self._forget(item)
        return True

    def ended(self, item: T) -> None:
        """`item` has ended, for whatever reason: it need not be searched any more."""
        if item in self._num_crashes:
            self._forget(item)

    def set_aside(self, item: T) -> None:
        """`item` cannot be tried for now: the search goes on without it, but its crashes are remembered."""
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
        """Drops the record against it, whether it was cleared, found guilty, or has ended."""
        del self._num_crashes[item], self._num_steps[item]
        self._num_excuses.pop(item, None)
        self.set_aside(item)
