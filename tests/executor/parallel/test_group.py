"""A real group of processes: what is exchanged, its bits, and what a failure is to all of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.executor.parallel.group_rank import LENGTHS, WIDTHS

pytestmark = pytest.mark.timeout(300)  # three processes import torch at once


def ranks(size: int, folder: Path) -> list[Any]:
    """What each rank printed."""
    command = [sys.executable, "-m", "tests.executor.parallel.group_rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), f"file://{folder}/meeting"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * size, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]  # log lines come first


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(3, tmp_path_factory.mktemp("group"))


def test_a_sums_bits_do_not_depend_on_its_company(three: list[dict[str, Any]]) -> None:
    assert [seen["same"] for seen in three] == [[True, True]] * 3


def test_every_rank_has_the_sum_and_the_first_one_all_logits(three: list[dict[str, Any]]) -> None:
    assert [seen["sum"] for seen in three] == [[0.0 + 1 + 2]] * 3
    row = [float(rank) for rank, width in enumerate(WIDTHS) for _ in range(width)]
    assert three[0]["gathered"] == [row, row]
    assert three[0]["none"] == [0, sum(WIDTHS)]
    assert [seen["shared"] for seen in three] == [[5, 0]] * 3


def test_ranks_agree_or_all_of_them_refuse(three: list[dict[str, Any]]) -> None:
    sentence = "the ranks of one model must have the same numerics: rank 0 has amx, rank 2 has avx2."
    assert [seen["refusal"] for seen in three] == [sentence] * 3
    assert [seen["least"] for seen in three] == [8] * 3


def test_steps_of_any_size_are_told(three: list[dict[str, Any]]) -> None:
    assert [seen["steps"] for seen in three] == [LENGTHS] * 3


def test_a_failed_step_is_the_end_of_the_group(three: list[dict[str, Any]]) -> None:
    first, *others = (seen["failures"] for seen in three)
    assert "a step failed (ValueError: a device's word)" in first[0]
    assert first == [first[0]] * 2, "no step is tried after it"
    assert [len(failures) for failures in others] == [1, 1]
