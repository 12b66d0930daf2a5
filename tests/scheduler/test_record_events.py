"""Digests keep what begins alike alike, and tell no token; what is written is read back."""

import json
from array import array
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching import Batching
from scheduler.plan import BatchPlan, Capacity, FinishedSequence, NewSequence, SequenceError, StepResult
from scheduler.policy import Admission, Limits
from scheduler.record_events import (
    DIGEST_BYTES,
    Digester,
    capacity_event,
    capacity_of,
    header,
    limits_of,
    line,
    plan_digest,
    plan_event,
    request_event,
    request_of,
    result_event,
    result_of,
    synthetic_log,
)
from scheduler.sequence import FinishReason, Request, StatusCode
from scheduler.tenants import TenantLimits
from scheduler.token_ids import TokenIds
from scheduler.waiting import Policy

ids = st.lists(st.integers(0, 3), max_size=30).map(lambda values: array("I", values))
SECRET = b"of this record"


def synthetic(log: TokenIds, num_ids: int) -> TokenIds:
    digests = Digester(num_ids, SECRET).of_log(log)
    return synthetic_log(b"".join(digests), len(log), num_ids)


@given(ids, ids, ids, st.sampled_from([1, 2, 3, 4, 16]))
def test_logs_share_synthetic_stretches_exactly_as_far_as_they_share_real_ones(
    common: TokenIds, one: TokenIds, other: TokenIds, num_ids: int
) -> None:
    logs = common + one, common + other
    made = [synthetic(log, num_ids) for log in logs]
    assert [len(log) for log in made] == [len(log) for log in logs]
    for count in range(min(map(len, logs)) // num_ids + 1):
        end = count * num_ids
        assert (logs[0][:end] == logs[1][:end]) == (made[0][:end] == made[1][:end])


@given(ids, st.sampled_from([1, 4]))
def test_a_log_that_grows_stretch_by_stretch_has_the_digests_of_the_whole(
    log: TokenIds, num_ids: int
) -> None:
    digester = Digester(num_ids, SECRET)
    before, grown = b"", []
    for start in range(0, len(log) - num_ids + 1, num_ids):
        before = digester.of_stretch(before, log[start : start + num_ids])
        grown.append(before)
    assert grown == digester.of_log(log)


def test_another_record_has_other_digests() -> None:
    log = array("I", range(8))
    assert Digester(4, b"a").of_log(log) != Digester(4, b"b").of_log(log)


def test_digests_that_do_not_fit_the_length_are_refused() -> None:
    with pytest.raises(ValueError, match="9 ids have 2 digests, not 1"):
        synthetic_log(bytes(DIGEST_BYTES), 9, 4)


def test_limits_are_read_back() -> None:
    limits = Limits(
        num_blocks=7, policy=Policy.DEADLINE, admission=Admission.RESERVE, max_step_us=1.5,
        tenants={"a": TenantLimits(weight=2.0, max_running=3)}, default_tenant=TenantLimits(max_queued=1),
    )  # fmt: skip
    event = json.loads(line(header(limits, Batching.REQUEST, 16, version="1.2")))
    assert limits_of(event) == limits
    assert (event["batching"], event["stretch"], event["version"]) == ("request", 16, "1.2")


def test_a_capacity_is_read_back_without_its_end_tokens() -> None:
    capacity = Capacity(9, 4, 3, 8, 40, 2, 97, frozenset({96}), features=frozenset({"x", "y"}))
    assert capacity_of(json.loads(line(capacity_event(capacity)))) == replace(
        capacity, eos_token_ids=frozenset()
    )


def test_a_request_is_read_back_but_for_what_tells_what_was_said() -> None:
    request = Request(
        key=b"k" * 16, request_id="r1", prompt_token_ids=array("I", [60001, 60002, 60003, 60004, 60005]),
        sampling=b"words", max_tokens=9, ignore_eos=True, stop_token_ids=frozenset({60007}),
        needs=frozenset({"constraints", "penalties"}),
        sample_index=1, group=4, priority=-2, tenant="t", cache_salt="pepper", body_digest=b"digest",
        deadline=12.25, arrival=1 / 3, accepted_before=True, want_logprobs=True, want_prompt_logprobs=True,
    )  # fmt: skip
    output = array("I", [60006])
    digester = Digester(2, SECRET)
    digests = digester.of_log(request.prompt_token_ids + output)
    text = line(request_event(request, 1, digester, digests))
    for secret in (b"6000", b"pepper", b"words", b'digest"'):
        assert secret not in text
    read, resumed = request_of(json.loads(text), 2)
    assert (len(read.prompt_token_ids), len(resumed)) == (5, 1)
    hidden = {"prompt_token_ids", "sampling", "stop_token_ids", "cache_salt", "body_digest"}
    for item in fields(Request):
        assert (getattr(read, item.name) == getattr(request, item.name)) == (item.name not in hidden)
    again = request_of(json.loads(line(request_event(request, 1, digester, digests))), 2)
    assert again == (read, resumed)
    over, resumed = request_of(json.loads(text) | {"is_over": True}, 2)
    assert over.stop_token_ids == {resumed[-1]}


def test_of_a_request_that_asks_for_nothing_special_little_is_recorded() -> None:
    request = Request(
        key=b"k" * 16, request_id="r1", prompt_token_ids=array("I", [7]), sampling=b"", max_tokens=9
    )  # fmt: skip
    event = request_event(request, 0, Digester(2, SECRET), [])
    assert event.keys() == {"key", "request_id", "prompt", "output", "digests", "max_tokens"}
    read, _ = request_of(json.loads(line(event)), 2)
    assert read == replace(request, prompt_token_ids=array("I", [0]))


def plan_with(**changed: object) -> BatchPlan:
    new = NewSequence(3, array("I", [1, 2]), 2, 0, [5], b"s", None)
    values: dict[str, object] = {
        "epoch": 1, "step_id": 2, "acked_step_id": 1, "released_seq_ids": [9], "admitted": [new],
        "seq_ids": [1, 3], "num_tokens": [1, 2], "grown_seq_ids": [1], "num_new_blocks": [1],
        "new_block_ids": [7], "positions_sum": 4, "num_samples": [1, 1], "rows": [], "filled": [],
        "outgrown": [], "left": [],
    }  # fmt: skip
    return BatchPlan(**values | changed)  # type: ignore[arg-type]


def test_plans_differ_in_their_digest_when_they_differ_in_what_is_done() -> None:
    new = plan_with().admitted[0]
    others = [
        plan_with(**{name: value})
        for name, value in {
            "epoch": 2, "step_id": 3, "acked_step_id": 0, "released_seq_ids": [], "seq_ids": [3, 1],
            "num_tokens": [2, 1], "grown_seq_ids": [3], "num_new_blocks": [2], "new_block_ids": [8],
            "positions_sum": 5, "num_samples": [1, 0], "admitted": [replace(new, block_ids=[6])],
        }.items()
    ]  # fmt: skip
    digests = {plan_digest(plan) for plan in [plan_with(), *others]}
    assert len(digests) == len(others) + 1
    same = plan_with(admitted=[replace(new, token_ids=array("I", [8, 9]), sampling=b"")])
    assert plan_digest(same) == plan_digest(plan_with())


def test_draft_tokens_are_recorded_by_their_number_alone() -> None:
    plan = plan_with(draft_tokens={3: array("I", [4_000_000_001, 4_000_000_002])})
    event = plan_event(plan)
    assert event == {"step": 2, "plan": plan_digest(plan_with()), "draft_tokens": {3: 2}}
    assert b"40000000" not in line(event)
    assert "draft_tokens" not in plan_event(plan_with())


def test_rows_are_recorded_only_where_they_are_not_those_that_were_planned() -> None:
    result = StepResult(1, 2, [1, 3], [1, 1], [5, 6], total_us=30, idle_us=4)
    assert result_event(result, plan_with(), {}) == {"step": 2, "us": 30, "idle_us": 4}
    for differs in (
        replace(result, epoch=5),
        replace(result, seq_ids=[3, 1]),
        replace(result, num_sampled=[2, 0]),
        replace(result, token_ids=[5]),
    ):
        event = result_event(differs, plan_with(), {})
        assert result_of(event, plan_with()) == replace(differs, token_ids=[0] * len(differs.token_ids))


results = st.builds(
    StepResult,
    epoch=st.sampled_from([1, 5]),
    step_id=st.integers(1, 4),
    seq_ids=st.sampled_from([[1, 3], [3]]),
    num_sampled=st.sampled_from([[1, 1], [1]]),
    token_ids=st.just([4_000_000_001, 4_000_000_002]),  # no other number here is so large
    logprobs=st.sampled_from([{}, {1: [None, None]}]),
    prompt_logprobs=st.sampled_from([{}, {3: (1, [None])}]),
    finished=st.sampled_from([[], [FinishedSequence(1, FinishReason.LENGTH)]]),
    errors=st.sampled_from([[], [SequenceError(3, "", StatusCode.INTERNAL)]]),
    draining=st.booleans(),
    total_us=st.integers(0, 10**9),
    idle_us=st.integers(0, 10**9),
)


@given(results)
def test_a_result_is_read_back_with_every_id_0(result: StepResult) -> None:
    text = line(result_event(result, plan_with(), {}))
    assert b"400000000" not in text
    read = result_of(json.loads(text), plan_with())
    assert read == replace(result, token_ids=[0, 0])
