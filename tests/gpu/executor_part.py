"""The part of the GPU check that loads a model as an executor does, and has it serve plans that come ahead.

A model in float32 answers as it does on the CPU. In bfloat16, over a cache of as many blocks as the executor
finds to fit, it answers from the last blocks as from the first ones: most of them lie behind what 32 bits
can count.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch

from executor import selection
from executor.accelerator import DeviceMemory
from executor.late_work import LateEpochWork
from executor.runner import ModelRunner
from executor.work import EpochWork
from tests.gpu.machine import Machine, Report, WrongError
from tests.rig import tiny_model
from tests.rig.planning_ahead import BLOCK_SIZE, run, table, tokens_of

LARGE: Final = {
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 8,
    "num_layers": 4,
    "max_seq_len": 131_072,
}
SMALL: Final = {"max_seq_len": 512}
"""Shapes: the large one's cache takes what there is, for a few sequences of the greatest length fill it."""
BUDGET: Final = 40
"""Most tokens of a sequence in a step."""
UTILIZATION: Final = 0.9
SLACK: Final = 0.01
"""Of the memory: what is taken beyond what was allowed."""
SEQUENCES: Final = (
    ({"max_tokens": 9}, list(range(3, 250)), 0),
    ({"max_tokens": 8, "logprobs": 2, "prompt_logprobs": 1}, list(range(100, 160)), 1),
    ({"max_tokens": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.4}, [7, 7, 9], 2),
    ({"max_tokens": 6, "min_tokens": 2}, [200], 4),
    ({"max_tokens": 9, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5}, list(range(40)), 3),
)
"""What is asked, the prompt, and the step before it comes. The last one draws."""

Tokens = dict[int, list[int]]


def loaded(machine: Machine, folder: Path, dtype: str, num_blocks: int | None) -> ModelRunner:
    """A model on the device, or on the CPU as if it were one."""
    options: dict[str, Any] = {"dtype": dtype, "num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    if machine.is_gpu:
        return ModelRunner.load(
            folder, device="cuda", max_num_seqs=256, memory_utilization=UTILIZATION, **options
        )
    with mock.patch.object(selection, "accelerator_of", return_value=machine.accelerator):
        return ModelRunner.load(folder, device="cpu", attention="reference", max_num_seqs=8, **options)


def tokens(runner: ModelRunner, sequences: Sequence[Any], first_block: int = 0) -> Tokens:
    """What it answers from the blocks from `first_block` on."""
    known = table(runner, max_num_batched_tokens=len(sequences) * BUDGET)
    ahead = runner.pipeline
    work = EpochWork(runner, known) if ahead is None else LateEpochWork(runner, ahead, known)
    return tokens_of(run(work, sequences, 2, BUDGET, first_block=first_block))


def on_the_cpu(folder: Path, sequences: Sequence[Any]) -> Tokens:
    runner = ModelRunner.load(
        folder, dtype="float32", device="cpu", num_blocks=100, block_size=BLOCK_SIZE, max_num_seqs=8,
        attention="reference",
    )  # fmt: skip
    return tokens(runner, sequences)


def difference(ours: Tokens, expected: Tokens) -> str | None:
    """Which sequences have got other tokens, for people; None when none has."""
    different = [each for each in sorted(expected) if ours.get(each) != expected[each]]
    if not different:
        return None
    first = different[0]
    return f"sequences {different} got other tokens, the first {ours.get(first)} and not {expected[first]}"


def executor(machine: Machine, report: Report) -> dict[str, Any]:
    """Two models loaded, measured and asked."""
    found: dict[str, Any] = {"wrong": [], "not_run": []}
    greedy = SEQUENCES[:-1]

    def compare(what: str, ours: Tokens, expected: Tokens) -> None:
        said = difference(ours, expected)
        found[what] = "the same tokens" if said is None else "other tokens"
        found["wrong"] += [] if said is None else [f"{what}: {said}"]
        report(found)

    with TemporaryDirectory() as name:
        folder = tiny_model.build(Path(name), **(LARGE if machine.is_gpu else SMALL))  # type: ignore[arg-type]
        expected = on_the_cpu(folder, greedy)
        ours = loaded(machine, folder, "float32", 100)
        ours.warm_up()
        found["numerics"] = ours.fingerprints.numerics
        compare("float32, beside the CPU", tokens(ours, greedy), expected)
        ours.close()
        del ours
        gc.collect()
        if machine.is_late:
            found["not_run"].append("a cache of all memory")
        else:
            whole = loaded(machine, folder, "bfloat16", None)
            whole.warm_up()
            found["num_blocks"] = whole.num_blocks
            first = tokens(whole, SEQUENCES)
            # None but the last blocks: all sequences together need far less than a hundred.
            last = tokens(whole, SEQUENCES, first_block=whole.num_blocks - 100)
            compare("bfloat16, last blocks beside first", last, first)
            # What torch keeps for later steps is taken, too.
            memory = (
                DeviceMemory(*torch.cuda.mem_get_info()) if machine.is_gpu else machine.accelerator.memory()
            )
            taken = found["taken_of_memory"] = round(1.0 - memory.free / memory.total, 4)
            if taken > UTILIZATION + SLACK:
                found["wrong"].append(f"{taken} of the memory are taken, and {UTILIZATION} were allowed")
    if found["wrong"]:
        raise WrongError(f"{len(found['wrong'])} things, the first: {found['wrong'][0]}", found)
    return found
