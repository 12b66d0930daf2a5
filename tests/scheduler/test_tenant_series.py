"""Names for tenants: at most so many for ever, counts that never go back, sums that are those of all."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from scheduler.tenant_series import MAX_NAMED, OTHER, TenantSeries
from scheduler.tenants import Tenant, TenantLimits, Tenants


def served(tenants: Iterable[Tenant]) -> int:
    return sum(tenant.num_output_tokens for tenant in tenants)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), max_size=40), min_size=1, max_size=12
    )
)
def test_counts_never_go_back_and_add_up(rounds: list[list[tuple[int, int]]]) -> None:
    series = TenantSeries(lambda tenant: tenant.num_output_tokens)
    tenants = Tenants({"t7": TenantLimits()})
    before: dict[str, int] = {}
    for round_ in rounds:
        for number, num_tokens in round_:
            tenants.get(f"t{number}", 0.0).num_output_tokens += num_tokens
        told = series.read(tenants, tenants.num_output_tokens, tenants.configured)
        assert sum(told.values()) == served(tenants)
        assert all(told[name] >= count for name, count in before.items())
        assert set(before) <= set(told)
        assert len(told) <= MAX_NAMED + 1
        before = told


def test_a_tenant_that_was_dropped_and_came_back_goes_on_counting() -> None:
    series = TenantSeries(lambda tenant: tenant.num_output_tokens)
    tenants = Tenants()
    tenants.get("a", 0.0).num_output_tokens += 10
    assert series.read(tenants, tenants.num_output_tokens, frozenset()) == {"a": 10, OTHER: 0}
    tenants._drop_idle(now=1e6)
    tenants.get("a", 0.0).num_output_tokens += 4
    assert series.read(tenants, tenants.num_output_tokens, frozenset()) == {"a": 14, OTHER: 0}


def test_those_of_the_file_come_before_whoever_was_served_most() -> None:
    series = TenantSeries(lambda tenant: tenant.num_output_tokens)
    tenants = Tenants({"paying": TenantLimits()})
    for number in range(100):
        tenants.get(f"t{number}", 0.0).num_output_tokens += 100 + number
    tenants.get("paying", 0.0).num_output_tokens += 1
    told = series.read(tenants, tenants.num_output_tokens, tenants.configured)
    assert told["paying"] == 1
    assert "t99" in told
    assert "t0" not in told
