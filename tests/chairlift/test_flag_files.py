import argparse
from pathlib import Path

import pytest

from chairlift.flag_files import to_write


def test_a_file_that_can_be_written_is_a_path(tmp_path: Path) -> None:
    assert to_write(f"{tmp_path}/new.json") == tmp_path / "new.json"
    assert not (tmp_path / "new.json").exists()
    assert to_write("in_the_working_directory.json") == Path("in_the_working_directory.json")


def test_one_that_cannot_be_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"it is '{tmp_path}', which is a folder"):
        to_write(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match=f"and there is no folder {tmp_path}/no"):
        to_write(f"{tmp_path}/no/such.json")
    with pytest.raises(argparse.ArgumentTypeError, match="it is '-', and must be a file"):
        to_write("-")


def test_one_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # who runs the tests may be allowed everything
    with pytest.raises(argparse.ArgumentTypeError, match="which may not be written"):
        to_write(f"{tmp_path}/new.json")
