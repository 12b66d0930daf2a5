"""The steps that a GPU makes before its executor is ready."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor import warm_up
from executor.attention import splits
from executor.attention.reference import ReferenceAttention
from executor.inputs import StepInputs
from tests.executor.late import load_late


def form_of(inputs: StepInputs, num_kv_heads: int) -> str:
    if inputs.max_query_len > 1:
        return "chunk"
    return "split" if splits.num_splits(inputs.num_decodes, num_kv_heads) > 1 else "whole"


@pytest.mark.parametrize(
    ("num_kv_heads", "max_num_seqs", "forms"),
    [
        (8, 256, ["split", "whole", "chunk"]),
        (8, 66, ["split", "whole", "chunk"]),
        (8, 65, ["split", "chunk"]),  # so few rows are always cut
        (600, 4, ["whole", "chunk"]),
    ],
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_every_form_that_a_plan_may_have_is_made_in_the_block_that_belongs_to_nobody(
    num_kv_heads: int, max_num_seqs: int, forms: list[str], block_size: int
) -> None:
    steps = warm_up.steps(
        num_kv_heads=num_kv_heads, max_num_seqs=max_num_seqs, trash_block_id=7, block_size=block_size
    )
    assert [form_of(step, num_kv_heads) for step in steps] == forms
    for step in steps:
        assert (step.block_tables == 7).all()
        assert (step.slot_mapping // block_size == 7).all()
        assert len(step.logits_indices) == 1
        assert len(step.token_ids) == step.query_start_loc[-1] == np.diff(step.query_start_loc).sum()


def test_they_are_made_when_a_model_is_loaded_onto_a_gpu(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = ReferenceAttention.prepare
    made: list[StepInputs] = []

    def prepared(self: ReferenceAttention, inputs: StepInputs, *rest: Any) -> Any:
        made.append(inputs)
        return prepare(self, inputs, *rest)

    monkeypatch.setattr(ReferenceAttention, "prepare", prepared)
    monkeypatch.setattr(splits, "WANTED_PARTS", 8)
    runner = load_late(tiny_folder, monkeypatch)
    num_kv_heads = runner._config.num_kv_heads
    assert [form_of(step, num_kv_heads) for step in made] == ["split", "whole", "chunk"]
    for layer in runner._kv_cache._layers:
        assert not layer.keys[: runner.num_blocks].any()
