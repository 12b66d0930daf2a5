"""Tables for people: as wide as the terminal, or as they like where there is none (a pipe, a file)."""

from rich.console import Console
from rich.table import Table

_UNBOUNDED_COLUMNS = 500


def show(table: Table) -> None:
    """Prints the table to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBOUNDED_COLUMNS)
    console.print(table)
