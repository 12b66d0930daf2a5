"""Tables drawn with rich: as wide as the terminal, or as their content where there is none (a pipe)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

_UNBOUNDED_COLUMNS = 500
T = TypeVar("T")


class PlainConsole(Console):
    """Shows texts as they are: they may be a client's, brackets and all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        """Leaves it to the command line, as where nothing is drawn: rich would end the process by itself."""
        raise BrokenPipeError


def show(table: Table) -> None:
    """Prints the table to stdout."""
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=_UNBOUNDED_COLUMNS)
    console.print(table)


def compared(title: str, columns: Mapping[str, T], cells: Mapping[str, Callable[[T], str]]) -> Table:
    """Things of one kind side by side: a named column for each, and a row for each of `cells`."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for head, cell in cells.items():
        table.add_row(head, *map(cell, columns.values()))
    return table


def figure(value: float, form: str) -> str:
    """A number in this form; a dash for NaN, where nobody came to that."""
    return "-" if math.isnan(value) else form.format(value)


def seconds(value: float) -> str:
    """A time, in seconds, or milliseconds below one."""
    return figure(1000 * value, "{:.1f} ms") if value < 1 else figure(value, "{:,.2f} s")
