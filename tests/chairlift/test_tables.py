import pytest
from rich.table import Table

from chairlift.tables import compared, seconds, show
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


def test_things_of_one_kind_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    show(compared("waits", {"now": 0.25, "then": 1250.0, "never": float("nan")}, {"mean": seconds}))
    out = capsys.readouterr().out
    [names] = [line for line in out.splitlines() if "never" in line]
    [row] = [line for line in out.splitlines() if "mean" in line]
    assert [name.strip() for name in names.split("┃")[1:-1]] == ["", "now", "then", "never"]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["mean", "250.0 ms", "1,250.00 s", "-"]
