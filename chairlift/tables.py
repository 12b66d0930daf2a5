"""Tables drawn with rich: as wide as the terminal, or as their content where there is none (a pipe)."""

from typing import Any

from rich.console import Console
from rich.table import Table

_UNBOUNDED_COLUMNS = 500


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
