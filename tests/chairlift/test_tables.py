import pytest
from rich.table import Table

from chairlift.tables import show


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
