"""The first of all, by entries that become stale without a word."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.sequence import Sequence
from scheduler.tenant_heaps import TenantHeaps
from scheduler.tenants import Tenant, TenantLimits
from tests.scheduler.sequences import waiting

# A tenant's sequence with a key is put in anew, one goes, or a tenant is left out or comes back.
DEEDS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 2), st.integers(0, 5), st.just(0)),
    st.tuples(st.sampled_from(["leave out", "recall"]), st.integers(0, 2), st.just(0), st.just(0)),
)


@given(deeds=st.lists(DEEDS, max_size=60))
def test_the_first_is_the_best_of_the_valid(deeds: list[tuple[str, int, int, int]]) -> None:
    tenants = [Tenant(name, TenantLimits()) for name in "abc"]
    members = {(t, i): waiting(f"{t}{i}", tenant=tenants[t]) for t in range(3) for i in range(6)}
    entry_of: dict[Sequence, int] = {}
    keys: dict[Sequence, tuple[float, ...]] = {}
    aside: set[Tenant] = set()
    heaps = TenantHeaps(entry_of, aside, lambda _, key: key)
    for number, (deed, tenant, index, value) in enumerate(deeds, 1):
        seq = members[tenant, index]
        if deed == "push":
            entry_of[seq], keys[seq] = number, (float(value), float(number))
            heaps.push(keys[seq], number, seq, len(entry_of))
        elif deed == "drop":
            entry_of.pop(seq, None)
        elif deed == "leave out":
            aside.add(seq.tenant)
        else:
            aside.discard(seq.tenant)
            heaps.recall(seq.tenant)
        served = [item for item in entry_of if item.tenant not in aside]
        assert heaps.first() is min(served, key=keys.__getitem__, default=None)
        if served:
            assert heaps.best_rank == min(keys[item] for item in served)


def test_no_more_entries_are_stale_than_valid() -> None:
    entry_of: dict[Sequence, int] = {}
    heaps = TenantHeaps(entry_of, (), lambda _, key: key)
    seq = waiting()
    for number in range(1000):
        entry_of[seq] = number
        heaps.push((1.0, float(number)), number, seq, 1)
    assert sum(map(len, heaps._heaps.values())) <= 2
    assert len(heaps._offers) <= 2
