"""What the others are told of a step is the step."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.inputs import build_inputs
from executor.parallel.messages import packed, unpacked
from executor.plan import SamplingParams
from executor.rows import PromptStretch, Row, SampleRow

BLOCK_SIZE = 16
SAMPLE_ROW = SampleRow(SamplingParams(max_tokens=1), 1, ())


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found = []
    for seq_id in range(draw(st.integers(1, 6))):
        first, count = draw(st.integers(0, 50)), draw(st.integers(1, 40))
        blocks = np.array(
            draw(st.permutations(range(8)))[: -(-(first + count) // BLOCK_SIZE)], dtype=np.int32
        )
        stretch = PromptStretch(seq_id, first + 1, list(range(draw(st.integers(1, count)))), 2)
        found.append(
            Row(
                seq_id,
                draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count)),
                first,
                blocks,
                (SAMPLE_ROW,) * draw(st.integers(0, count)),
                scored=draw(st.none() | st.just(stretch)),
            )
        )
    return found


@settings(deadline=None)
@given(rows())
def test_a_step_is_told_whole_but_for_what_only_the_first_rank_asks(step: list[Row]) -> None:
    told = build_inputs(step, BLOCK_SIZE).inputs
    heard = unpacked(packed(told))
    for field in dataclasses.fields(told):
        before, after = getattr(told, field.name), getattr(heard, field.name)
        if field.name == "scored":
            assert [(each.first_index, len(each.stretch.token_ids)) for each in after] == [
                (each.first_index, len(each.stretch.token_ids)) for each in before
            ]
        elif isinstance(before, np.ndarray):
            assert after.dtype == before.dtype
            assert after.flags.writeable
            np.testing.assert_array_equal(after, before)
        else:
            assert after == before
