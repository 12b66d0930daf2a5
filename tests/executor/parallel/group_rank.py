"""`python -m tests.executor.parallel.group_rank RANK SIZE MEETING`: one rank of a group, and what it saw.

Prints a JSON object. All ranks run the same lines.
"""

import json
import sys

import numpy as np
import torch

from executor.inputs import StepInputs, build_inputs
from executor.model import ModelError
from executor.parallel.errors import RankLostError
from executor.parallel.group import FRAME_BYTES, Group
from executor.parallel.place import Place
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow

WIDTH = 48
PLACES = (0, 5, 63)
WIDTHS = (3, 4, 3)


def say(seen: object) -> None:
    sys.stdout.write(f"{json.dumps(seen)}\n")


def inputs_of(num_tokens: int) -> StepInputs:
    """A step of one sequence."""
    blocks = np.arange(-(-num_tokens // 16), dtype=np.int32)
    return build_inputs(
        [Row(0, list(range(num_tokens)), 0, blocks, (SampleRow(SamplingParams(max_tokens=1), 0, ()),))], 16
    ).inputs


def sums_are_the_same_in_every_company(group: Group, dtype: torch.dtype) -> bool:
    """Whether the sum of a row has the same bits alone and at any place among 63 others."""
    generator = torch.Generator().manual_seed(group.rank)
    row = torch.randn(WIDTH, generator=generator).to(dtype)
    alone = row.clone()[None]
    group.add(alone)
    same = True
    for place in PLACES:
        company = torch.randn(64, WIDTH, generator=generator).to(dtype)
        company[place] = row
        group.add(company)
        same &= torch.equal(company[place], alone[0])
    return same


def refusal_of_what_differs(group: Group) -> str:
    try:
        group.agree("numerics", "amx" if group.rank < 2 else "avx2")
    except ModelError as error:
        return str(error)
    return ""


def main(rank: int, size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    group = Group(Place(rank, size, rank, size, meeting), "cpu")
    group.meet()
    group.agree("weights", "the same")
    seen: dict[str, object] = {"refusal": refusal_of_what_differs(group), "least": group.least(10 - rank)}
    seen["same"] = [
        sums_are_the_same_in_every_company(group, dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    strided = torch.full((2, 64), float(rank))[:, :WIDTH]
    group.add(strided)
    seen["sum"] = strided.unique().tolist()
    part = torch.full((2, WIDTHS[rank]), float(rank))
    seen["gathered"] = group.gather(part, WIDTHS).tolist()
    seen["shared"] = group.share(torch.tensor([5, rank])).tolist()
    seen["none"] = list(group.gather(part[:0], WIDTHS).shape)

    seen |= lead(group) if rank == 0 else follow(group)
    group.end()
    say(seen)


LENGTHS = [1, FRAME_BYTES, 5]  # the second one needs a second message


def lead(group: Group) -> dict[str, object]:
    """Steps that end well, and one that does not."""
    for length in LENGTHS:
        with group.leading(inputs_of(length)):
            group.add(torch.ones(1))
    failures = []
    for _ in range(2):
        try:
            with group.leading(inputs_of(1)):
                raise ValueError("a device's word")
        except RankLostError as lost:
            failures.append(str(lost))
    return {"steps": LENGTHS, "failures": failures}


def follow(group: Group) -> dict[str, object]:
    lengths = []
    try:
        for inputs in group.steps():
            np.testing.assert_array_equal(inputs.token_ids, inputs_of(len(inputs.token_ids)).token_ids)
            group.add(torch.ones(1))
            lengths.append(len(inputs.token_ids))
    except (RuntimeError, RankLostError) as error:
        return {"steps": lengths, "failures": [str(error)]}
    return {"steps": lengths, "failures": []}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
