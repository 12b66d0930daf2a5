"""The scheduler's values and their messages: what goes in comes out, and what makes no sense is told."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.v1 import common_pb2, executor_pb2, scheduler_pb2
from scheduler import wire
from scheduler.plan import BatchPlan, NewSequence
from scheduler.router_session import FinishedOutput, StepOutput
from scheduler.sequence import Finish, FinishReason, StatusCode
from tests.scheduler.sequences import running

U32 = st.integers(0, 2**32 - 1)


def open_response(**changes: int) -> executor_pb2.OpenResponse:
    message = executor_pb2.OpenResponse(
        epoch=1, num_blocks=10, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_seq_len=100,
        max_window=2, vocab_size=50, eos_token_ids=[2, 3], row_invariant=True, dtype="float32",
        fingerprints=common_pb2.Fingerprints(model="m", tokenizer="t", numerics="n"),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def submit(**changes: object) -> scheduler_pb2.Submit:
    fields = {
        "key": bytes(16),
        "handle": 1,
        "request_id": "r",
        "sampling": common_pb2.SamplingParams(max_tokens=5),
    }
    return scheduler_pb2.Submit(**(fields | changes))  # type: ignore[arg-type]


# --- Open -----------------------------------------------------------------------------------------------


def test_a_capacity_is_what_the_executor_says() -> None:
    capacity = wire.capacity_of(open_response())
    assert (capacity.num_blocks, capacity.block_size, capacity.max_window) == (10, 16, 2)
    assert (capacity.max_num_seqs, capacity.max_num_batched_tokens, capacity.max_seq_len) == (4, 64, 100)
    assert (capacity.vocab_size, capacity.eos_token_ids) == (50, frozenset({2, 3}))
    assert (capacity.model_fingerprint, capacity.tokenizer_fingerprint, capacity.dtype) == (
        "m",
        "t",
        "float32",
    )


@pytest.mark.parametrize(
    "name", ["epoch", "num_blocks", "block_size", "max_num_seqs", "max_window", "vocab_size"]
)
def test_a_capacity_of_nothing_is_no_capacity(name: str) -> None:
    with pytest.raises(wire.CapacityError, match=f"its {name} is 0, it must be at least 1"):
        wire.capacity_of(open_response(**{name: 0}))


# --- Submit ---------------------------------------------------------------------------------------------


def test_times_are_put_on_the_schedulers_clock() -> None:
    request = wire.request_of(submit(remaining_ms=2500, waited_ms=500), array("I", [1]), now=100.0)
    assert (request.deadline, request.arrival) == (102.5, 99.5)
    assert wire.request_of(submit(), array("I", [1]), now=100.0).deadline is None
    assert wire.request_of(submit(remaining_ms=0), array("I", [1]), now=100.0).deadline == 100.0


def test_sampling_travels_on_as_it_came_unknown_fields_included() -> None:
    sampling = common_pb2.SamplingParams(
        max_tokens=5, min_tokens=2, ignore_eos=True, stop_token_ids=[7], logprobs=0
    )
    raw = sampling.SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, of a later revision
    request = wire.request_of(
        submit(sampling=common_pb2.SamplingParams.FromString(raw)), array("I", [1]), now=0.0
    )
    assert (request.max_tokens, request.ignore_eos) == (5, True)
    assert request.stop_token_ids == frozenset({7})
    assert request.want_logprobs  # 0 alternatives are log-probabilities all the same
    new = NewSequence(1, array("I", [1]), 1, 0, [0], request.sampling)
    (sent,) = wire.plan_message(_plan(admitted=[new])).admitted
    assert sent.sampling.SerializeToString() == request.sampling
    assert b"new" in request.sampling


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key": b""}, "key has 0 bytes, it must have 16"),
        ({"key": bytes(17)}, "key has 17 bytes"),
        ({"sampling": common_pb2.SamplingParams()}, "max_tokens is 0"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=-1)}, "max_tokens is -1"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=2**31)}, f"from 1 to {2**31 - 1}"),
    ],
)
def test_a_submit_that_makes_no_sense_is_told_in_a_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(wire.SubmitError, match=sentence):
        wire.request_of(submit(**changes), array("I", [1]), now=0.0)


# --- plans and results ----------------------------------------------------------------------------------


def _plan(**changes: object) -> BatchPlan:
    columns = "released_seq_ids admitted seq_ids num_tokens grown_seq_ids num_new_blocks new_block_ids"
    fields: dict[str, object] = {
        name: [] for name in f"{columns} num_samples rows filled outgrown left".split()
    }
    numbers = {"epoch": 2**64 - 1, "step_id": 3, "acked_step_id": 1, "positions_sum": 9}
    return BatchPlan(**(fields | numbers | changes))  # type: ignore[arg-type]


@given(
    columns=st.lists(st.tuples(U32, U32), max_size=5),
    released=st.lists(U32, max_size=3),
    grown=st.lists(st.tuples(U32, U32), max_size=3),
)
def test_a_plan_is_sent_column_by_column_and_the_same_plan_gives_the_same_bytes(
    columns: list[tuple[int, int]], released: list[int], grown: list[tuple[int, int]]
) -> None:
    plan = _plan(
        seq_ids=[seq_id for seq_id, _ in columns],
        num_tokens=[count for _, count in columns],
        released_seq_ids=released,
        grown_seq_ids=[seq_id for seq_id, _ in grown],
        num_new_blocks=[1] * len(grown),
        new_block_ids=[block_id for _, block_id in grown],
        draft_tokens={seq_id: array("I", [seq_id, 7]) for seq_id in released},
    )
    message = wire.plan_message(plan)
    assert [(item.seq_id, list(item.token_ids)) for item in message.draft_tokens] == [
        (seq_id, [seq_id, 7]) for seq_id in dict.fromkeys(released)
    ]
    assert message.SerializeToString() == wire.plan_message(plan).SerializeToString()
    back = executor_pb2.BatchPlan.FromString(message.SerializeToString())
    for name in (
        "seq_ids",
        "num_tokens",
        "released_seq_ids",
        "grown_seq_ids",
        "num_new_blocks",
        "new_block_ids",
    ):
        assert list(getattr(back, name)) == getattr(plan, name)
    assert (back.epoch, back.step_id, back.acked_step_id, back.positions_sum) == (2**64 - 1, 3, 1, 9)


def test_a_result_comes_in_with_its_ends_and_errors() -> None:
    message = executor_pb2.StepResult(
        epoch=5, step_id=6, seq_ids=[1, 2], num_sampled=[1, 0], token_ids=[9], draining=True,
        timings=executor_pb2.StepTimings(total_us=70, idle_us=8),
        logprobs=[executor_pb2.RowLogprobs(seq_id=1, tokens=[common_pb2.TokenLogprobs(token_id=9)])],
        finished=[
            executor_pb2.FinishedSequence(
                seq_id=1, reason=common_pb2.FINISH_REASON_STOP, matched_token_id=0
            ),
            executor_pb2.FinishedSequence(seq_id=2, reason=common_pb2.FINISH_REASON_LENGTH),
        ],
        errors=[
            executor_pb2.SequenceError(seq_id=3, message="NaN", status_code=3),
            executor_pb2.SequenceError(seq_id=4, message="?", status_code=0),
            executor_pb2.SequenceError(seq_id=5, message="?", status_code=99),
        ],
    )  # fmt: skip
    result = wire.result_of(message)
    assert (result.epoch, result.step_id, result.draining) == (5, 6, True)
    assert (result.seq_ids, result.num_sampled, result.token_ids) == ([1, 2], [1, 0], [9])
    assert (result.total_us, result.idle_us) == (70, 8)
    assert [(item.seq_id, item.reason, item.matched_token_id) for item in result.finished] == [
        (1, FinishReason.STOP, 0),
        (2, FinishReason.LENGTH, None),
    ]
    # An error is never OK, whatever number came.
    assert [item.status_code for item in result.errors] == [
        StatusCode.INVALID_ARGUMENT,
        StatusCode.INTERNAL,
        StatusCode.INTERNAL,
    ]
    assert list(result.logprobs) == [1]


# --- to routers -----------------------------------------------------------------------------------------


def test_an_output_carries_tokens_logprobs_starts_and_ends() -> None:
    logprob = common_pb2.TokenLogprobs(token_id=4, logprob=-0.5, rank=1)
    output = StepOutput(
        7,
        handles=[1, 2],
        num_tokens=[1, 2],
        token_ids=array("I", [4, 5, 6]),
        logprobs=[(1, [logprob])],
        started=[(1, 16)],
        finished=[
            FinishedOutput(1, Finish(FinishReason.STOP, matched_token_id=0), 16, 1),
            FinishedOutput(
                3,
                Finish(
                    FinishReason.ERROR,
                    message="full",
                    status_code=StatusCode.RESOURCE_EXHAUSTED,
                    retry_after_seconds=1.5,
                ),
            ),
        ],
    )
    message = wire.output_message(output, step_id=9).step_output
    assert (message.message_id, message.step_id) == (7, 9)
    assert (list(message.handles), list(message.num_tokens)) == ([1, 2], [1, 2])
    assert list(message.token_ids) == [4, 5, 6]
    assert list(message.logprobs[0].tokens) == [logprob]
    assert [(item.handle, item.num_cached_tokens) for item in message.started] == [(1, 16)]
    first, second = message.finished
    assert (first.reason, first.num_cached_tokens, first.num_wasted_tokens) == (1, 16, 1)
    assert first.HasField("matched_token_id")
    assert first.matched_token_id == 0
    assert not second.HasField("matched_token_id")
    assert (second.message, second.status_code, second.retry_after_ms) == ("full", 8, 1500)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_reasons_have_the_contracts_numbers(reason: FinishReason) -> None:
    assert common_pb2.FinishReason.Name(wire.finish_reason(reason)) == f"FINISH_REASON_{reason.name}"
    assert wire.finish_reason(None) == common_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (common_pb2.FINISH_REASON_STOP, FinishReason.STOP),
        (common_pb2.FINISH_REASON_DEADLINE, FinishReason.DEADLINE),
        (common_pb2.FINISH_REASON_ABORT, FinishReason.ABORT),
        (common_pb2.FINISH_REASON_LENGTH, FinishReason.ABORT),
        (common_pb2.FINISH_REASON_UNSPECIFIED, FinishReason.ABORT),
    ],
)
def test_a_router_may_cancel_for_a_stop_string_or_a_deadline_and_all_else_is_abort(
    said: common_pb2.FinishReason.ValueType, meant: FinishReason
) -> None:
    assert wire.cancel_reason(said) is meant


def test_padding_never_ends_by_itself() -> None:
    sampling = common_pb2.SamplingParams.FromString(wire.padding_sampling())
    assert sampling.ignore_eos
    assert sampling.max_tokens == 2**31 - 1
    assert not sampling.stop_token_ids


def test_a_summary_shows_rows_with_their_part_in_the_step() -> None:
    from tests.scheduler.harness import EXECUTOR, Harness

    h = Harness(max_num_batched_tokens=8)
    h.submit("short", [1, 2], 9, ignore_eos=True)
    h.submit("long", list(range(20)), 9)
    plan = h.plan()
    assert plan is not None
    summary = wire.step_summary(h.core.executors[EXECUTOR], plan, 12.5)
    assert (summary.executor_id, summary.step_id, summary.time_seconds) == (EXECUTOR, 1, 12.5)
    rows = [(row.request_id, row.num_tokens, row.entered, row.prefill) for row in summary.members]
    assert rows == [("short", 2, True, False), ("long", 6, True, True)]
    assert summary.num_running == 2
    assert summary.num_free_blocks == summary.num_blocks - 1 - 5


def test_a_row_of_a_finished_sequence_is_shown_under_the_id_it_ran_with() -> None:
    seq = running("a")
    plan = _plan(rows=[seq], seq_ids=[5], num_tokens=[1], num_samples=[1])
    assert plan.rows[0].seq_id == 0
    from tests.scheduler.harness import EXECUTOR, Harness

    summary = wire.step_summary(Harness().core.executors[EXECUTOR], plan, 0.0)
    assert summary.members[0].seq_id == 5
