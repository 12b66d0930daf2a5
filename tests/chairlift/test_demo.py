import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.demo import LETTERS, NUM_SEATS, QUESTIONS

ROOT = Path(__file__).resolve().parents[2]
REAL_MODEL = Path(os.environ.get("CHAIRLIFT_TEST_MODEL", ROOT / "models" / "smollm2"))
ROW = re.compile(r"^step +\d+   ((?:[A-L·] ){3}[A-L·])   ", re.MULTILINE)


def demo(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
    return subprocess.run(
        [sys.executable, "-m", "chairlift", "demo", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"COLUMNS": "200"},
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    """What every demo shows: all answers, the seats, the figures of the three ways to batch."""
    assert done.returncode == 0, done.stderr
    for letter, (question, _) in zip(LETTERS, QUESTIONS, strict=True):
        assert f"\n{letter}  {question}\n" in done.stdout
    rows = ROW.findall(done.stdout)
    assert any(set(row.split()) == set("ABCD") for row in rows)
    seated = [letter for row in rows for letter in row.split() if letter != "·"]
    assert sorted(set(seated)) == list(LETTERS)
    assert sorted(set(seated), key=seated.index) == list(LETTERS)  # admitted first come, first served
    assert all(len(row.split()) == NUM_SEATS for row in rows)
    for batching in ("iteration", "request", "request-padded"):
        assert re.search(rf"^{batching} +\d+\.\d tokens/s .* mean width \d\.\d\d$", done.stdout, re.MULTILINE)


def test_the_demo_answers_draws_the_seats_and_compares(tiny_model_folder: Path) -> None:
    check(demo("--model", str(tiny_model_folder), "--dtype", "float32"))


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.skipif(not REAL_MODEL.exists(), reason="no real model: `chairlift pull smollm2`")
def test_the_real_model_knows_the_capital_of_france() -> None:
    done = demo("--model", str(REAL_MODEL))
    check(done)
    answer = done.stdout.partition("A  What is the capital of France?\n")[2].partition("\n\n")[0]
    assert "Paris" in answer


def test_a_demo_that_cannot_start_fails_with_the_reason() -> None:
    done = demo("--model", "/no/such/model")
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "did not become ready" in done.stdout
