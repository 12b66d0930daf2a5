from pathlib import Path

import pytest

from bench import peers
from bench.machine_limit import Machine, Model, seconds_at_least
from bench.workloads import WORKLOADS, workload

MACHINE = Machine(operations_per_second=1000.0, bytes_per_second=100.0)
MODEL = Model(num_weights=10, num_output=4)


def test_a_workload_is_the_same_each_time_and_of_the_lengths_it_says() -> None:
    assert workload("64-8") == workload("64-8") != workload("64-8", seed=1)
    for name in WORKLOADS:
        assert all(request["max_tokens"] >= 1 for request in workload(name)["requests"])
    shared = [request["prompt"] for request in workload("shared-prefix")["requests"]]
    assert len({tuple(prompt[:512]) for prompt in shared}) == 1
    assert len({tuple(prompt) for prompt in shared}) == 32


def test_the_limit_of_one_request_is_its_prompt_and_then_reading_the_weights() -> None:
    prefill = (3 * (20 - 8) + 8) / 1000
    assert seconds_at_least([(3, 5)], MACHINE, MODEL) == pytest.approx(prefill + 4 * 20 / 100)


def test_in_a_wide_batch_the_limit_is_arithmetic_and_who_has_ended_costs_nothing() -> None:
    lengths = [(1, 3)] * 50 + [(1, 2)] * 50
    prefill = 100 * (12 + 8) / 1000
    assert seconds_at_least(lengths, MACHINE, MODEL) == pytest.approx(
        prefill + 100 * 20 / 1000 + 50 * 20 / 1000
    )


def test_a_shared_beginning_is_computed_once() -> None:
    alone = seconds_at_least([(10, 1)] * 4, MACHINE, MODEL)
    shared = seconds_at_least([(10, 1)] * 4, MACHINE, MODEL, shared_tokens=6)
    assert alone - shared == pytest.approx(18 * 12 / 1000)


def test_the_table_has_medians_and_says_who_is_absent(tmp_path: Path) -> None:
    def cell(speed: float) -> dict[str, float]:
        return {"seconds": 1.0, "tokens_per_second": speed}

    results = {
        "machine": {"processor": "X", "cores": 2},
        "limits": {"64-8": [{"tokens_per_second": 400.0}]},
        "cells": {
            "64-8": {
                "chairlift": [cell(200), cell(300), cell(250)],
                "vllm": [cell(100), cell(120), cell(125)],
                "llama.cpp": [{"absent": "not installed"}],
            }
        },
    }
    docs = tmp_path / "results.md"
    docs.write_text("# Results\n\nWhat.\n\n## Peers (`python -m bench.peers`)\n\nold\n\n## Tests\n\nMany.\n")
    for _ in range(2):  # once more changes nothing
        peers.write_table(results, docs)
    text = docs.read_text()
    assert "| 64-8 (3) | 250 | - | 120 | - | 2.08 | 400 | 62% |" in text
    assert "llama.cpp on 64-8: no figure, not installed." in text
    assert "old" not in text
    assert text.count("## Peers") == 1
    assert text.index("## Peers") < text.index("## Tests")
