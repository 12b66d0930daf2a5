import pytest

from executor import wire
from executor.device import StepTimings
from executor.plan import (
    FinishedSequence,
    NewSequence,
    SamplingParams,
    SequenceError,
    StepResult,
    TokenLogprobs,
)
from executor.stopping import FinishReason
from protos.v1 import common_pb2, executor_pb2


def test_a_plan_comes_over_whole() -> None:
    message = executor_pb2.BatchPlan(
        epoch=2**63 + 5,
        step_id=7,
        acked_step_id=5,
        released_seq_ids=[3],
        admitted=[
            executor_pb2.NewSequence(
                seq_id=4,
                token_ids=[1, 2, 3],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=[9],
                sampling=common_pb2.SamplingParams(max_tokens=8, seed=-1, stop_token_ids=[5, 6], logprobs=0),
            )
        ],
        seq_ids=[4],
        num_tokens=[2],
        grown_seq_ids=[4],
        num_new_blocks=[1],
        new_block_ids=[10],
        positions_sum=1,
        draft_tokens=[executor_pb2.DraftTokens(seq_id=4, token_ids=[8, 9]), executor_pb2.DraftTokens()],
    )
    plan = wire.plan_from_proto(message)
    assert (plan.epoch, plan.step_id, plan.acked_step_id, plan.positions_sum) == (2**63 + 5, 7, 5, 1)
    assert (plan.released_seq_ids, plan.seq_ids, plan.num_tokens) == ((3,), (4,), (2,))
    assert (plan.grown_seq_ids, plan.num_new_blocks, plan.new_block_ids) == ((4,), (1,), (10,))
    params = SamplingParams(max_tokens=8, seed=-1, stop_token_ids=frozenset({5, 6}), logprobs=0)
    assert plan.admitted == (NewSequence(4, (1, 2, 3), 2, 1, (9,), params),)
    assert plan.draft_tokens == ((4, (8, 9)), (0, ()))
    assert plan.reserved == ()


def test_the_same_message_twice_is_the_same_plan() -> None:
    raw = executor_pb2.BatchPlan(
        epoch=1, step_id=1, admitted=[executor_pb2.NewSequence(seq_id=1, token_ids=[1])]
    ).SerializeToString()
    first, second = (wire.plan_from_proto(executor_pb2.BatchPlan.FromString(raw)) for _ in range(2))
    assert first == second


def test_reserved_fields_of_a_plan_are_named() -> None:
    message = executor_pb2.BatchPlan(zero_block_ids=[1], block_copies=[executor_pb2.BlockCopy()])
    assert wire.plan_from_proto(message).reserved == ("block_copies", "zero_block_ids")


def test_b54_absent_sampling_is_off_and_minus_one_is_off_for_top_k() -> None:
    assert wire.sampling_from_proto(common_pb2.SamplingParams(max_tokens=3)) == SamplingParams(max_tokens=3)
    assert wire.sampling_from_proto(common_pb2.SamplingParams(max_tokens=3, top_k=-1)).top_k == 0


def test_zero_is_not_absent() -> None:
    params = wire.sampling_from_proto(common_pb2.SamplingParams(max_tokens=3, temperature=0, top_p=0))
    assert (params.temperature, params.top_p) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"adapter": "x"}, "adapter"),
    ],
)
def test_options_that_are_not_served_are_named(new: dict[str, object], named: str) -> None:
    message = executor_pb2.NewSequence(seq_id=1, **new)  # type: ignore[arg-type]
    assert wire.new_sequence_from_proto(message).unsupported == (named,)


def test_a_result_goes_out_whole() -> None:
    result = StepResult(
        epoch=3,
        step_id=4,
        seq_ids=(1, 2),
        num_sampled=(1, 0),
        token_ids=(50,),
        logprobs=((1, TokenLogprobs(50, -0.5, 1, (50, 51), (-0.5, -1.5))),),
        finished=(FinishedSequence(1, FinishReason.STOP, 50), FinishedSequence(5, FinishReason.LENGTH)),
        errors=(SequenceError(9, "not numbers", 13),),
    )
    message = wire.result_to_proto(result, StepTimings(1, 2, 3, 4, 10), draining=True)
    assert (message.epoch, message.step_id, message.draining) == (3, 4, True)
    assert (list(message.seq_ids), list(message.num_sampled), list(message.token_ids)) == (
        [1, 2],
        [1, 0],
        [50],
    )
    (row,) = message.logprobs
    assert (row.seq_id, list(row.tokens[0].top_token_ids), row.tokens[0].rank) == (1, [50, 51], 1)
    stop, length = message.finished
    assert (stop.reason, stop.matched_token_id) == (common_pb2.FINISH_REASON_STOP, 50)
    assert (length.reason, length.HasField("matched_token_id")) == (common_pb2.FINISH_REASON_LENGTH, False)
    assert [(e.seq_id, e.message, e.status_code) for e in message.errors] == [(9, "not numbers", 13)]
    timings = message.timings
    assert [timings.idle_us, timings.inputs_us, timings.forward_us, timings.sample_us, timings.total_us] == [
        1,
        2,
        3,
        4,
        10,
    ]


def test_a_row_has_one_entry_of_log_probabilities_for_all_its_tokens() -> None:
    chances = [TokenLogprobs(token_id, -0.5, 1, (), ()) for token_id in (50, 51, 60, 52)]
    result = StepResult(
        epoch=1,
        step_id=1,
        seq_ids=(1, 2, 3),
        num_sampled=(2, 1, 1),
        token_ids=(50, 51, 60, 52),
        logprobs=tuple(zip((1, 1, 2, 3), chances, strict=True)),
    )
    message = wire.result_to_proto(result, StepTimings())
    told = [(row.seq_id, [each.token_id for each in row.tokens]) for row in message.logprobs]
    assert told == [(1, [50, 51]), (2, [60]), (3, [52])]
