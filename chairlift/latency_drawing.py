"""How long clients wait, as two lines for a terminal: a bar for each bucket, with its bound below.

Pure: from counts to renderables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

_BARS: Final = "▁▂▃▄▅▆▇█"
_COLUMN_WIDTH: Final = 6
_NAME_WIDTH: Final = 28
_SHARES: Final = (("half", 0.5), ("99 %", 0.99))


@dataclass(frozen=True, slots=True)
class Waits:
    """A histogram: `counts[i]` waits above `bounds[i - 1]` and not above `bounds[i]`, seconds."""

    bounds: Sequence[float]
    counts: Sequence[int]

    def within(self, share: float) -> float | None:
        """The bound that this share of all waits does not exceed; None when it is the last, open bucket."""
        wanted, so_far = share * sum(self.counts), 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            so_far += count
            if so_far >= wanted:
                return bound
        return None


def lines(name: str, waits: Waits) -> list[Text]:
    """Bars; below them within what half of all waits are and 99 of 100, and the bounds. None before any."""
    if not sum(waits.counts):
        return []
    most = max(waits.counts)
    bars = Text(f"{name:<{_NAME_WIDTH}}", no_wrap=True, overflow="ellipsis")
    for count in waits.counts:
        bar = _BARS[count * (len(_BARS) - 1) // most] * (_COLUMN_WIDTH - 1) if count else ""
        bars.append(f"{bar:<{_COLUMN_WIDTH}}", style="cyan")
    shares = ", ".join(f"{told} {_within(waits, share)}" for told, share in _SHARES)
    axis = Text(f"{shares:<{_NAME_WIDTH}}", no_wrap=True, overflow="ellipsis")
    for label in (*map(_seconds, waits.bounds), "more"):
        axis.append(f"{label:<{_COLUMN_WIDTH}}", style="dim")
    return [bars, axis]


def _within(waits: Waits, share: float) -> str:
    bound = waits.within(share)
    return f"> {_seconds(waits.bounds[-1])}" if bound is None else f"≤ {_seconds(bound)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"
