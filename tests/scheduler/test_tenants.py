import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.tenants import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Contest,
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


def test_a_lone_sequence_grows_beyond_its_tenants_blocks_and_two_do_not() -> None:
    tenant = Tenant("a", TenantLimits(max_blocks=10), num_running=1)
    tenant.meter(10, 0.0)
    assert tenant.may_grow, "it could never end"
    tenant.num_running = 2
    assert not tenant.may_grow
    tenant.meter(-1, 1.0)
    assert tenant.may_grow


def test_without_limits_nothing_is_bounded() -> None:
    tenant = Tenant("a", TenantLimits(), num_running=10_000)
    assert tenant.may_run_one_more
    assert tenant.may_hold(1_000_000)
    assert tenant.may_grow
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
    now=st.floats(0, 1e7),
)
def test_who_waits_as_long_as_told_is_let_through(
    per_minute: float, amount: float, debt: float, now: float
) -> None:
    limiter = RateLimiter(per_minute)
    limiter.take(debt, now)
    wait = limiter.seconds_until(amount, now)
    assert limiter.seconds_until(amount, now + wait) == 0.0
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


def served(tenants: Tenants, contest: Contest, name: str, tokens: int) -> Tenant:
    """A tenant that waits, and has been served so much since it does."""
    tenant = tenants.get(name, 0.0)
    contest.enter(tenant)
    tenant.num_waiting += 1
    tenant.num_input_tokens += tokens
    return tenant


def ceases(contest: Contest, tenant: Tenant) -> None:
    tenant.num_waiting = 0
    contest.leave(tenant)


def test_a_newcomer_starts_beside_the_least_served_of_those_who_compete() -> None:
    tenants, contest = Tenants(), Contest()
    served(tenants, contest, "a", 500)
    served(tenants, contest, "b", 300)
    ceases(contest, served(tenants, contest, "idle", 0))
    new = served(tenants, contest, "new", 0)
    assert new.service_in(contest) == 500, "a started at 0, b beside a, at 500"


def test_idle_time_is_not_banked() -> None:
    tenants, contest = Tenants(), Contest()
    away = served(tenants, contest, "away", 100)
    ceases(contest, away)
    served(tenants, contest, "busy", 5000)
    contest.enter(away)
    assert away.service_in(contest) == 5100, "busy started beside the last one served, at 100"


def test_who_runs_and_has_nothing_waiting_does_not_compete() -> None:
    """Else a small load that is always under way would save the rest of its share for a burst."""
    tenants, contest = Tenants(), Contest()
    small = served(tenants, contest, "small", 100)
    small.num_running = 1
    ceases(contest, small)
    busy = served(tenants, contest, "busy", 5000)
    small.num_output_tokens += 10
    contest.enter(small)
    assert small.service_in(contest) == busy.service_in(contest) == 5100


def test_who_comes_back_having_had_more_keeps_it() -> None:
    tenants, contest = Tenants(), Contest()
    served(tenants, contest, "busy", 100)
    away = served(tenants, contest, "away", 900)
    before = away.service_in(contest)
    ceases(contest, away)
    contest.enter(away)
    assert away.service_in(contest) == before


def test_who_still_waits_is_not_lifted_by_one_more_request() -> None:
    tenants, contest = Tenants(), Contest()
    slow = served(tenants, contest, "slow", 10)
    served(tenants, contest, "fast", 1000)
    before = slow.service_in(contest)
    contest.enter(slow)
    assert slow.service_in(contest) == before


def test_when_nobody_competed_everybody_starts_where_the_last_one_stands() -> None:
    tenants, contest = Tenants(), Contest()
    ceases(contest, served(tenants, contest, "b", 50))
    last = served(tenants, contest, "a", 700)
    ceases(contest, last)
    last.num_output_tokens += 5  # it goes on running
    assert served(tenants, contest, "new", 0).service_in(contest) == 760
    assert served(tenants, contest, "b", 0).service_in(contest) == 760


def test_what_was_served_in_another_class_is_not_held_against_a_first_request() -> None:
    tenants, better, worse = Tenants(), Contest(), Contest()
    busy = served(tenants, better, "busy", 10_000)
    starved = served(tenants, worse, "starved", 10)
    worse.enter(busy)
    assert busy.service_in(worse) == starved.service_in(worse) == 10
    assert served(tenants, better, "new", 0).service_in(better) == 10_000, "who starves holds nobody back"


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    events=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("elsd"), st.integers(1, 50))),
)
def test_service_and_floor_never_fall_and_a_lift_reaches_just_the_floor(
    weights: list[float], events: list[tuple[int, str, int]]
) -> None:
    """Tenants begin to compete, are served, cease, are dropped and come anew: against a plain search."""
    tenants = Tenants({f"t{i}": TenantLimits(weight=weight) for i, weight in enumerate(weights)})
    contest, competing, last = Contest(), set[Tenant](), None
    for number, event, tokens in events:
        tenant = tenants.get(f"t{number}", 0.0)
        before = {item: item.service_in(contest) for item in tenants if contest in item.lifted}
        before.setdefault(tenant, 0.0)
        floor = contest.floor
        if competing:
            assert floor == min(item.service_in(contest) for item in competing)
        else:
            assert floor == (0.0 if last is None else last.service_in(contest))
        if event == "e":
            is_first = contest not in tenant.lifted
            contest.enter(tenant)
            if tenant in competing:
                assert tenant.service_in(contest) == before[tenant]
            else:
                assert tenant.service_in(contest) == (floor if is_first else max(before[tenant], floor))
            competing.add(tenant)
        elif event == "s":
            tenant.num_output_tokens += tokens
        elif event == "l" and tenant in competing:
            contest.leave(tenant)
            competing.remove(tenant)
            last = tenant
        elif event == "d" and tenant not in competing:
            del tenants._by_name[tenant.name]
        assert all(item.service_in(contest) >= service for item, service in before.items())
        assert contest.floor >= floor
        assert len(contest._by_service) <= len(contest._competing) + 64 + len(contest._competing)


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
    busy = served(tenants, Contest(), "busy", 10)
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
    contest = Contest()
    busy = served(tenants, contest, "busy", 100)
    spent, metered = (tenants.get(name, 0.0) for name in ("spent", "metered"))
    greedy = served(tenants, contest, "greedy", 0)
    assert spent.requests is not None
    spent.requests.take(60, 0.0)
    greedy.num_input_tokens = 1000
    ceases(contest, greedy)
    metered.num_input_tokens, metered.num_output_tokens = 7, 2
    metered.meter(3, 0.0)
    metered.meter(-3, 5.0)
    for i in range(100):
        tenants.get(f"made up {i}", 30.0)
    assert [tenants.get(name, 30.0) for name in ("busy", "spent", "greedy")] == [busy, spent, greedy]
    assert tenants.get("metered", 30.0) is not metered
    assert tenants.dropped_block_seconds == 15.0
    assert (tenants.num_input_tokens, tenants.num_output_tokens) == (100 + 1000 + 7, 2)
    assert len(list(tenants)) <= 20 + 2


def test_names_do_not_pile_up_though_each_was_served_more_than_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a lasting overload all newcomers begin at the same floor, and whoever was served stands above it."""
    monkeypatch.setattr(Tenants, "MAX_UNKNOWN", 50)
    tenants, contest = Tenants(), Contest()
    waits = [served(tenants, contest, f"first {i}", 0) for i in range(5)]
    for i in range(2000):
        tenant = tenants.get(f"made up {i}", float(i))
        contest.enter(tenant)
        tenant.num_waiting = 1
        waits.append(tenant)
        served_now = waits.pop(0)
        ceases(contest, served_now)
        served_now.num_input_tokens += 4
        served_now.meter(0, float(i))
        assert len(list(tenants)) <= 2 * (60 + 5 + 1) + 50
    assert len(contest._listed) <= 64 + 2 * 6
