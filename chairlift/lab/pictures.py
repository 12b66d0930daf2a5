"""Pictures of a run: what the executors did over time, and membership, iteration by iteration.

Drawn with matplotlib, which the extra `plot` brings.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chairlift.lab.loop import Step

MAX_POINTS = 4000  # of a line: neighbours are merged beyond
MAX_MEMBERS = 40  # rows of the membership picture
MAX_STEPS = 120  # its columns


class NoPicturesError(RuntimeError):
    """matplotlib is not there: a sentence."""


class Watcher:
    """Notes what the pictures need of each step: bounded, however long the run."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_running: list[float] = []
        self.held_share: list[float] = []
        self.num_waiting: list[float] = []
        self.seats: list[tuple[int, int, int]] = []  # (step, request, tokens computed) of the first steps
        self._every = 1
        self._count = 0

    def note(self, step: Step) -> None:
        """One step more."""
        blocks = step.state.blocks
        if self._count < MAX_STEPS:
            self.seats += [
                (self._count, int(seq.request.request_id), count)
                for seq, count in zip(step.plan.rows, step.plan.num_tokens, strict=True)
                if not seq.is_padding
            ]
        if self._count % self._every == 0:
            self.times.append(step.end)
            self.num_running.append(len(step.state.running))
            self.held_share.append(1 - blocks.num_free / blocks.num_blocks)
            self.num_waiting.append(step.num_waiting)
        self._count += 1
        if len(self.times) >= MAX_POINTS:
            self._every *= 2
            for column in (self.times, self.num_running, self.held_share, self.num_waiting):
                del column[1::2]


def check() -> None:
    """Raises NoPicturesError unless pictures can be drawn: better told before a long run than after it."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise NoPicturesError(
            "pictures are drawn with matplotlib: pip install 'chairlift[plot]', or leave --png out"
        ) from error


def draw(watched: dict[str, Watcher], path: Path) -> None:
    """For each scheme a row: membership of its first iterations, and width, queue and KV over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2 * len(watched)), layout="constrained")
    grid = figure.subplots(len(watched), 2, squeeze=False)
    for (left, right), (name, watcher) in zip(grid, watched.items(), strict=True):
        _membership(left, watcher.seats)
        left.set_title(f"{name}: the first iterations", fontsize=10)
        right.plot(watcher.times, watcher.num_running, color="#1d4ed8", label="running", linewidth=1)
        right.plot(watcher.times, watcher.num_waiting, color="#a8a29e", label="waiting", linewidth=1)
        right.set_xlabel("seconds")
        right.set_ylabel("sequences")
        right.legend(loc="upper left", fontsize=8)
        share = right.twinx()
        share.plot(watcher.times, watcher.held_share, color="#c2410c", linewidth=1)
        share.set_ylim(0, 1.05)
        share.set_ylabel("share of KV blocks held", color="#c2410c")
        right.set_title(f"{name}: width and memory over time", fontsize=10)
    figure.savefig(path, dpi=110)


def _membership(axes: Any, seats: Iterable[tuple[int, int, int]]) -> None:
    """A bar for each request and iteration; a prompt's chunks are darker than decoding."""
    shown: dict[int, int] = {}
    for step, request, count in seats:
        row = shown.setdefault(request, len(shown))
        if row < MAX_MEMBERS:
            colour = "#c2410c" if count > 1 else "#93c5fd"
            axes.barh(row, 1, left=step, height=0.8, color=colour)
    axes.invert_yaxis()
    axes.set_xlabel("iteration (dark: more than one token)")
    axes.set_ylabel("request, in order of entry")
