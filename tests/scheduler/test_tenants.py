import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.tenants import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    RateLimiter,
    Tenant,
    TenantLimits,
    Tenants,
)

# --- limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TenantLimits)])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_or_weight_that_is_not_more_than_0_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}: it must be more than 0"):
        TenantLimits(**{name: value})  # type: ignore[arg-type]


def test_seats_and_blocks_are_bounded_each_by_its_own_limit() -> None:
    tenant = Tenant("a", TenantLimits(max_running=2, max_blocks=10))
    assert tenant.may_run_one_more
    assert tenant.may_hold(11), "a first sequence may always, else it would wait for ever"
    tenant.num_running = 1
    tenant.meter(4, 0.0)
    assert tenant.may_hold(6)
    assert not tenant.may_hold(7)
    tenant.num_running = 2
    assert not tenant.may_run_one_more


def test_without_limits_nothing_is_bounded() -> None:
    tenant = Tenant("a", TenantLimits(), num_running=10_000)
    assert tenant.may_run_one_more
    assert tenant.may_hold(1_000_000)
    assert tenant.requests is None
    assert tenant.tokens is None


# --- rates ----------------------------------------------------------------------------------------------


@given(
    per_minute=st.floats(0.5, 100_000),
    asked=st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 1000)), max_size=60),
)
def test_never_more_is_let_through_than_a_full_bucket_and_what_has_flowed_in(
    per_minute: float, asked: list[tuple[float, float]]
) -> None:
    limiter = RateLimiter(per_minute)
    now, taken = 50.0, 0.0
    for gap, amount in asked:
        now += gap
        amount = min(amount, per_minute)  # noqa: PLW2901  (larger ones leave a debt: another law)
        if limiter.seconds_until(amount, now) == 0:
            limiter.take(amount, now)
            taken += amount
        assert taken <= per_minute * (1 + (now - 50.0) / 60.0) * (1 + 1e-9)


@given(
    per_minute=st.floats(0.5, 100_000),
    amount=st.floats(0.1, 200_000),
    debt=st.floats(0, 10_000),
    now=st.floats(0, 1e6),
)
def test_who_waits_as_long_as_told_is_let_through(
    per_minute: float, amount: float, debt: float, now: float
) -> None:
    limiter = RateLimiter(per_minute)
    limiter.take(debt, now)
    wait = limiter.seconds_until(amount, now)
    assert limiter.seconds_until(amount, now + wait) == pytest.approx(0.0, abs=1e-6)
    if wait > 0.01:
        assert limiter.seconds_until(amount, now + wait * 0.9) > 0


def test_one_that_asks_for_more_than_a_minutes_worth_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    limiter = RateLimiter(60.0)
    assert limiter.seconds_until(600, 0.0) == 0
    limiter.take(600, 0.0)
    assert limiter.seconds_until(1, 0.0) == pytest.approx(541.0)
    assert limiter.seconds_until(600, 599.0) == pytest.approx(1.0)


def test_a_bucket_holds_one_minutes_worth_however_long_nobody_came() -> None:
    limiter = RateLimiter(60.0)
    limiter.take(60, 0.0)
    limiter.seconds_until(1, 1e6)
    assert limiter.level == 60.0


# --- service --------------------------------------------------------------------------------------------


def test_service_is_weighted_tokens_for_each_unit_of_weight() -> None:
    tenant = Tenant("a", TenantLimits(weight=4.0), num_input_tokens=100, num_output_tokens=10)
    assert tenant.service == (100 * INPUT_WEIGHT + 10 * OUTPUT_WEIGHT) / 4.0


def served(tenants: Tenants, name: str, tokens: int) -> Tenant:
    """A tenant with work, that has been served so much."""
    tenant = tenants.get(name, 0.0)
    tenants.arrived(tenant)
    tenant.num_waiting += 1
    tenant.num_input_tokens += tokens
    return tenant


def test_a_newcomer_starts_beside_the_least_served_of_those_with_work() -> None:
    tenants = Tenants()
    served(tenants, "a", 500)
    served(tenants, "b", 300)
    idle = served(tenants, "idle", 0)
    idle.num_waiting = 0
    assert tenants.get("new", 0.0).service == 500, "a started at 0, b beside a, at 500"


def test_idle_time_is_not_banked() -> None:
    tenants = Tenants()
    away = served(tenants, "away", 100)
    away.num_waiting = 0
    tenants.left(away)
    served(tenants, "busy", 5000)
    tenants.arrived(away)
    assert away.service == 5100, "busy started beside the last one served, at 100"


def test_who_comes_back_having_had_more_keeps_it() -> None:
    tenants = Tenants()
    served(tenants, "busy", 100)
    away = served(tenants, "away", 900)
    before = away.service
    away.num_waiting = 0
    tenants.left(away)
    tenants.arrived(away)
    assert away.service == before


def test_who_still_has_work_is_not_lifted_by_one_more_request() -> None:
    tenants = Tenants()
    slow = served(tenants, "slow", 10)
    served(tenants, "fast", 1000)
    before = slow.service
    tenants.arrived(slow)
    assert slow.service == before


def test_when_all_were_idle_everybody_starts_where_the_last_one_stood() -> None:
    tenants = Tenants()
    for name, tokens in (("a", 700), ("b", 50)):
        tenant = served(tenants, name, tokens)
        tenant.num_waiting = 0
        tenants.left(tenant)
    last = max(item.service for item in tenants)
    assert tenants.get("new", 0.0).service == last
    b = tenants.get("b", 0.0)
    tenants.arrived(b)
    assert b.service == last


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("aslw"), st.integers(1, 50))))
def test_service_never_falls_and_a_lift_reaches_no_higher_than_somebody_with_work(
    events: list[tuple[str, str, int]],
) -> None:
    """Arrive, be served, leave, wait: over and over."""
    tenants = Tenants()
    for name, event, tokens in events:
        tenant = tenants.get(name, 0.0)
        before = {item.name: item.service for item in tenants}
        busy = [item.service for item in tenants if item.has_work]
        if event == "a":
            tenants.arrived(tenant)
            tenant.num_waiting += 1
            if busy:
                assert tenant.service <= max(before[name], min(busy))
                assert tenant.service >= min(busy)
        elif event == "s" and tenant.has_work:
            tenant.num_output_tokens += tokens
        elif event == "l" and tenant.num_waiting:
            tenant.num_waiting -= 1
            tenants.left(tenant)
        assert all(item.service >= before[item.name] for item in tenants)


# --- metering -------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(-5, 5)), max_size=50))
def test_block_seconds_add_up_exactly(changes: list[tuple[int, int]]) -> None:
    """Whole seconds, so that sums are exact."""
    tenant = Tenant("a", TenantLimits())
    now, held, expected = 0, 0, 0
    for gap, change in changes:
        expected += held * gap
        now += gap
        tenant.meter(change, float(now))
        held += change
        assert tenant.num_blocks == held
        assert tenant.block_seconds == expected
    tenant.meter(0, now + 7.0)
    assert tenant.block_seconds == expected + 7 * held


# --- how many are remembered ----------------------------------------------------------------------------


def test_names_that_clients_make_up_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenants, "MAX_UNKNOWN", 100)
    tenants = Tenants({"known": TenantLimits(weight=2.0)}, TenantLimits(max_running=3))
    known = tenants.get("known", 0.0)
    busy = served(tenants, "busy", 10)
    for i in range(1000):
        assert tenants.get(f"made up {i}", 0.0).limits.max_running == 3
    assert len(list(tenants)) <= 103
    assert tenants.get("known", 0.0) is known
    assert tenants.get("busy", 0.0) is busy
    assert known.limits.weight == 2.0


def test_nobody_gains_by_being_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rate nor what one had more than others begins anew; what was metered stays in the sum."""
    monkeypatch.setattr(Tenants, "MAX_UNKNOWN", 10)
    tenants = Tenants(default=TenantLimits(requests_per_minute=60))
    busy = served(tenants, "busy", 100)
    spent, greedy, metered = (tenants.get(name, 0.0) for name in ("spent", "greedy", "metered"))
    assert spent.requests is not None
    spent.requests.take(60, 0.0)
    greedy.num_input_tokens = 1000
    metered.meter(3, 0.0)
    metered.meter(-3, 5.0)
    for i in range(100):
        tenants.get(f"made up {i}", 30.0)
    assert [tenants.get(name, 30.0) for name in ("busy", "spent", "greedy")] == [busy, spent, greedy]
    assert tenants.dropped_block_seconds == 15.0
    assert len(list(tenants)) <= 20 + 2


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("asl"), st.integers(1, 50)), max_size=200))
def test_where_a_newcomer_starts_is_found_without_asking_everybody(
    events: list[tuple[int, str, int]],
) -> None:
    """Though nobody is asked one by one."""
    tenants = Tenants()
    for number, event, tokens in events:
        tenant = tenants.get(f"t{number}", 0.0)
        if event == "a":
            tenants.arrived(tenant)
            tenant.num_waiting += 1
        elif event == "s" and tenant.has_work:
            tenant.num_output_tokens += tokens
        elif event == "l" and tenant.num_waiting:
            tenant.num_waiting -= 1
            tenants.left(tenant)
        busy = [item.service for item in tenants if item.has_work]
        assert tenants._floor() == (min(busy) if busy else tenants._last_service)
