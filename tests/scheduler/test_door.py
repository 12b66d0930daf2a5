"""Who is refused, with which sentence; and that the door lets nothing leak."""

import contextlib
import dataclasses
from array import array

import pytest

from scheduler.door import RefusedError
from scheduler.policy import Limits
from scheduler.sequence import FinishReason, Request, Sequence, State, StatusCode
from scheduler.tenants import TenantLimits
from scheduler.token_ids import NO_IDS
from scheduler.waiting import Policy
from tests.scheduler.harness import EXECUTOR, Harness


def limits(**fields: object) -> Limits:
    return Limits(watermark=0.0, **fields)  # type: ignore[arg-type]


def refusal(h: Harness, name: str, length: int, max_tokens: int, **fields: object) -> RefusedError:
    num_sequences, num_refused = len(h.core.sequences), h.core.counters.refused
    with pytest.raises(RefusedError) as error:
        h.submit(name, list(range(length)), max_tokens, **fields)
    assert len(h.core.sequences) == num_sequences
    assert h.core.counters.refused == num_refused + 1
    assert str(error.value) == error.value.message
    return error.value


# --- what can never be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted_before", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "sentence"),
    [
        (0, 4, "prompt has 0 tokens and max_tokens is 4: each must be at least 1"),
        (4, 0, "prompt has 4 tokens and max_tokens is 0: each must be at least 1"),
        (4, -1, "prompt has 4 tokens and max_tokens is -1: each must be at least 1"),
    ],
)
def test_b36_b37_what_makes_no_sense_is_refused_whoever_was_promised_it(
    length: int, max_tokens: int, sentence: str, accepted_before: bool
) -> None:
    h = Harness(limits(), num_blocks=8, block_size=4)
    error = refusal(h, "r", length, max_tokens, accepted_before=accepted_before)
    assert error.status_code is StatusCode.INVALID_ARGUMENT
    assert sentence in error.message
    assert error.retry_after_seconds is None


@pytest.mark.parametrize(
    ("length", "max_tokens", "sentence"),
    [
        (30, 3, "prompt has 30 tokens and max_tokens is 3: their sum 33 must be at most 32"),
        (32, 1, "their sum 33 must be at most 32"),
    ],
)
def test_b01_b35_what_no_executor_can_hold_is_refused_naming_values_and_limit(
    length: int, max_tokens: int, sentence: str
) -> None:
    h = Harness(limits(), num_blocks=8, block_size=4)
    error = refusal(h, "r", length, max_tokens)
    assert error.status_code is StatusCode.INVALID_ARGUMENT
    assert sentence in error.message
    assert error.retry_after_seconds is None


@pytest.mark.parametrize(("length", "max_tokens"), [(31, 1), (1, 31), (30, 2)])
def test_b35_what_just_fits_is_served(length: int, max_tokens: int) -> None:
    h = Harness(limits(), num_blocks=8, block_size=4)
    h.submit("r", list(range(length)), max_tokens, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()


def test_without_an_executor_the_new_are_told_to_come_again_and_the_accepted_wait() -> None:
    h = Harness()
    h.core.detach(EXECUTOR, h.now)
    error = refusal(h, "new", 4, 4)
    assert (error.status_code, error.message) == (
        StatusCode.UNAVAILABLE,
        "no executor is attached; try again when one is",
    )
    h.submit("old", [1], 4, accepted_before=True)


def test_a_key_in_use_by_another_body_is_refused_by_name() -> None:
    h = Harness()
    h.submit("r", [1], 4, body_digest=b"one")
    with pytest.raises(RefusedError, match="request_id 'r' is in use by a different request") as error:
        h.submit("r", [1], 4, body_digest=b"two")
    assert error.value.status_code is StatusCode.ALREADY_EXISTS


# --- bounded queues -------------------------------------------------------------------------------------


def test_b94_up_to_the_seats_and_the_queue_are_accepted_and_the_rest_is_told_when_to_come_again() -> None:
    h = Harness(limits(max_queued=10, max_num_seqs=4))
    accepted, refused = 0, []
    for i in range(1000):
        try:
            h.submit(f"r{i}", [1 + i % 90, 2, 3], 5, ignore_eos=True)
            accepted += 1
        except RefusedError as error:
            refused.append(error)
    assert accepted == 14
    assert h.core.counters.refused == len(refused) == 986
    assert len(h.core.sequences) == 14
    for item in refused:
        assert item.status_code is StatusCode.RESOURCE_EXHAUSTED
        assert "14 requests are waiting, the limit is 10; try again in" in item.message
        assert item.retry_after_seconds is not None
        assert 0.05 <= item.retry_after_seconds <= 60
    h.run_to_end()
    h.check_outputs()
    for i in range(14):
        h.submit(f"after{i}", [1, 2, 3], 5, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()


@pytest.mark.parametrize("why", ["is_draining", "is_away"])
def test_seats_of_an_executor_that_takes_no_newcomers_are_not_free(why: str) -> None:
    h = Harness(limits(max_queued=2, max_num_seqs=4))
    h.core.attach("other", 9, dataclasses.replace(h.capacity, max_num_seqs=50), h.now)
    setattr(h.core.executors["other"], why, True)
    for i in range(6):
        h.submit(f"r{i}", [1, i], 5, ignore_eos=True)
    assert "6 requests are waiting, the limit is 2" in refusal(h, "one more", 1, 5).message


def test_b94_under_steady_overload_the_queue_stays_bounded_and_the_wait_of_the_accepted_too() -> None:
    h = Harness(limits(max_queued=10, max_num_seqs=4))
    longest = 0.0
    started: set[str] = set()
    for step in range(600):
        for i in range(10):
            name = f"r{step}.{i}"
            try:
                h.submit(name, [1 + i, 2, 3], 4, ignore_eos=True)
            except RefusedError:
                continue
        h.step()
        h.now += 0.01
        assert len(h.core.waiting) <= 14
        for name in h.members() - started:
            started.add(name)
            longest = max(longest, h.now - h.sequences[name].request.arrival)
    # At most 14 ahead, 4 of them start every 4 steps (and a step or two for the window).
    assert longest <= 0.01 * (14 + 4 + 2)
    h.run_to_end()
    h.check_outputs()


def test_b94_the_hint_follows_the_pace_at_which_the_queue_drains() -> None:
    h = Harness(limits(max_queued=10, max_num_seqs=4))
    for i in range(4000):
        try:
            h.submit(f"r{i}", [1 + i % 90], 4, ignore_eos=True)
        except RefusedError:
            h.step()
            h.now += 0.01
    error = refusal_or_fill(h)
    # Four seats of four steps of 10 ms each: one starts every 10 ms.
    assert error.retry_after_seconds == pytest.approx(15 * 0.01, rel=0.4)


def refusal_or_fill(h: Harness) -> RefusedError:
    for i in range(100):
        try:
            h.submit(f"fill{i}", [1], 4, ignore_eos=True)
        except RefusedError as error:
            return error
    raise AssertionError("100 were accepted")


def test_b95_a_limit_on_tokens_holds_for_their_sum_and_the_sum_returns_to_0() -> None:
    h = Harness(limits(max_queued=100, max_queued_tokens=100, max_num_seqs=1))
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        h.submit(name, [i + 1] * 25, 2, ignore_eos=True)
    assert h.core.waiting.num_tokens == 100
    error = refusal(h, "fifth", 1, 2)
    assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
    assert "100 prompt tokens are waiting and this request has 1, the limit is 100" in error.message
    h.step()
    h.submit("later", [9] * 25, 2, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()
    assert h.core.waiting.num_tokens == 0


def test_b95_one_that_is_larger_than_the_whole_queue_is_refused_for_good() -> None:
    h = Harness(limits(max_queued_tokens=20))
    error = refusal(h, "large", 21, 2)
    assert error.status_code is StatusCode.INVALID_ARGUMENT
    assert error.message == "the prompt has 21 tokens, the whole queue at most 20"
    h.submit("fits", [1] * 20, 2)


def test_b96_waiting_ones_that_time_out_give_their_place_in_the_queue_back() -> None:
    h = Harness(
        limits(max_queued=5, max_queued_tokens=100, max_num_seqs=2, tenants={"t": TenantLimits(max_queued=9)})
    )
    for second in range(60):
        for i in range(20):
            try:
                h.submit(f"r{second}.{i}", [1, 2, 3], 200, tenant="t", deadline=h.now + 1.0, ignore_eos=True)
            except RefusedError:
                continue
        h.step()
        h.now += 1.0
        h.core.expire(h.now)
    assert len(h.core.waiting) == h.core.waiting.num_tokens == 0
    tenant = h.core.tenants.get("t", 0.0)
    assert (tenant.num_waiting, tenant.num_waiting_tokens, tenant.num_running) == (0, 0, 0)
    h.sequences.clear()
    for i in range(5):
        h.submit(f"normal{i}", [1, 2, 3], 5, tenant="t")
    h.run_to_end()
    h.check_outputs()


# --- tenants --------------------------------------------------------------------------------------------


def of_tenant(**tenant_limits: float) -> Harness:
    return Harness(limits(tenants={"t": TenantLimits(**tenant_limits)}))  # type: ignore[arg-type]


def test_a_tenants_queue_is_bounded_by_its_own_limit_and_others_are_not_held_to_it() -> None:
    h = of_tenant(max_queued=2, max_running=1)
    for i in range(3):
        h.submit(f"r{i}", [1], 4, tenant="t")
    error = refusal(h, "fourth", 1, 4, tenant="t")
    assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
    assert error.message == "tenant 't' has 3 requests waiting, its limit is 2 beyond the free seats"
    assert error.retry_after_seconds is not None
    h.submit("other", [1], 4, tenant="u")


def test_those_who_wait_for_their_own_tenants_limit_do_not_fill_the_queue_for_others() -> None:
    own = {"t": TenantLimits(max_running=1)}
    h = Harness(limits(max_queued=20, max_num_seqs=8, tenants=own), num_blocks=512)
    for tenant, num_taken in (("t", 1 + 20), ("u", 7 + 20)):
        for i in range(2):
            h.submit(f"{tenant}{i}", [1, 2], 50, tenant=tenant, ignore_eos=True)
        h.step()
        for i in range(2, num_taken):
            h.submit(f"{tenant}{i}", [1, 2], 50, tenant=tenant, ignore_eos=True)
        error = refusal(h, "one more", 1, 4, tenant=tenant)
        assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
        assert (
            "20 requests are waiting whose tenants are at limits of their own, as 't' is; the most is 20"
            if tenant == "t"
            else "25 requests are waiting, the limit is 20"  # five of them for the free seats
        ) in error.message
    h.step()
    assert len(h.core.waiting) == 40


def test_while_its_limit_holds_a_tenant_stays_counted_apart_though_one_of_it_has_ended() -> None:
    h = Harness(limits(max_queued=4, max_num_seqs=2, tenants={"t": TenantLimits(max_running=1)}))
    h.submit("first", [1], 2, tenant="t", ignore_eos=True)
    h.submit("second", [1], 2, tenant="t", ignore_eos=True)
    h.step()
    for i in range(3):
        h.submit(f"t{i}", [1], 9, tenant="t", ignore_eos=True)
    h.core.cancel(h.sequences.pop("first").request.key, FinishReason.ABORT, h.now)
    for i in range(4 + 2):  # both seats are free
        h.submit(f"u{i}", [1], 9, tenant="u", ignore_eos=True)
    h.run_to_end()
    h.check_outputs()


def test_however_many_tenants_come_to_their_limits_the_whole_queue_is_bounded() -> None:
    h = Harness(limits(max_queued=4, max_num_seqs=40, default_tenant=TenantLimits(max_running=1)))
    most = 0
    for number in range(30):
        for i in range(50):
            with contextlib.suppress(RefusedError):
                h.submit(f"r{number}.{i}", [1], 50, tenant=f"t{number}", ignore_eos=True)
        most = max(most, len(h.core.waiting) - h.core.num_free_seats)
        h.step()
    assert most <= 2 * 4


def choice(h: Harness, name: str, index: int, **fields: object) -> Request:
    return dataclasses.replace(
        h.request(f"{name}#{index}", [1], 4, **fields), request_id=name, sample_index=index
    )


@pytest.mark.parametrize(
    "of_limits",
    [
        limits(max_num_seqs=1, max_queued=1),
        limits(max_num_seqs=1, max_queued_tokens=1),
        limits(tenants={"t": TenantLimits(max_queued=1, max_running=1)}),
        limits(tenants={"t": TenantLimits(max_queued_tokens=1)}),
        limits(tenants={"t": TenantLimits(requests_per_minute=1)}),
        limits(tenants={"t": TenantLimits(tokens_per_minute=5)}),
    ],
)
def test_the_choices_of_a_request_are_taken_or_refused_as_a_whole(of_limits: Limits) -> None:
    h = Harness(of_limits)
    for index in range(4):
        h.core.submit(choice(h, "whole", index, tenant="t"), now=h.now)
    assert len(h.core.waiting) == 4
    for index in range(4):
        with pytest.raises(RefusedError):
            h.core.submit(choice(h, "later", index, tenant="t"), now=h.now)
    for index in range(4):
        h.core.submit(choice(h, "whole", index, tenant="t"), now=h.now)  # attaches to what lives
    h.run_to_end()


def test_a_tenants_waiting_tokens_are_bounded() -> None:
    h = of_tenant(max_queued_tokens=10)
    h.submit("r", [1] * 8, 4, tenant="t")
    error = refusal(h, "more", 3, 4, tenant="t")
    assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
    assert error.message == "tenant 't' would have 11 tokens waiting, its limit is 10"


def test_b95_one_that_is_larger_than_its_tenants_whole_queue_is_refused_for_good() -> None:
    h = of_tenant(max_queued_tokens=10)
    error = refusal(h, "large", 11, 4, tenant="t")
    assert error.status_code is StatusCode.INVALID_ARGUMENT
    assert "the prompt has 11 tokens" in error.message
    assert "the whole queue of tenant 't' at most 10" in error.message
    assert error.retry_after_seconds is None


def test_a_tenants_requests_are_bounded_in_a_minute_and_the_hint_is_exact() -> None:
    h = of_tenant(requests_per_minute=2)
    for i in range(2):
        h.submit(f"r{i}", [1], 4, tenant="t")
    error = refusal(h, "third", 1, 4, tenant="t")
    assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
    assert error.message == "tenant 't' is at its rate limit of 2 requests a minute; try again in 30.0 s"
    assert error.retry_after_seconds == 30.0
    h.now += 30.0
    h.submit("third", [1], 4, tenant="t")


def test_a_tenants_tokens_are_bounded_in_a_minute_by_prompt_and_max_tokens() -> None:
    h = of_tenant(tokens_per_minute=60)
    h.submit("r", [1] * 20, 30, tenant="t")
    error = refusal(h, "more", 6, 9, tenant="t")
    assert "rate limit of 60 tokens a minute; try again in 5.0 s" in error.message
    assert error.retry_after_seconds == 5.0
    h.submit("small", [1] * 6, 4, tenant="t")


def test_who_is_refused_is_charged_nothing() -> None:
    h = of_tenant(requests_per_minute=3, tokens_per_minute=100)
    tenant = h.core.tenants.get("t", 0.0)
    h.submit("r", [1] * 10, 50, tenant="t")
    assert tenant.requests is not None
    assert tenant.tokens is not None
    levels = (tenant.requests.level, tenant.tokens.level)
    refusal(h, "too many tokens", 10, 50, tenant="t")
    assert (tenant.requests.level, tenant.tokens.level) == levels


# --- deadlines ------------------------------------------------------------------------------------------


def warm(policy: Policy = Policy.DEADLINE) -> Harness:
    """A scheduler that knows its steps: 100 µs and 10 µs a token."""
    h = Harness(limits(policy=policy, window=1), max_num_batched_tokens=256, max_seq_len=1024, num_blocks=512)
    for i in range(10):  # too few ends to expect anything but the limit
        h.submit(f"warm{i}", [i] * (3 + i), 2, ignore_eos=True)
        h.run_to_end()
    return h


def test_hopeless_work_is_refused_early_with_the_times() -> None:
    h = warm()
    # Even with a single token of output its prompt of 200 tokens of 10 µs and a step of 110 µs are too much.
    error = refusal(h, "hopeless", 200, 40, deadline=h.now + 0.001, ignore_eos=True)
    assert error.status_code is StatusCode.RESOURCE_EXHAUSTED
    assert "the deadline is in 0.001 s" in error.message
    assert "takes at least 0.002 s" in error.message
    assert error.retry_after_seconds is not None
    # How long an answer will be is not known: one that may end at once is not refused.
    h.submit("may be short", list(range(10)), 100, deadline=h.now + 0.005, ignore_eos=True)


def with_steps_of(h: Harness, base_us: int, per_token_us: int) -> None:
    """Computes until nobody is left; its steps take so long."""
    while not h.core.is_idle:
        while h.plan() is not None:
            pass
        if h.executor.plans:
            h.executor.step_us = base_us + per_token_us * sum(h.executor.plans[0].num_tokens)
            h.now += h.executor.step_us / 1e6
            h.result()


def test_a_long_prompt_is_not_refused_for_what_like_steps_took() -> None:
    """One long answer alone: 1,600 steps of one token each say nothing of what 1,000 tokens cost."""
    h = Harness(
        limits(policy=Policy.DEADLINE),
        num_blocks=512,
        block_size=8,
        max_num_batched_tokens=512,
        max_seq_len=2048,
    )
    h.submit("before", list(range(64)), 4, ignore_eos=True)
    with_steps_of(h, 20_000, 20)
    h.submit("answer", [7], 1_600, ignore_eos=True)
    with_steps_of(h, 20_000, 20)
    start = h.now
    h.submit("prompt", [i % 89 for i in range(1000)], 4, deadline=h.now + 0.2, ignore_eos=True)
    with_steps_of(h, 20_000, 20)
    assert h.now - start < 0.2
    clock = h.core.executors[EXECUTOR].clock
    clock.sent(h.core.executors[EXECUTOR].step_time.predict_us(512) / 1e6, h.now)  # type: ignore[operator]
    assert clock.late_at(0.0) == pytest.approx(h.now + 20 * 0.03, rel=0.1), "a hang is seen in time"


def test_what_a_prediction_refuses_is_tried_once_a_minute_and_so_put_right() -> None:
    """The only wide step so far was slow by chance."""
    h = Harness(
        limits(policy=Policy.DEADLINE, prefix_caching=False), num_blocks=512, block_size=8, max_seq_len=1024
    )
    h.submit("slow", list(range(64)), 4, ignore_eos=True)
    with_steps_of(h, 20_000, 100_000)
    refusal(h, "long", 900, 4, deadline=h.now + 10.0, ignore_eos=True)
    num_refused = num_taken = 0
    for i in range(80):
        h.now += 9.0
        try:
            h.submit(f"long{i}", list(range(900)), 4, deadline=h.now + 10.0, ignore_eos=True)
            num_taken += 1
        except RefusedError:
            num_refused += 1
        with_steps_of(h, 20_000, 20)
    assert 6 <= num_refused < 40
    assert num_taken > 40


def test_what_may_be_cached_is_not_counted_in_the_least_that_a_request_takes() -> None:
    h = warm()
    document = [i % 90 for i in range(200)]
    h.submit("first", document, 2, ignore_eos=True)
    h.run_to_end()
    seq = h.submit("next", [*document, 1], 2, ignore_eos=True, deadline=h.now + 0.001)
    h.run_to_end()
    assert seq.num_cached_tokens == 200
    error = refusal(h, "another's", 200, 2, deadline=h.now + 0.001, cache_salt="another's")
    assert "takes at least 0.002 s" in error.message


def test_the_beginning_that_is_just_being_computed_may_be_found_when_its_turn_comes() -> None:
    h = warm()
    h.submit("leader", list(range(200)), 2, ignore_eos=True)
    h.plan()
    h.submit("follower", list(range(200)), 2, deadline=h.now + 0.001, ignore_eos=True)
    h.run_to_end()
    h.check_outputs()


def test_the_door_makes_one_name_however_long_the_prompt() -> None:
    h = warm()
    document = [i % 90 for i in range(900)]
    h.submit("first", document, 2, ignore_eos=True)
    h.run_to_end()
    seq = Sequence.of(h.request("next", document, 2), h.core.tenants.get("", h.now), NO_IDS, 0)
    assert h.core.slack.least_service(seq) < 0.001
    assert len(seq.block_keys) == 1


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.FAIR])
def test_only_the_deadline_policy_judges_what_is_hopeless(policy: Policy) -> None:
    h = warm(policy)
    h.submit("hopeless", list(range(10)), 100, deadline=h.now + 0.005, ignore_eos=True)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_deadline_in_the_past_ends_at_once_with_that_reason(policy: Policy) -> None:
    h = warm(policy)
    for deadline in (h.now, h.now - 5.0):
        seq = h.submit(f"past{deadline}", [1], 4, deadline=deadline)
        assert seq.finish is not None
        assert seq.finish.reason is FinishReason.DEADLINE
        assert seq.finish.status_code is StatusCode.DEADLINE_EXCEEDED


# --- what was accepted before ---------------------------------------------------------------------------


def test_a_resubmission_is_counted_everywhere_and_refused_nowhere_for_load() -> None:
    h = Harness(
        limits(
            policy=Policy.DEADLINE,
            max_num_seqs=1,
            max_queued=1,
            max_queued_tokens=4,
            tenants={
                "t": TenantLimits(
                    max_queued=1, max_queued_tokens=4, requests_per_minute=1, tokens_per_minute=8
                )
            },
        )
    )
    h.submit("first", [1, 2], 5, tenant="t", ignore_eos=True)
    refusal(h, "new", 2, 5, tenant="t")
    for i in range(20):
        h.submit(f"again{i}", [1, 2, 3], 5, tenant="t", accepted_before=True, ignore_eos=True)
    assert len(h.core.waiting) == 21
    assert h.core.waiting.num_tokens == 2 + 20 * 3
    tenant = h.core.tenants.get("t", 0.0)
    assert tenant.requests is not None
    assert tenant.tokens is not None
    assert tenant.requests.level == 1 - 21
    assert tenant.tokens.level == 8 - 7 - 20 * 8
    h.run_to_end()
    h.check_outputs()


def test_a_resubmission_keeps_its_place_by_the_time_it_has_waited() -> None:
    h = Harness(limits(window=1, max_num_seqs=1))
    h.now = 100.0
    h.submit("runs", [1], 3, ignore_eos=True)
    h.step()
    h.submit("new", [2], 3, ignore_eos=True)
    h.submit("old", [3], 3, ignore_eos=True, accepted_before=True, arrival=90.0)
    order: list[str] = []
    while not h.core.is_idle:
        h.step()
        order += [name for name in h.members() if name not in order]
    assert order == ["runs", "old", "new"]


def test_who_asks_again_and_is_refused_leaves_the_one_that_lives_as_it_is() -> None:
    h = Harness(limits(window=1), num_blocks=64, block_size=4)
    first = h.submit("r", [1, 2, 3], 20, ignore_eos=True)
    h.step()
    h.core.attach("small", 7, dataclasses.replace(h.capacity, num_blocks=2), h.now)
    again = h.request("r", [1, 2, 3], 20, ignore_eos=True)
    with pytest.raises(RefusedError, match="at most 8"):
        h.core.submit(again, array("I", [96, 96, 96]), now=h.now)  # ids that are not its own
    assert first.state is State.RUNNING
    h.core.detach("small", h.now)
    h.run_to_end()
    h.check_outputs()


def test_who_asks_again_takes_the_place_of_the_one_that_lives_however_many_wait() -> None:
    h = Harness(limits(max_queued=1), max_num_seqs=1)
    h.submit("runs", [1], 20, ignore_eos=True)
    h.step()
    first = h.submit("r", [1, 2, 3], 20, ignore_eos=True)
    again = h.core.submit(h.request("r", [1, 2, 3], 20, ignore_eos=True), array("I", [7]), now=h.now)
    assert again is not first
    assert first.finish is not None
    assert first.finish.reason is FinishReason.ABORT
    assert list(h.core.waiting) == [again]


def test_after_a_quiet_time_nobody_is_told_to_wait_as_long_as_it_was_quiet() -> None:
    h = Harness(limits(max_queued=4), num_blocks=512, block_size=4, max_num_seqs=4)
    for i in range(30):  # one each 10 s, done at once
        h.submit(f"quiet{i}", [1, 2], 4, ignore_eos=True)
        h.run_to_end()
        h.now += 10.0
    for i in range(8):
        h.submit(f"burst{i}", [3, i], 4, ignore_eos=True)
    error = refusal(h, "one too many", 2, 4)
    assert error.retry_after_seconds == 1.0, "nothing is known yet of how fast a queue drains"
    while len(h.core.waiting) > 1:
        h.step()
        h.now += 0.01
    assert h.core.drain_rate.predicted_wait(8, h.now) < 0.5
