"""What went wrong in a run, as far as a law must know: who was hit by it, and what that may cost.

Requests are known by the first id of their prompts.
"""

from collections import Counter, defaultdict

from scheduler.suspects import MAX_EXCUSES

Bout = tuple[str, int]  # an executor, and how often it had one


class Ledger:
    """Of one world."""

    def __init__(self) -> None:
        self.num_faults = 0
        self.num_preemptions: Counter[int] = Counter()
        self._hits: dict[int, list[tuple[int, int, Bout | None]]] = defaultdict(list)

    def hit(self, request: int, begin: int, end: int, bout: Bout | None) -> None:
        """An executor was lost while it may have been computing these positions.

        `bout`: it answered wrongly, and would have whatever it computed. All hits of one bout are one.
        """
        self._hits[request].append((begin, end, bout))

    def may_look_guilty(self, request: int) -> bool:
        """Whether it was hit twice at one place, or so often that no excuse counts any more."""
        hits = self._hits[request]
        twice = any(
            begin < other_end and other_begin < end and (bout is None or bout != other_bout)
            for at, (begin, end, bout) in enumerate(hits)
            for other_begin, other_end, other_bout in hits[:at]
        )
        bouts = [bout for _, _, bout in hits]
        return twice or bouts.count(None) + len({*bouts} - {None}) >= MAX_EXCUSES + 2
