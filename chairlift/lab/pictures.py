"""Pictures of runs: membership iteration by iteration, width, memory and service over time, latency by load.

Drawn with matplotlib, which the extra `plot` installs.
"""

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from chairlift.lab.loop import Step
from chairlift.lab.run import Summary
from scheduler.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT

MAX_POINTS = 4000  # of a line: neighbours are merged beyond
MAX_MEMBERS = 40  # rows of the membership picture
MAX_STEPS = 120  # its columns
_COLOURS = ("#1d4ed8", "#c2410c", "#047857", "#7c3aed", "#be123c", "#0e7490", "#a16207", "#57534e", "#111827")
_FAINT: dict[str, Any] = {"linestyle": "--", "alpha": 0.55, "linewidth": 1.0}
_TITLE: dict[str, Any] = {"fontsize": 9.5, "loc": "left"}
_SMALL: dict[str, Any] = {"fontsize": 7.5, "frameon": False}
_DPI = 160
_HEADROOM = 1.18  # for the legend


class NoPicturesError(RuntimeError):
    """matplotlib is not there, or does not draw such a file: a sentence."""


class Watcher:
    """Notes what the pictures need of each step: bounded, however long the run."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_running: list[float] = []
        self.held_share: list[float] = []
        self.num_waiting: list[float] = []
        self.seats: list[tuple[int, int, int]] = []  # (step, request, tokens computed) of the first steps
        self.service: dict[str, list[tuple[float, float]]] = {}  # (time, weighted tokens) of each tenant
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
            self.held_share.append(step.num_held_slots / (blocks.num_blocks * blocks.block_size))
            self.num_waiting.append(step.num_waiting)
            for tenant in {seq.tenant for seq in step.plan.rows}:
                got = INPUT_WEIGHT * tenant.num_input_tokens + OUTPUT_WEIGHT * tenant.num_output_tokens
                self.service.setdefault(tenant.name, []).append((step.end, got))
        self._count += 1
        if len(self.times) >= MAX_POINTS:
            self._every *= 2
            for column in (self.times, self.num_running, self.held_share, self.num_waiting):
                del column[1::2]
            for points in self.service.values():
                del points[1::2]


def check(path: Path) -> None:
    """Raises NoPicturesError unless it can be drawn: better told before a long run than after it."""
    try:
        from matplotlib import backend_bases
    except ImportError as error:
        raise NoPicturesError(
            "pictures are drawn with matplotlib: pip install 'chairlift[plot]', or leave the picture out"
        ) from error
    known = backend_bases.FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise NoPicturesError(f"{path} is no picture by its name: .{', .'.join(sorted(known))} are")


def draw(watched: dict[str, Watcher], path: Path) -> None:
    """A row for each scheme: its first iterations, width and memory over time, and service of tenants."""
    from matplotlib.figure import Figure

    has_tenants = any(len(watcher.service) > 1 for watcher in watched.values())
    num_columns = 3 if has_tenants else 2
    figure = Figure(figsize=(4.8 * num_columns, 2.9 * len(watched)), layout="constrained")
    grid = figure.subplots(len(watched), num_columns, squeeze=False)
    for axes, (name, watcher) in zip(grid, watched.items(), strict=True):
        _membership(axes[0], watcher.seats)
        axes[0].set_title(f"{name}: the first iterations", **_TITLE)
        _over_time(axes[1], watcher)
        axes[1].set_title(f"{name}: width and memory", **_TITLE)
        if has_tenants:
            _service(axes[2], watcher.service)
            axes[2].set_title(f"{name}: service", **_TITLE)
    figure.savefig(path, dpi=_DPI)


def draw_curves(curves: dict[str, list[tuple[float, Summary]]], path: Path) -> None:
    """Latency and throughput against load, a line for each scheme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    first, between, throughput = figure.subplots(1, 3)
    for (name, points), colour, marker in zip(
        curves.items(), cycle(_COLOURS), cycle("osD^vPX<>"), strict=False
    ):
        rates = [rate for rate, _ in points]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}
        first.plot(rates, [item.first_token_p50 for _, item in points], label=name, **style)
        first.plot(rates, [item.first_token_p99 for _, item in points], **style | _FAINT)
        between.plot(rates, [1000 * item.between_tokens_p50 for _, item in points], **style)
        between.plot(rates, [1000 * item.between_tokens_p99 for _, item in points], **style | _FAINT)
        throughput.plot(rates, [item.output_tokens_per_second for _, item in points], **style)
    for axes, title, unit in (
        (first, "time to the first token", "seconds"),
        (between, "time between tokens", "milliseconds"),
        (throughput, "throughput", "output tokens a second"),
    ):
        axes.set_title(title, **_TITLE)
        axes.set_ylabel(unit)
        axes.set_xlabel("requests a second")
        _plain(axes)
        axes.grid(visible=True, which="major", linewidth=0.4, color="#d6d3d1")
    first.set_yscale("log")
    first.yaxis.set_major_formatter("{x:g}")
    between.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=len(curves), frameon=False, fontsize=9)
    first.annotate("full: median · dashed: 99 in 100", (0.03, 0.94), xycoords="axes fraction", fontsize=7.5)
    throughput.set_ylim(bottom=0)
    figure.savefig(path, dpi=_DPI)


def _membership(axes: Any, seats: Iterable[tuple[int, int, int]]) -> None:
    """A bar for each request and iteration; a prompt's chunks are darker than decoding."""
    rows: dict[int, int] = {}
    bars: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for step, request, count in seats:
        row = rows.setdefault(request, len(rows))
        if row < MAX_MEMBERS:
            bars.setdefault((row, count > 1), []).append((step, 1))
    for (row, is_chunk), stretches in bars.items():
        axes.broken_barh(stretches, (row - 0.4, 0.8), color=_COLOURS[1] if is_chunk else "#93c5fd")
    axes.set_ylim(min(len(rows), MAX_MEMBERS) - 0.4, -0.6)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration (dark: more than one token)")
    axes.set_ylabel("request, in order of entry")
    _plain(axes)


def _over_time(axes: Any, watcher: Watcher) -> None:
    axes.plot(watcher.times, watcher.num_waiting, color="#a8a29e", label="waiting", linewidth=1)
    axes.plot(watcher.times, watcher.num_running, color=_COLOURS[0], label="running", linewidth=1.2)
    axes.set_xlabel("seconds")
    axes.set_ylabel("sequences")
    axes.set_ylim(0, _HEADROOM * max([1.0, *watcher.num_waiting, *watcher.num_running]))
    _plain(axes)
    share = axes.twinx()
    share.plot(watcher.times, watcher.held_share, color=_COLOURS[1], linewidth=1, label="KV held")
    share.set_ylim(0, _HEADROOM)
    share.set_yticks([0, 0.25, 0.5, 0.75, 1])
    share.set_ylabel("share of KV held", color=_COLOURS[1], fontsize=9)
    share.tick_params(labelsize=8)
    share.spines["top"].set_visible(False)
    lines = [*axes.get_lines(), *share.get_lines()]
    names = [str(item.get_label()) for item in lines]
    axes.legend(lines, names, **_SMALL, loc="upper center", ncols=3)


def _service(axes: Any, service: dict[str, list[tuple[float, float]]]) -> None:
    """Weighted tokens each tenant has got so far: prompt tokens once, output tokens twice."""
    for (name, points), colour in zip(sorted(service.items()), cycle(_COLOURS), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("weighted tokens got")
    axes.set_ylim(bottom=0)
    axes.legend(**_SMALL, loc="upper left")
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(9)
