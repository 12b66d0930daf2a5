"""Alternatives without a sort of the vocabulary, beside one."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from executor import late_logprobs, logprobs

torch.set_num_threads(1)


class Sorts(TorchDispatchMode):
    """The widths of what is sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sort:
            self.widths.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


@settings(max_examples=100)
@given(
    num_rows=st.integers(1, 4),
    size=st.sampled_from([1, 2, 7, 300]),
    most=st.integers(0, 20),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    impossible=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**32 - 1),
)
def test_alternatives_and_ranks_are_those_of_a_stable_sort(
    num_rows: int, size: int, most: int, levels: int, impossible: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (num_rows, size)) / levels * 9
    logits[rng.random(logits.shape) < impossible] = -np.inf
    logits[:, rng.integers(size)] = 1.0
    table = logprobs.table_of(torch.from_numpy(logits).float())
    token_ids = torch.from_numpy(rng.integers(0, size, num_rows))
    with Sorts() as sorts:
        parts = late_logprobs.report_parts(table, token_ids, most)
    values, order = table.sort(dim=-1, descending=True, stable=True)
    assert parts["ranks"].tolist() == (1 + (order == token_ids[:, None]).int().argmax(dim=-1)).tolist()
    if most:
        assert parts["top_ids"].tolist() == order[:, :most].tolist()
        assert parts["top_logprobs"].equal(values[:, :most])
    assert all(width <= 2 * most for width in sorts.widths)


def test_a_row_of_no_numbers_has_no_alternatives_and_leaves_the_others_theirs() -> None:
    logits = torch.tensor([[3.0, torch.nan, 1.0], [3.0, 1.0, 3.0]])
    parts = late_logprobs.report_parts(logprobs.table_of(logits), torch.tensor([0, 2]), 2)
    reports = late_logprobs.reports({name: each.numpy() for name, each in parts.items()}, [0, 2], [2, 2])
    assert [report.top_token_ids for report in reports] == [(), (0, 2)]
    assert reports[1].rank == 2
