import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import service_process, tiny_model


def failed_start(*flags: str) -> tuple[int, str]:
    """Exit code and the last line on stderr of an executor that cannot start."""
    ended = subprocess.run(
        [sys.executable, "-m", "executor", *flags], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "x"], "--listen is missing"),
        (["--listen", "127.0.0.1:0"], "--model is missing"),
        (
            ["--model", "x", "--listen", "127.0.0.1:0", "--max-num-seqs", "0"],
            "--max-num-seqs is 0: it must be at least 1",
        ),
        (
            ["--model", "x", "--listen", "127.0.0.1:0", "--max-num-batched-tokens", "0"],
            "--max-num-batched-tokens is 0: it must be at least 1",
        ),
        (["--model", "x", "--listen", "127.0.0.1:0", "--window", "3"], "--window is 3: it must be at most 2"),
        (["--model", "x", "--listen", "127.0.0.1:0", "--dtype", "float16"], "--dtype is float16"),
    ],
)
def test_b38_a_setting_that_cannot_be_is_one_sentence_naming_flag_value_and_limit(
    flags: list[str], sentence: str
) -> None:
    code, line = failed_start(*flags)
    assert code == 2
    assert line.startswith("chairlift executor: ")
    assert sentence in line


def test_a_wrong_model_folder_is_one_sentence_and_exit_code_two(tmp_path: Path) -> None:
    code, line = failed_start("--model", str(tmp_path / "nowhere"), "--listen", f"unix:{tmp_path}/e.sock")
    assert code == 2
    assert f"model path {tmp_path}/nowhere does not exist" in line


def test_it_serves_a_model_and_ends_with_zero_when_terminated(tmp_path: Path) -> None:
    flags = ["--model", str(tiny_model.build(tmp_path / "tiny")), "--listen", f"unix:{tmp_path}/e.sock"]
    flags += ["--dtype", "float32", "--num-blocks", "64", "--num-threads", "1", "--log-format", "json"]
    with service_process.running("executor", *flags) as executor:
        executor.terminate()
        assert executor.wait() == 0
    assert '"event": "warmed_up"' in executor.stderr
