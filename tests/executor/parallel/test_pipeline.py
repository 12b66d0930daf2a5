"""Ranks whose steps are launched ahead: the tokens of one rank, and captured steps that exchange."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import selection
from executor.attention.flash3 import Flash3Attention
from executor.constraints import Regex
from executor.late_work import LateEpochWork
from executor.runner import ModelRunner
from executor.staging import NUM_SLOTS
from executor.work import EpochWork
from tests.executor.parallel.threads import ThreadRanks, on_each_rank
from tests.rig import fake_flash, tiny_model
from tests.rig.fake_device import FakeDevice
from tests.rig.planning_ahead import run, table, tokens_of

torch.set_num_threads(1)

SEQUENCES: list[tuple[dict[str, Any], list[int], int]] = [
    ({"max_tokens": 9, "temperature": 0.0}, list(b"the first one"), 0),
    ({"max_tokens": 9, "temperature": 1.0, "seed": 5, "top_p": 0.9}, list(b"drawn"), 0),
    ({"max_tokens": 9, "temperature": 1.0, "seed": 6, "frequency_penalty": 1.0}, list(b"penalized"), 1),
    ({"max_tokens": 6, "temperature": 1.0, "seed": 7, "constraint": Regex("[a-c]{1,4}")}, list(b"x"), 2),
    ({"max_tokens": 4, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, list(b"told"), 3),
    ({"max_tokens": 9, "temperature": 0.0, "stop_token_ids": frozenset(range(0, 272, 5))}, list(b"ends"), 4),
]
"""Options, prompt, and the step at which each comes."""
BUDGET, CANCELLED = 8, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks can share, and four with a key-value head each."""
    path = tmp_path_factory.mktemp("model")
    return tiny_model.build(path, num_heads=8, num_kv_heads=4, hidden_size=128, vocab_size=275)


@pytest.fixture(autouse=True)
def flash3(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so that nobody's rounding turns a choice."""
    monkeypatch.setattr(fake_flash, "HALF", (torch.float32,))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash.flash_attn_interface())
    monkeypatch.setattr(Flash3Attention, "refusal", classmethod(lambda cls, spec: None))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Those that were made, one for each rank."""
    made: list[FakeDevice] = []

    def accelerator_of(_: torch.device) -> FakeDevice:
        made.append(FakeDevice())
        return made[-1]

    monkeypatch.setattr(selection, "accelerator_of", accelerator_of)
    return made


def loaded(folder: Path, ranks: ThreadRanks | None = None, **options: Any) -> ModelRunner:
    wanted = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 4, "attention": "flash3"} | options
    return ModelRunner.load(folder, dtype="float32", device="cpu", ranks=ranks, **wanted)


def outputs(runner: ModelRunner) -> dict[int, list[int]]:
    work: LateEpochWork | EpochWork
    if runner.pipeline is None:
        work = EpochWork(runner, table(runner))
    else:
        work = LateEpochWork(runner, runner.pipeline, table(runner))
    return tokens_of(run(work, SEQUENCES, 2, BUDGET, CANCELLED))


def led(
    folder: Path, size: int, lead: Callable[[ModelRunner], Any] = outputs, **options: Any
) -> Iterator[Any]:
    """What `lead` returns on the first rank, and what the others followed: None, if they did to the end."""

    def work(ranks: ThreadRanks) -> Any:
        runner = loaded(folder, ranks, **options)
        found = lead(runner) if ranks.rank == 0 else runner.follow()
        runner.close()
        ranks.end()
        return found

    return iter(on_each_rank(size, work))


@pytest.mark.parametrize("size", [2, 4])
def test_launched_ahead_ranks_choose_what_one_rank_does(
    size: int, folder: Path, devices: list[FakeDevice]
) -> None:
    alone = outputs(loaded(folder))
    assert sorted(alone) == [1, 2, 3, 4, 5, 6]
    chosen, *others = led(folder, size)
    assert chosen == alone
    assert others == [None] * (size - 1)
    replays = [sum(graph.num_replays for graph in device.graphs) for device in devices[1:]]
    assert replays[0] > 5
    assert replays == replays[:1] * size


def test_no_rank_waits_for_the_step_before(folder: Path, devices: list[FakeDevice]) -> None:
    """An id that the first rank has sampled reaches the others on the device alone."""

    def lead(runner: ModelRunner) -> None:
        assert runner.pipeline is not None
        work = LateEpochWork(runner, runner.pipeline, table(runner))
        run(work, SEQUENCES[:2], 2, 64, 0)

    for _ in led(folder, 2, lead):
        pass
    (follower,) = (device for device in devices if "bring" not in device.log)
    recorded: list[str] = []
    num_waits = 0
    for line in follower.log:
        what, _, event = line.partition(" ")
        if what == "record":
            recorded.append(event)
            continue
        # A pinned buffer is filled anew when its copy of three steps ago is done; there is no other wait.
        assert recorded[-NUM_SLOTS] == event
        num_waits += 1
    assert num_waits > 0


def test_ranks_find_together_how_many_blocks_fit(folder: Path, devices: list[FakeDevice]) -> None:
    def count(runner: ModelRunner) -> int:
        return runner.num_blocks

    alone = loaded(folder, num_blocks=None, token_budget=lambda _: 64).num_blocks
    for size in (2, 4):
        number, *_ = led(folder, size, count, num_blocks=None, token_budget=lambda _: 64)
        assert number >= alone  # each rank has fewer heads to keep


def test_captured_work_is_let_go_before_the_ranks_part(folder: Path, devices: list[FakeDevice]) -> None:
    runner = loaded(folder)
    graphs = [weakref.ref(graph) for graph in devices[0].graphs]
    assert graphs
    devices[0].graphs.clear()
    runner.close()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * len(graphs)
