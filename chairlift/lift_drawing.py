"""Draws lifts as coloured text for a terminal of a given size. Pure: lifts and a time in, renderables out."""

from collections.abc import Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from chairlift import latency_drawing
from chairlift.latency_drawing import Waits
from chairlift.lift import Cell, End, Kind, Lift

# Far apart from neighbour to neighbour, and of different lightness: for eyes that tell few hues apart.
COLOURS: Final = (39, 214, 42, 205, 227, 99, 203, 51, 148, 177, 209, 75)
_GLYPHS: Final = {Kind.DECODE: "█", Kind.PREFILL: "▒", Kind.STILL: "─", Kind.PADDING: "·"}
_END_GLYPHS: Final = {End.FINISHED: "▌", End.PREEMPTED: "◄", End.CANCELLED: "✗"}
_LEGEND: Final = (
    "▐ gets on   █ decode   ▒ prefill chunk   ─ sits still   ▌ finished   ◄ preempted   ✗ cancelled"
)
_COLUMN_WIDTH: Final = 2
_NAME_WIDTH: Final = 18
_BAR_WIDTH: Final = 16
_QUIET_SECONDS: Final = 2.0
_MIN_SEATS: Final = 4
_QUEUE_SHOWN: Final = 4
# Lines of a panel beside its seats, and of the screen beside its panels.
_PANEL_LINES: Final = 4
_SCREEN_LINES: Final = 4


def screen(
    lifts: Mapping[str, Lift],
    *,
    title: str,
    state: str,
    width: int,
    height: int,
    now: float,
    waits: Mapping[str, Waits] | None = None,
) -> RenderableType:
    """Everything there is to see. `state` is empty while the router answers.

    `waits`: how long clients wait for what, where the router has told.
    """
    waited = [line for name, one in (waits or {}).items() for line in latency_drawing.lines(name, one)]
    head = Text.assemble((title, "bold"), "   ", (state, "red") if state else _totals(lifts, now))
    parts: list[RenderableType] = [head]
    if not lifts and not state:
        parts.append(Text("The lift stands still: nothing has been computed since you look.", style="dim"))
    if lifts:
        room = (height - _SCREEN_LINES - len(waited)) // len(lifts) - _PANEL_LINES
        parts += [
            _panel(name, lift, width=width, num_rows=max(room, _MIN_SEATS), now=now)
            for name, lift in sorted(lifts.items())
        ]
        parts.append(_queue(max(lifts.values(), key=lambda lift: lift.news_at)))
    parts += waited
    parts.append(Text(_LEGEND, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _totals(lifts: Mapping[str, Lift], now: float) -> Text:
    rate = sum(lift.tokens_per_second(now) for lift in lifts.values())
    riding = sum(lift.num_riding for lift in lifts.values())
    return Text(f"{rate:.0f} tokens/s   {riding} riding")


def _panel(name: str, lift: Lift, *, width: int, num_rows: int, now: float) -> Panel:
    gauges, inner = lift.gauges, width - 4
    quiet = now - lift.news_at
    rows = [_seat(lift, seat, inner) for seat in range(min(len(lift.seated), num_rows))]
    hidden = len(lift.seated) - len(rows)
    figures = Text(f"{lift.num_riding} of {gauges.max_num_seqs} seats", no_wrap=True)
    figures.append(f"   {gauges.step_us / 1000:.1f} ms a step, {gauges.idle_us / 1000:.1f} idle before   ")
    figures.append_text(_blocks(lift))
    if hidden:
        figures.append(f"   {hidden} more seats than fit here", style="dim")
    title = f"{name}   step {lift.step_id}"
    if lift.num_riding and quiet > _QUIET_SECONDS:
        title += f"   no step for {quiet:.0f} s"
    return Panel(Group(*rows, figures), title=Text(title), title_align="left")


def _seat(lift: Lift, seat: int, width: int) -> Text:
    """One row: who sits there, and what was done there, the newest step at the right."""
    member = lift.seated[seat]
    name = member.name if member else ""
    if len(name) > _NAME_WIDTH:
        name = name[: _NAME_WIDTH - 1] + "…"
    row = Text(f"{seat + 1:>3} {name:<{_NAME_WIDTH}} ", no_wrap=True, end="")
    num_columns = max(width - len(row.plain), 0) // _COLUMN_WIDTH
    columns = list(lift.columns)[-num_columns:] if num_columns else []
    row.append(" " * _COLUMN_WIDTH * (num_columns - len(columns)))
    for column in columns:
        cell = column[seat] if seat < len(column) else None
        row.append_text(_cell(cell))
    row.end = "\n"
    return row


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text(" " * _COLUMN_WIDTH)
    glyph = _GLYPHS[cell.kind]
    left = "▐" if cell.entered else glyph
    right = _END_GLYPHS[cell.end] if cell.end else glyph
    colour = f"color({COLOURS[cell.rider.seq_id % len(COLOURS)]})"
    return Text(left + right, style="dim" if cell.kind is Kind.PADDING else colour)


def _blocks(lift: Lift) -> Text:
    """The KV blocks as a bar: owned, cached, free."""
    gauges = lift.gauges
    owned = gauges.num_blocks - gauges.num_free_blocks
    of_bar = _BAR_WIDTH / max(gauges.num_blocks, 1)
    num_owned = round(owned * of_bar)
    num_cached = min(round(gauges.num_cached_blocks * of_bar), _BAR_WIDTH - num_owned)
    bar = Text("KV ")
    bar.append("█" * num_owned, style="cyan")
    bar.append("▒" * num_cached, style="cyan")
    bar.append("░" * (_BAR_WIDTH - num_owned - num_cached), style="dim")
    free = gauges.num_free_blocks - gauges.num_cached_blocks
    return bar.append(f" {owned} owned, {gauges.num_cached_blocks} cached, {free} free")


def _queue(lift: Lift) -> Text:
    """Who waits, the most important first: as the newest step told."""
    gauges = lift.gauges
    if not gauges.num_waiting:
        return Text("nobody waits", style="dim")
    groups = [
        f"class {priority}{f' {tenant}' if tenant else ''}: {count}"
        for priority, tenant, count in sorted(gauges.queue)[:_QUEUE_SHOWN]
    ]
    return Text(f"{gauges.num_waiting} waiting   " + "   ".join(groups), no_wrap=True, overflow="ellipsis")
