import pytest

from chairlift.__main__ import main
from chairlift.about import about


def test_what_stands_behind_the_name_is_a_sentence() -> None:
    assert about("`chairlift watch`: follows a batch: step by step.") == "Follows a batch: step by step."


def test_without_docstrings_there_is_nothing_to_say() -> None:
    assert about(None) == ""


@pytest.mark.parametrize(
    "command",
    ["watch", "status", "explain", "demo", "simulate", "calibrate", "replay", "capacity"],
)
def test_help_opens_with_a_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out.split("\n\n")[1]
    assert told[0].isupper()
    assert "." in told
