"""What went wrong in a run, as far as a law must know: who was hit by it, and what that may cost.

Requests are known by the first id of their prompts.
"""

from collections import Counter, defaultdict

from scheduler.suspects import MAX_EXCUSES


class Ledger:
    """Of one world."""

    def __init__(self) -> None:
        self.num_faults = 0
        self.num_preemptions: Counter[int] = Counter()
        self._hits: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def hit(self, request: int, begin: int, end: int) -> None:
        """An executor was lost while it may have been computing these positions."""
        self._hits[request].append((begin, end))

    def may_look_guilty(self, request: int) -> bool:
        """Whether it was hit twice at one place, or so often that no excuse counts any more."""
        hits = self._hits[request]
        twice = any(
            begin < other_end and other_begin < end
            for at, (begin, end) in enumerate(hits)
            for other_begin, other_end in hits[:at]
        )
        return twice or len(hits) >= MAX_EXCUSES + 2
