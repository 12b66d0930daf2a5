import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor.inputs import build_inputs
from executor.plan import SamplingParams
from executor.rows import Row, SampleRow

PARAMS = SamplingParams(max_tokens=8)


def row(
    seq_id: int,
    token_ids: list[int],
    first_position: int,
    block_ids: list[int],
    output_index: int | None = None,
    masked_ids: tuple[int, ...] = (),
    after_drafts: tuple[SampleRow, ...] = (),
) -> Row:
    blocks = np.array(block_ids, dtype=np.int32)
    first = () if output_index is None else (SampleRow(PARAMS, output_index, masked_ids),)
    return Row(seq_id, token_ids, first_position, blocks, (*first, *after_drafts))


def test_a_mixed_step_is_laid_out_without_padding_decodes_first() -> None:
    batch = build_inputs(
        [
            row(1, [10, 11, 12], 2, [5, 9]),  # a chunk across a block border
            row(2, [20], 4, [7, 3], output_index=1, masked_ids=(0,)),  # a decode in its second block
            row(3, [30, 31], 0, [2], output_index=0),  # a whole prompt
        ],
        block_size=4,
    )
    inputs = batch.inputs
    assert inputs.token_ids.tolist() == [20, 10, 11, 12, 30, 31]
    assert inputs.positions.tolist() == [4, 2, 3, 4, 0, 1]
    assert inputs.slot_mapping.tolist() == [12, 22, 23, 36, 8, 9]
    assert inputs.query_start_loc.tolist() == [0, 1, 4, 6]
    assert inputs.seq_lens.tolist() == [5, 5, 2]
    assert inputs.block_tables.tolist() == [[7, 3], [5, 9], [2, 0]]
    assert inputs.logits_indices.tolist() == [0, 5]
    assert (inputs.num_decodes, inputs.max_query_len, inputs.max_seq_len) == (1, 3, 5)
    assert batch.sampled_seq_ids == [2, 3]
    assert [(r.output_index, r.masked_ids) for r in batch.sample_rows] == [(1, (0,)), (0, ())]


def test_a_row_with_draft_tokens_is_sampled_at_its_last_tokens_in_order() -> None:
    after = tuple(SampleRow(PARAMS, output_index, (output_index,)) for output_index in (3, 4))
    guessing = row(1, [10, 11, 12, 13], 2, [5, 9], output_index=2, masked_ids=(2,), after_drafts=after)
    single = row(3, [30, 31], 5, [1, 2], output_index=2, after_drafts=after[:1])
    batch = build_inputs([guessing, row(2, [20], 4, [7, 3], output_index=1), single], block_size=4)
    inputs = batch.inputs
    assert inputs.token_ids.tolist() == [20, 10, 11, 12, 13, 30, 31]
    assert inputs.logits_indices.tolist() == [0, 2, 3, 4, 5, 6]
    assert batch.sampled_seq_ids == [2, 1, 1, 1, 3, 3]
    assert [each.output_index for each in batch.sample_rows] == [1, 2, 3, 4, 2, 3]
    assert [each.masked_ids for each in batch.sample_rows] == [(), (2,), (3,), (4,), (), (3,)]
    assert inputs.num_decodes == 1


def test_blocks_past_the_context_do_not_widen_the_tables() -> None:
    inputs = build_inputs([row(1, [10], 0, [4, 5, 6, 7], output_index=0)], block_size=4).inputs
    assert inputs.block_tables.tolist() == [[4]]


def test_a_step_of_chunks_alone_samples_nothing() -> None:
    batch = build_inputs([row(1, [1, 2], 0, [0])], block_size=4)
    assert batch.inputs.logits_indices.tolist() == []
    assert batch.sample_rows == []
    assert batch.sampled_seq_ids == []


def test_types_are_those_that_kernels_read() -> None:
    inputs = build_inputs([row(1, [1], 0, [0], output_index=0)], block_size=4).inputs
    for name in ("token_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(inputs, name).dtype == np.int64
    for name in ("query_start_loc", "seq_lens", "block_tables"):
        assert getattr(inputs, name).dtype == np.int32


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_every_token_has_the_slot_of_its_position(
    shapes: list[tuple[int, int, bool]], block_size: int
) -> None:
    rows, next_block = [], 0
    for seq_id, (first, count, samples) in enumerate(shapes, start=1):
        num_blocks = -(-(first + count) // block_size)
        block_ids = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        token_ids = [seq_id * 100 + i for i in range(count)]
        rows.append(row(seq_id, token_ids, first, block_ids, output_index=0 if samples else None))
    batch = build_inputs(rows, block_size)
    inputs = batch.inputs
    expected = {}
    for r in rows:
        for i, token_id in enumerate(r.token_ids):
            position = r.first_position + i
            block = int(r.block_ids[position // block_size])
            expected[token_id] = (position, block * block_size + position % block_size)
    found = zip(inputs.positions.tolist(), inputs.slot_mapping.tolist(), strict=True)
    assert dict(zip(inputs.token_ids.tolist(), found, strict=True)) == expected
    lengths = np.diff(inputs.query_start_loc)
    assert (lengths[: inputs.num_decodes] == 1).all()
    assert (lengths[inputs.num_decodes :] > 1).all()
    last_tokens = [r.token_ids[-1] for r in rows if r.sample_rows]
    assert sorted(inputs.token_ids[inputs.logits_indices].tolist()) == sorted(last_tokens)
