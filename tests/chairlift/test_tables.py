import pytest
from rich.table import Table

from chairlift.tables import show
from tests.chairlift.gone import NobodyReads


def test_a_table_in_a_pipe_is_not_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("process", "state")
    table.add_row(
        "scheduler unix:/a/folder/of/a/long/name/scheduler.sock", "serving, term 4, and nothing to do"
    )
    show(table)
    [row] = [line for line in capsys.readouterr().out.splitlines() if "scheduler" in line]
    assert "unix:/a/folder/of/a/long/name/scheduler.sock" in row
    assert row.rstrip(" │").endswith("nothing to do")


def test_what_clients_named_so_is_shown_so(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[bold]name", title="a[/b]")
    table.add_row("[red]x[/blue]")
    show(table)
    out = capsys.readouterr().out
    for text in ("a[/b]", "[bold]name", "[red]x[/blue]"):
        assert text in out


def test_a_reader_that_has_gone_is_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", NobodyReads())
    with pytest.raises(BrokenPipeError):  # rich would make it exit code 1
        show(Table("name"))
