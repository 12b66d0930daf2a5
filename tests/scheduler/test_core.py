import dataclasses
import itertools
from array import array

import pytest

from scheduler.batching import Batching
from scheduler.door import RefusedError
from scheduler.executor_session import SessionBrokenError
from scheduler.plan import StepResult
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State, StatusCode
from scheduler.tenants import TenantLimits
from tests.rig.checking_executor import expected_output
from tests.scheduler.harness import EXECUTOR, Harness

WINDOWS = pytest.mark.parametrize("window", [1, 2])


def limits(window: int = 2, **fields: object) -> Limits:
    """Optimistic admission, since that is where preemptions are easy to provoke."""
    defaults = {"watermark": 0.0, "admission": Admission.OPTIMISTIC}
    return Limits(window=window, **(defaults | fields))  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


@WINDOWS
def test_every_output_equals_the_undisturbed_one(window: int) -> None:
    h = Harness(limits(window))
    for i in range(20):
        h.submit(f"r{i}", prompt(1 + 3 * i, i), 5 + i)
    h.run_to_end()
    h.check_outputs()
    assert h.core.executors[EXECUTOR].blocks.num_free == h.capacity.num_blocks


def test_the_finished_leave_and_the_waiting_enter_in_the_very_next_plan() -> None:
    h = Harness(limits(1), max_num_seqs=4)
    for name, num_tokens in {"A": 9, "B": 5, "C": 3, "D": 12, "E": 20, "F": 20, "G": 20}.items():
        h.submit(name, prompt(2), num_tokens, ignore_eos=True)
    pictures: list[set[str]] = []
    while True:
        h.step()
        if not pictures or pictures[-1] != h.members():
            pictures.append(h.members())
        if h.sequences["D"].state is State.FINISHED:
            break
    assert pictures[:4] == [set("ABCD"), set("ABED"), set("AFED"), set("GFED")]


def test_with_window_two_a_newcomer_enters_one_plan_later() -> None:
    h = Harness(limits(2), max_num_seqs=1)
    h.submit("A", prompt(2), 3, ignore_eos=True)
    h.submit("B", prompt(2), 3, ignore_eos=True)
    h.run_to_end()
    rows = [[seq.request.request_id for seq in plan.rows] for plan in h.plans]
    # A's end is foreseen, so no row is planned past it; B enters when result 3 is in.
    assert rows[:4] == [["A"], ["A"], ["A"], ["B"]]


def test_decodes_come_before_chunks_and_share_one_step() -> None:
    h = Harness(limits(1, max_num_batched_tokens=8))
    h.submit("short", prompt(2), 30, ignore_eos=True)
    h.step()
    h.submit("long", prompt(30), 2, ignore_eos=True)
    plan = h.plan()
    assert plan is not None
    assert [seq.request.request_id for seq in plan.rows] == ["short", "long"]
    assert plan.num_tokens == [1, 7]


def test_b23_a_chunked_prompt_waits_while_decodes_take_the_budget() -> None:
    h = Harness(limits(1), max_num_seqs=9, max_num_batched_tokens=8)
    for i in range(8):
        h.submit(f"d{i}", prompt(1, i), 8, ignore_eos=True)
    h.step()
    h.submit("A", prompt(40), 4)
    for _ in range(5):
        h.step()
        assert "A" not in h.members()
    h.run_to_end()
    h.check_outputs()
    assert max(h.executor.tokens_per_step) <= 8


def test_the_time_that_is_shown_is_that_of_the_newest_step_that_computed_something() -> None:
    h = Harness(limits(1))
    h.submit("r", prompt(5), 3, ignore_eos=True)
    h.run_to_end()
    assert [sum(plan.num_tokens) for plan in h.plans] == [5, 1, 1, 0]  # the last one releases alone
    assert h.core.executors[EXECUTOR].previous_step_us == 110  # what the executor says of one token


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 49, 50])
def test_b22_the_first_token_comes_with_the_last_chunk(length: int) -> None:
    h = Harness(limits(1, max_num_batched_tokens=16))
    seq = h.submit("r", prompt(length), 5, ignore_eos=True)
    num_steps = 0
    while seq.num_output_tokens == 0:
        h.step()
        num_steps += 1
    assert num_steps == -(-length // 16)
    h.run_to_end()
    h.check_outputs()


def test_b39_no_step_exceeds_its_budget() -> None:
    h = Harness(limits(2, max_num_batched_tokens=100), max_num_batched_tokens=128, num_blocks=256)
    for i in range(10):
        h.submit(f"r{i}", prompt(33, i), 3)
    h.run_to_end()
    assert max(h.executor.tokens_per_step) <= 100
    h.check_outputs()


@WINDOWS
def test_b38_a_budget_of_one_token_works(window: int) -> None:
    h = Harness(limits(window, max_num_batched_tokens=1))
    for i in range(3):
        h.submit(f"r{i}", prompt(20, i), 6)
    h.run_to_end()
    h.check_outputs()


@WINDOWS
@pytest.mark.parametrize("seats", [1, 2])
def test_b03_requests_that_end_in_their_first_step_give_their_seat_back(window: int, seats: int) -> None:
    h = Harness(limits(window), max_num_seqs=seats)
    for i in range(100):
        for j in range(3):
            h.submit(f"r{i}.{j}", prompt(3, i + j), 1)
        h.run_to_end(max_steps=20)
    h.check_outputs()
    assert all(seq.num_output_tokens == 1 for seq in h.sequences.values())


def test_b01_what_can_never_fit_is_refused_with_the_limit_and_hurts_nobody() -> None:
    h = Harness(num_blocks=8, block_size=16, max_seq_len=512)
    with pytest.raises(RefusedError, match="at most 128") as refused:
        h.submit("big", prompt(200), 8)
    assert refused.value.status_code is StatusCode.INVALID_ARGUMENT
    h.submit("small", prompt(10), 8)
    h.run_to_end()
    h.check_outputs()


def test_b02_order_is_strict_so_a_big_request_starts_although_small_ones_keep_coming() -> None:
    h = Harness(limits(1), num_blocks=20, max_num_seqs=8, block_size=16)
    h.submit("A", prompt(100), 20, ignore_eos=True)
    h.step()
    big = h.submit("B", prompt(230), 10, ignore_eos=True)
    steps_after_a = 0
    for i in range(200):
        if i % 2 == 0:
            h.submit(f"small{i}", prompt(8, i), 4, ignore_eos=True)
        h.step()
        steps_after_a += h.sequences["A"].state is State.FINISHED
        if big.state is not State.WAITING:
            break
    assert big.state is State.RUNNING
    assert steps_after_a <= 50
    h.run_to_end()
    h.check_outputs()


@WINDOWS
def test_b04_with_a_full_cache_no_two_steps_in_a_row_are_empty(window: int) -> None:
    h = Harness(limits(window), num_blocks=12, block_size=16)
    for i in range(3):
        h.submit(f"d{i}", prompt(48, i), 40, ignore_eos=True)
    h.step()
    h.submit("waits", prompt(60), 5, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert h.core.counters.preemptions >= 1
    empty = [tokens == 0 for tokens in h.executor.tokens_per_step[:-1]]
    assert not any(a and b for a, b in itertools.pairwise(empty))


@WINDOWS
def test_b09_recompute_covers_prompt_and_output(window: int) -> None:
    h = Harness(limits(window), num_blocks=14, block_size=16)
    for i, length in enumerate([32, 32, 32, 3]):
        h.submit(f"r{i}", prompt(length, i), 64, ignore_eos=True)
    h.run_to_end()
    assert h.core.counters.preemptions >= 1
    h.check_outputs()


@WINDOWS
@pytest.mark.parametrize(("priority", "victim"), [(0, "A"), (1, "B")])  # the cheaper; the less important
def test_b13_a_preempted_request_returns_only_when_that_pays(window: int, priority: int, victim: str) -> None:
    h = Harness(limits(window), num_blocks=20, block_size=16, max_num_batched_tokens=32, max_seq_len=512)
    h.submit("A", prompt(64, 1), 120, ignore_eos=True)
    h.submit("B", prompt(200, 2), 60, priority=priority, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert 1 <= h.sequences[victim].num_preemptions <= 2
    assert h.core.counters.preemptions == h.sequences[victim].num_preemptions
    for seq in h.sequences.values():
        rows = [row for plan in h.plans for row in zip(plan.rows, plan.num_tokens, strict=True)]
        computed = sum(count for row, count in rows if row is seq)
        assert computed <= 3 * seq.max_len


@WINDOWS
def test_b06_the_preempted_resumes_before_those_that_never_ran(window: int) -> None:
    h = Harness(limits(window), num_blocks=8, block_size=16, max_num_seqs=2)
    h.submit("first", prompt(40, 1), 60, ignore_eos=True)
    a = h.submit("A", prompt(40, 2), 40, ignore_eos=True)
    b = h.submit("B", prompt(8, 3), 4, ignore_eos=True, arrival=-5.0)
    a_lost = False
    while b.state is State.WAITING:
        h.step()
        a_lost = a_lost or a.num_preemptions > 0
        if a_lost and a.state is State.WAITING:
            assert b.state is State.WAITING or b.has_started
    h.run_to_end()
    h.check_outputs()
    assert a.num_preemptions <= 2


@WINDOWS
def test_preemption_happens_only_with_nothing_in_flight(window: int) -> None:
    h = Harness(limits(window), num_blocks=10, block_size=4)
    for i in range(4):
        h.submit(f"r{i}", prompt(6, i), 20, ignore_eos=True)
    while not h.core.is_idle:
        before = h.core.counters.preemptions
        unanswered = h.core.executors[EXECUTOR].session.num_unanswered
        plan = h.plan()
        if h.core.counters.preemptions > before:
            assert unanswered == 0
        if plan is None and h.executor.plans:
            h.result()
    assert h.core.counters.preemptions >= 1
    h.check_outputs()


@WINDOWS
def test_b33_a_preemption_gives_back_exactly_what_the_victim_held(window: int) -> None:
    for block_size in (1, 8, 16, 64):
        h = Harness(
            limits(window), num_blocks=max(2, 96 // block_size), block_size=block_size, max_seq_len=96
        )
        for i in range(4):
            h.submit(f"r{i}", prompt(13 + i, i), 40, ignore_eos=True)
        h.run_to_end()
        h.check_outputs()
        assert h.core.executors[EXECUTOR].blocks.num_free == h.executor.capacity.num_blocks


@WINDOWS
def test_the_blocks_of_a_cancelled_sequence_are_free_by_the_next_plan(window: int) -> None:
    h = Harness(limits(window), num_blocks=8, block_size=4, max_num_seqs=1)
    seq = h.submit("A", prompt(20), 8, ignore_eos=True)
    h.submit("B", prompt(28, 1), 4, ignore_eos=True)
    h.step()
    h.plan()
    h.core.cancel(seq.request.key, FinishReason.ABORT, h.now)
    assert h.core.executors[EXECUTOR].blocks.num_free == 8
    while h.executor.plans:
        h.result()
    plan = h.plan()
    assert plan is not None
    assert seq.block_table == []
    assert [row.request.request_id for row in plan.rows] == ["B"]
    h.run_to_end()
    assert seq.finish is not None
    assert seq.finish.reason is FinishReason.ABORT


def test_a_row_of_a_cancelled_sequence_delivers_nothing() -> None:
    h = Harness(limits(2))
    seq = h.submit("A", prompt(4), 20, ignore_eos=True)
    h.plan()
    h.core.cancel(seq.request.key, FinishReason.STOP, h.now)
    outcome = h.core.update(EXECUTOR, h.executor.run(), h.now)
    assert outcome.progressed == []
    assert seq.num_output_tokens == 0
    assert seq.num_wasted_tokens == 1
    assert h.core.counters.wasted_tokens == 1


def test_b26_what_is_cancelled_while_it_waits_is_never_computed() -> None:
    h = Harness(limits(1), max_num_seqs=1)
    h.submit("A", prompt(4), 10, ignore_eos=True)
    for name in "BCD":
        h.submit(name, prompt(4), 3, ignore_eos=True)
    h.step()
    for name in "BC":
        h.core.cancel(h.sequences[name].request.key, FinishReason.ABORT, h.now)
    h.run_to_end()
    assert {name for plan in h.plans for row in plan.rows for name in [row.request.request_id]} == {"A", "D"}


def test_cancelling_what_does_not_live_leaves_no_trace() -> None:
    h = Harness()
    for i in range(1000):
        assert h.core.cancel(i.to_bytes(16), FinishReason.ABORT, h.now) is None
    assert h.core.sequences == {}
    assert len(h.core.waiting) == 0


@WINDOWS
def test_a_deadline_ends_running_and_waiting_alike(window: int) -> None:
    h = Harness(limits(window), max_num_seqs=1)
    running = h.submit("A", prompt(4), 100, ignore_eos=True, deadline=5.0)
    waiting = h.submit("B", prompt(4), 100, ignore_eos=True, deadline=5.0)
    h.step()
    assert h.core.next_timer == 5.0
    assert h.core.expire(4.9) == []
    assert set(h.core.expire(5.0)) == {running, waiting}
    for seq in (running, waiting):
        assert seq.finish is not None
        assert seq.finish.reason is FinishReason.DEADLINE
    h.run_to_end()
    assert h.core.executors[EXECUTOR].blocks.num_free == h.capacity.num_blocks


def test_a_deadline_in_the_past_ends_at_once() -> None:
    h = Harness()
    seq = h.submit("A", prompt(4), 10, deadline=-1.0)
    assert seq.finish is not None
    assert seq.finish.reason is FinishReason.DEADLINE
    assert h.plan() is None


@WINDOWS
def test_what_ran_on_a_lost_executor_is_recomputed_on_the_next(window: int) -> None:
    h = Harness(limits(window), max_num_seqs=3)
    for i in range(6):
        h.submit(f"r{i}", prompt(5, i), 15, ignore_eos=True)
    for _ in range(4):
        h.step()
    h.plan()
    h.core.detach(EXECUTOR, h.now)
    assert all(seq.state is State.WAITING for seq in h.sequences.values())
    h.attach()
    h.run_to_end()
    h.check_outputs()


def test_without_an_executor_new_requests_are_refused_and_accepted_ones_wait() -> None:
    h = Harness()
    h.core.detach(EXECUTOR, h.now)
    with pytest.raises(RefusedError, match="no executor") as refused:
        h.submit("new", prompt(4), 4)
    assert refused.value.status_code is StatusCode.UNAVAILABLE
    h.submit("old", prompt(4), 4, accepted_before=True)
    h.attach()
    h.run_to_end()
    h.check_outputs()


def test_b37_an_empty_prompt_is_refused_even_where_an_accepted_request_would_wait() -> None:
    h = Harness()
    h.core.detach(EXECUTOR, h.now)
    for length, max_tokens in ((0, 4), (4, 0)):
        with pytest.raises(RefusedError) as refused:
            h.submit("A", prompt(length), max_tokens, accepted_before=True)
        assert refused.value.status_code is StatusCode.INVALID_ARGUMENT
    assert h.core.sequences == {}


def test_what_a_larger_executor_can_hold_waits_for_it_when_a_small_one_comes_beside() -> None:
    h = Harness(limits(1), num_blocks=64, block_size=4, max_num_seqs=1)
    h.submit("first", prompt(4), 5, ignore_eos=True)
    big = h.submit("big", prompt(100), 50, ignore_eos=True)
    h.step()
    assert h.core.attach("small", 7, dataclasses.replace(h.capacity, num_blocks=8), h.now) == []
    assert h.core.schedule("small", h.now) is None
    h.run_to_end()
    h.check_outputs()
    assert big.state is State.FINISHED


@pytest.mark.parametrize(("reason", "teaches"), [(FinishReason.STOP, True), (FinishReason.ABORT, False)])
def test_a_stop_string_teaches_how_long_answers_are_and_a_client_that_leaves_does_not(
    reason: FinishReason, teaches: bool
) -> None:
    h = Harness()
    expected_before = h.core.lengths.remaining(0, 500)
    for number in range(40):
        seq = h.submit(f"r{number}", prompt(4), 50, ignore_eos=True)
        while seq.num_output_tokens < 3:
            h.step()
        h.core.cancel(seq.request.key, reason, h.now)
    assert (h.core.lengths.remaining(0, 500) < expected_before) is teaches


def test_ids_that_end_a_request_end_it_when_the_model_is_known_at_last() -> None:
    h = Harness()
    h.core.detach(EXECUTOR, h.now)
    request = h.request("A", prompt(4), 9, accepted_before=True)
    seq = h.core.submit(request, array("I", [5, 96]), now=h.now)  # 96 is the model's end token
    assert seq.state is State.WAITING
    assert h.core.attach(EXECUTOR, 5, h.capacity, h.now) == [seq]
    assert seq.finish is not None
    assert (seq.finish.reason, seq.finish.matched_token_id) == (FinishReason.STOP, 96)


def test_one_rows_error_is_one_rows_error() -> None:
    h = Harness(limits(2))
    names = "ABC"
    for i, name in enumerate(names):
        h.submit(name, prompt(5, i), 12, ignore_eos=True)
    h.plan()
    h.plan()
    ended = h.result(fail=1)
    assert [seq.request.request_id for seq in ended] == ["B"]
    failed = h.sequences.pop("B")
    assert failed.finish is not None
    assert failed.finish.reason is FinishReason.ERROR
    assert failed.finish.message == "the logits hold NaN"
    h.run_to_end()
    h.check_outputs()


# --- submit is idempotent -----------------------------------------------------------------------


def test_a_key_that_lives_is_attached_not_computed_again() -> None:
    h = Harness(limits(1))
    seq = h.submit("A", prompt(4), 10, ignore_eos=True)
    for _ in range(4):
        h.step()
    again = h.core.submit(seq.request, seq.output_token_ids()[:2], now=h.now)
    assert again is seq
    h.run_to_end()
    h.check_outputs()


def test_a_key_that_lives_with_another_body_is_refused() -> None:
    h = Harness()
    h.submit("A", prompt(4), 10, body_digest=b"one")
    with pytest.raises(RefusedError) as refused:
        h.submit("A", prompt(4), 10, body_digest=b"two")
    assert refused.value.status_code is StatusCode.ALREADY_EXISTS
    assert h.sequences["A"].state is State.WAITING


def test_ids_that_disagree_with_the_live_sequence_are_what_counts() -> None:
    h = Harness(limits(1))
    old = h.submit("A", prompt(4), 10, ignore_eos=True)
    for _ in range(4):
        h.step()
    mine = array("I", [1, 2, 3])
    new = h.core.submit(old.request, mine, now=h.now)
    assert new is not old
    assert old.state is State.FINISHED
    h.run_to_end()
    assert list(new.output_token_ids()) == expected_output(new.request, mine)[0]


def test_a_resubmitted_request_goes_on_after_its_ids() -> None:
    h = Harness(limits(1))
    request = h.request("A", prompt(6), 12, ignore_eos=True)
    whole, _ = expected_output(request)
    seq = h.core.submit(request, array("I", whole[:5]), now=h.now)
    h.run_to_end()
    assert list(seq.output_token_ids()) == whole


@pytest.mark.parametrize(
    ("ids", "max_tokens", "reason"),
    [
        ([1, 2, 96], 10, FinishReason.STOP),
        ([1, 2, 3], 3, FinishReason.LENGTH),
        ([1, 5], 10, FinishReason.STOP),
    ],
)
def test_ids_that_already_end_the_request_end_it_without_a_step(
    ids: list[int], max_tokens: int, reason: FinishReason
) -> None:
    h = Harness()
    request = h.request("A", prompt(4), max_tokens, stop_token_ids=frozenset({5}))
    seq = h.core.submit(request, array("I", ids), now=h.now)
    assert seq.finish is not None
    assert seq.finish.reason is reason
    assert h.plan() is None


def test_b106_who_attaches_brings_a_deadline_of_its_own() -> None:
    h = Harness()
    seq = h.submit("a", [1, 2, 3], 50, deadline=5.0)
    h.step()
    again = h.core.submit(h.request("a", [1, 2, 3], 50, deadline=20.0), seq.output_token_ids(), now=h.now)
    assert again is seq
    assert h.core.expire(6.0) == []
    assert h.core.expire(20.0) == [seq]
    h.now = 21.0
    later = h.core.submit(h.request("a", [1, 2, 3], 50, deadline=40.0), seq.output_token_ids(), now=h.now)
    assert later is not seq, "a call whose time is over has nothing to go on with"


def test_an_orphan_runs_on_for_its_grace_and_no_longer() -> None:
    h = Harness(limits(1, orphan_grace_seconds=10.0))
    seq = h.submit("A", prompt(4), 100, ignore_eos=True)
    h.step()
    h.core.orphan(seq, now=1.0)
    assert h.core.expire(10.9) == []
    assert h.core.submit(seq.request, seq.output_token_ids(), now=10.9) is seq
    assert h.core.expire(11.1) == []
    h.core.orphan(seq, now=12.0)
    assert h.core.expire(22.0) == [seq]


def test_an_orphan_that_was_given_up_is_computed_anew_when_its_router_returns() -> None:
    h = Harness(limits(1, orphan_grace_seconds=1.0))
    seq = h.submit("A", prompt(4), 20, ignore_eos=True)
    for _ in range(5):
        h.step()
    have = seq.output_token_ids()
    h.core.orphan(seq, now=0.0)
    h.core.expire(2.0)
    new = h.core.submit(seq.request, have, now=3.0)
    h.sequences["A"] = new
    h.run_to_end()
    h.check_outputs()


def test_results_are_kept_for_a_while_and_then_forgotten() -> None:
    h = Harness(limits(1, result_keep_seconds=60.0))
    h.submit("A", prompt(4), 3)
    h.run_to_end()
    assert len(h.core.sequences) == 1
    h.core.expire(59.0)
    assert len(h.core.sequences) == 1
    h.core.expire(61.0)
    assert h.core.sequences == {}
    assert h.core.next_timer is None


# --- the executor's answers ---------------------------------------------------------------------


def _result(h: Harness, **changes: object) -> StepResult:
    good = h.executor.run()
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 99},
        {"step_id": 7},
        {"seq_ids": [1], "num_sampled": [1], "token_ids": [3]},
        {"seq_ids": [1, 2, 9], "num_sampled": [1, 1, 1], "token_ids": [3, 3, 3]},
        {"num_sampled": [1, 0], "token_ids": [3]},
        {"token_ids": [3]},
        {"num_sampled": [1]},
        {"num_sampled": [1, 1, 1]},
        {"seq_ids": [2, 1]},
    ],
)
def test_a_result_that_does_not_fit_its_plan_breaks_the_session(changes: dict[str, object]) -> None:
    h = Harness(limits(1))
    h.submit("A", prompt(4), 10, ignore_eos=True)
    h.submit("B", prompt(4, 1), 10, ignore_eos=True)
    h.plan()
    with pytest.raises(SessionBrokenError):
        h.core.update(EXECUTOR, _result(h, **changes), h.now)
    h.core.detach(EXECUTOR, h.now, is_crash=True)
    assert [h.core.inquiry.suspects.num_crashes(("", name)) for name in "AB"] == [1, 1]


def test_a_sequence_that_has_all_its_tokens_and_is_not_ended_ends_with_the_epoch() -> None:
    h = Harness(limits(1))
    seq = h.submit("A", prompt(4), 3, ignore_eos=True)
    for _ in range(3):
        h.plan()
        h.core.update(EXECUTOR, _result(h, finished=[]), h.now)
    with pytest.raises(SessionBrokenError, match="was not ended"):
        h.core.schedule(EXECUTOR, h.now)
    h.core.detach(EXECUTOR, h.now)
    h.epoch += 1
    assert h.core.attach(EXECUTOR, h.epoch, h.capacity, h.now) == [seq]
    h.check_outputs()


@pytest.mark.parametrize("entries", [[], ["one", "two"]])
def test_b71_a_token_without_its_logprobs_ends_its_sequence_and_no_other(entries: list[object]) -> None:
    h = Harness(limits(1))
    seq = h.submit("A", prompt(4), 9, ignore_eos=True, want_logprobs=True)
    h.submit("B", prompt(4, 1), 9, ignore_eos=True)
    h.plan()
    h.core.update(EXECUTOR, _result(h, logprobs={1: ["zero"]}), h.now)
    assert seq.logprobs == ["zero"]
    h.plan()
    outcome = h.core.update(EXECUTOR, _result(h, logprobs={1: entries}), h.now)
    assert outcome.ended == [seq]
    assert seq.finish is not None
    assert seq.finish.status_code is StatusCode.INTERNAL
    assert (seq.num_output_tokens, seq.logprobs) == (1, ["zero"])
    del h.sequences["A"]
    h.run_to_end()
    h.check_outputs()


def test_a_result_that_comes_twice_is_applied_once() -> None:
    h = Harness(limits(1))
    seq = h.submit("A", prompt(4), 10, ignore_eos=True)
    h.plan()
    result = h.executor.run()
    h.core.update(EXECUTOR, result, h.now)
    h.core.update(EXECUTOR, result, h.now)
    assert seq.num_output_tokens == 1


def test_a_draining_executor_gets_nobody_new() -> None:
    h = Harness(limits(1))
    h.submit("A", prompt(4), 10, ignore_eos=True)
    h.plan()
    h.core.update(EXECUTOR, _result(h, draining=True), h.now)
    late = h.submit("B", prompt(4), 10)
    while h.sequences["A"].state is not State.FINISHED:
        h.plan()
        h.core.update(EXECUTOR, _result(h, draining=True), h.now)
    assert late.state is State.WAITING


# --- time budget, request-level baselines -------------------------------------------------------


def test_chunks_shrink_to_keep_the_wanted_step_time_while_anything_decodes() -> None:
    # The checking executor's steps take 100 µs + 10 µs a token: 500 µs leave room for 40 tokens.
    h = Harness(limits(1, max_step_us=500.0), num_blocks=512, max_num_batched_tokens=256, max_seq_len=2048)
    h.submit("A", prompt(50), 60, ignore_eos=True)
    for _ in range(10):
        h.step()
    h.submit("long", prompt(1000), 2, ignore_eos=True)
    sizes = []
    while h.sequences["A"].state is not State.FINISHED:
        h.step()
        if "A" in h.members() and "long" in h.members():
            sizes.append(h.executor.tokens_per_step[-1])
    assert len(sizes) > 20
    assert all(39 <= size <= 41 for size in sizes[3:20])  # the fitted line may be off by a rounding
    h.run_to_end()
    h.check_outputs()


@WINDOWS
def test_a_request_level_batch_stays_until_its_last_member_ends(window: int) -> None:
    h = Harness(limits(window), Batching.REQUEST, max_num_seqs=4)
    lengths = {"A": 9, "B": 5, "C": 3, "D": 12, "E": 4, "F": 2}
    for name, num_tokens in lengths.items():
        h.submit(name, prompt(2), num_tokens, ignore_eos=True)
    while h.sequences["D"].state is not State.FINISHED:
        h.step()
        assert h.members() <= set("ABCD")
    h.run_to_end()
    h.check_outputs()
    assert len(h.plans[0].rows) == 4


@WINDOWS
def test_a_padded_batch_computes_its_finished_rows_on(window: int) -> None:
    h = Harness(limits(window), Batching.REQUEST_PADDED, max_num_seqs=4)
    for name, num_tokens in {"A": 9, "B": 5, "C": 3, "D": 12, "E": 4}.items():
        h.submit(name, prompt(2), num_tokens, ignore_eos=True)
    widths = []
    while h.sequences["D"].state is not State.FINISHED:
        h.step()
        if h.plans[-1].rows:
            widths.append(len(h.plans[-1].rows))
    # Never narrower than the window's delay between a finish and its padding row explains.
    assert widths.count(4) >= len(widths) - 2 * window * 3
    assert any(row.is_padding for plan in h.plans for row in plan.rows)
    h.run_to_end()
    h.check_outputs()
    assert h.core.executors[EXECUTOR].blocks.num_free == h.capacity.num_blocks


def test_a_request_level_batch_is_filled_at_once_whatever_the_token_budget() -> None:
    h = Harness(limits(1, max_num_batched_tokens=8), Batching.REQUEST, max_num_seqs=3)
    for name in "ABCD":
        h.submit(name, prompt(10), 3, ignore_eos=True)
    h.plan()
    assert {name for name, seq in h.sequences.items() if seq.state is State.RUNNING} == set("ABC")
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("batching", [Batching.REQUEST, Batching.REQUEST_PADDED])
def test_nobody_in_a_batch_waits_for_another_to_end(batching: Batching) -> None:
    h = Harness(limits(1), batching, max_num_seqs=8, max_num_batched_tokens=4)
    for i in range(12):
        h.submit(f"r{i}", prompt(2, i), 30, ignore_eos=True)
    for _ in range(100):
        h.step()
        running = list(h.core.executors[EXECUTOR].running.values())
        lengths = [seq.num_output_tokens for seq in running if not seq.is_padding]
        assert max(lengths, default=0) - min(lengths, default=0) <= 4
        assert len(running) <= 4
    h.run_to_end()
    h.check_outputs()


def test_b05_a_lone_request_that_lost_its_executor_needs_no_other_event_to_resume() -> None:
    h = Harness(limits(1))
    seq = h.submit("A", prompt(6), 10, ignore_eos=True)
    h.step()
    h.core.detach(EXECUTOR, h.now)
    h.attach()
    plan = h.plan()
    assert plan is not None
    assert plan.rows == [seq]


def test_b12_what_would_outgrow_the_whole_cache_is_refused() -> None:
    h = Harness(num_blocks=6, block_size=16, max_seq_len=512)
    with pytest.raises(RefusedError, match="180 must be at most 96"):
        h.submit("A", prompt(80), 100)
    alone = h.submit("B", prompt(80), 16, ignore_eos=True)
    h.run_to_end()
    assert alone.num_preemptions == 0
    h.check_outputs()


def test_priority_classes_are_served_lower_value_first() -> None:
    h = Harness(limits(1), max_num_seqs=1)
    h.submit("running", prompt(2), 3, ignore_eos=True)
    h.step()
    h.submit("later", prompt(2), 3, priority=1, ignore_eos=True)
    h.submit("sooner", prompt(2), 3, priority=-1, ignore_eos=True)
    order: list[str] = []
    while not h.core.is_idle:
        h.step()
        order += [name for name in h.members() if name not in order]
    assert order == ["running", "sooner", "later"]


def test_plans_keep_what_they_said_when_sequences_go_on() -> None:
    h = Harness(limits(2))
    seq: Sequence = h.submit("A", prompt(7), 20, ignore_eos=True)
    first = h.plan()
    assert first is not None
    said = (list(first.admitted[0].token_ids), list(first.admitted[0].block_ids))
    for _ in range(6):
        h.step()
    assert (list(first.admitted[0].token_ids), list(first.admitted[0].block_ids)) == said
    assert len(seq.block_table) > len(said[1])


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT, FinishReason.DEADLINE])
def test_the_key_of_a_cancelled_request_is_free_at_once(reason: FinishReason) -> None:
    h = Harness()
    old = h.submit("A", prompt(4), 20, body_digest=b"one", ignore_eos=True)
    h.step()
    h.core.cancel(old.request.key, reason, h.now)
    new = h.submit("A", prompt(6), 9, body_digest=b"two")
    assert new is not old
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("window", [1, 2])
def test_equal_prompts_that_fill_their_blocks_together_take_the_next_ones_over_several_steps(
    window: int,
) -> None:
    """So that handing them out makes no pause; nobody takes more than it will need."""
    count, length, max_tokens = 256, 16, 40
    h = Harness(
        Limits(window=window, watermark=0.0, admission=Admission.RESERVE),
        num_blocks=6 * count,
        block_size=16,
        max_num_seqs=count,
        max_num_batched_tokens=count * length,
    )
    for i in range(count):
        h.submit(f"r{i}", [(i + k) % 90 for k in range(length)], max_tokens, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    grown = [len(plan.grown_seq_ids) for plan in h.plans]
    assert max(grown[2 + window :]) < count // 4, "the first block comes at once: no room to spread it yet"
    assert sum(grown) == count * (-(-(length + max_tokens - 1) // 16) - 1)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("block_size", "prompt_len"), [(1, 1), (2, 3), (4, 7)])
def test_whoever_runs_has_a_plan_though_all_are_postponed_for_their_tenants_limit(
    window: int, block_size: int, prompt_len: int
) -> None:
    """Nothing else would have anybody ask again: no result is due, and no request comes."""
    tenants = {"t": TenantLimits(max_blocks=4)}
    limits = Limits(window=window, watermark=0.0, admission=Admission.OPTIMISTIC, tenants=tenants)
    h = Harness(limits, block_size=block_size)
    for number in range(3):
        h.submit(f"r{number}", [1 + number] * prompt_len, 20, tenant="t", ignore_eos=True)
    while not h.core.is_idle:
        while h.plan() is not None:
            pass
        assert h.executor.plans
        h.result()
    h.check_outputs()
