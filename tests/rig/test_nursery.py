"""What comes from the nursery is a process like any other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.nursery import Nursling, started


@pytest.mark.parametrize("start", [Nursling, started])
def test_it_has_its_own_arguments_folder_and_end(start: type[Nursling], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"b": 1}')
    process = start("json.tool", "--compact", "a.json", cwd=tmp_path)
    assert process.stdout.read() == '{"b":1}\n'
    assert process.stderr.read() == ""
    assert (process.wait(20), process.poll()) == (0, 0)
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("start", [Nursling, started])
def test_what_is_wrong_is_told_on_stderr_and_by_its_code(start: type[Nursling]) -> None:
    process = start("json.tool", "--nonsense")
    assert "unrecognized arguments: --nonsense" in process.stderr.read()
    assert process.wait(20) == 2
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("start", [Nursling, started])
def test_it_runs_until_a_signal_ends_it(start: type[Nursling]) -> None:
    process = start("http.server", "0")
    assert process.stdout.readline().startswith("Serving HTTP") or sys.flags.unbuffered == 0
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(20) == -9
    process.kill()  # once more: nothing
    process.stdout.close()
    process.stderr.close()
