"""Who leads, in logical time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.lease import Claim, Lease, Record, Role

SECONDS = 5.0


def leading(lease: Lease, record: Record | None = None, now: float = 0.0) -> Record:
    """Has `lease` claim a free file; returns what it wrote."""
    claim = lease.look(record, now, is_free=True)
    assert claim is not None
    lease.claimed(claim)
    return claim.record


def test_a_new_file_is_claimed_at_once_at_term_1() -> None:
    lease = Lease("a", SECONDS)
    assert leading(lease) == Record(1, "a", 1)
    assert (lease.role, lease.term) == (Role.LEADING, 1)


def test_a_lease_that_was_given_up_is_claimed_at_once_at_the_next_term() -> None:
    lease = Lease("b", SECONDS)
    assert lease.look(Record(7, "a", 100), 0.0, is_free=False) is None
    assert lease.leader == "a"
    assert leading(lease, Record(7, "a", 101), 0.25).term == 8


def test_nobody_else_leads_while_the_file_names_nobody_or_oneself() -> None:
    """A scheduler that was started again finds its own name there, and does not wait for itself to lead."""
    lease = Lease("a", SECONDS)
    assert lease.leader == ""
    assert lease.look(Record(7, "a", 100), 0.0, is_free=False) is None
    assert lease.leader == ""


def test_a_leader_that_beats_is_left_alone_for_ever() -> None:
    lease = Lease("b", SECONDS)
    assert all(lease.look(Record(7, "a", beat), float(beat), is_free=False) is None for beat in range(1000))


def test_a_beat_that_stands_still_for_a_lease_is_usurped_and_not_before() -> None:
    lease = Lease("b", SECONDS)
    frozen = Record(7, "a", 3)
    assert lease.look(frozen, 1_000.0, is_free=False) is None
    assert lease.look(frozen, 1_000.0 + SECONDS - 0.01, is_free=False) is None
    claim = lease.look(frozen, 1_000.0 + SECONDS, is_free=False)
    assert claim == Claim(Record(8, "b", 1), usurps=True)


def test_a_file_that_its_leader_has_not_written_yet_is_not_usurped_at_the_first_look() -> None:
    lease = Lease("b", SECONDS)
    assert lease.look(None, 1_000.0, is_free=False) is None


def test_a_leader_whose_file_is_anothers_steps_down_and_waits_a_lease_before_it_claims() -> None:
    lease = Lease("a", SECONDS)
    leading(lease)
    assert lease.beat(1.0, is_mine=True) == Record(1, "a", 2)
    assert lease.beat(20.0, is_mine=False) is None
    assert lease.role is Role.STANDING_BY
    given_up = Record(2, "b", 9)
    assert lease.look(given_up, 20.0 + SECONDS - 0.01, is_free=True) is None
    assert leading(lease, given_up, 20.0 + SECONDS).term == 3


def test_a_fenced_leader_never_claims_in_reply_and_then_above_the_term_it_was_told() -> None:
    lease = Lease("a", SECONDS)
    mine = leading(lease)
    lease.fenced(41, 2.0)
    assert lease.role is Role.STANDING_BY
    assert lease.look(mine, 2.0, is_free=True) is None
    assert leading(lease, mine, 2.0 + SECONDS).term == 42


def test_one_that_stands_by_and_is_fenced_again_heeds_the_term_and_waits_no_longer() -> None:
    """An executor after the other tells the leader that was: each time a higher term, never a new wait."""
    lease = Lease("a", SECONDS)
    mine = leading(lease)
    lease.fenced(41, 2.0)
    lease.fenced(43, 4.0)
    lease.fenced(42, 4.0)
    assert leading(lease, mine, 2.0 + SECONDS).term == 44


def test_one_that_leaves_leads_until_another_one_does() -> None:
    lease = Lease("a", SECONDS)
    mine = leading(lease)
    lease.hand_over()
    assert not lease.seen(mine, 1.0)
    assert lease.role is Role.LEAVING
    assert lease.seen(Record(2, "b", 1), 2.0)
    assert lease.role is Role.STANDING_BY


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_term_is_led_at_twice_whatever_freezes_dies_or_is_fenced(data: st.DataObject) -> None:
    """Three schedulers and a file; each takes its turn when hypothesis says so, or sleeps."""
    leases = [Lease(name, SECONDS) for name in "abc"]
    record: Record | None = None
    owner: Lease | None = None  # who has the file at the path locked
    led: list[int] = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.25, 1.0, SECONDS]))
        lease = data.draw(st.sampled_from(leases))
        match data.draw(st.sampled_from(["turn", "turn", "turn", "die", "fence", "leave"])), lease.role:
            case "die", _:
                leases[leases.index(lease)] = Lease("again", SECONDS)
                owner = None if owner is lease else owner
            case "fence", Role.LEADING | Role.LEAVING:
                lease.fenced(data.draw(st.integers(1, lease.term + 3)), now)
                owner = None if owner is lease else owner
            case "leave", Role.LEADING:
                lease.hand_over()
                owner = None if owner is lease else owner
            case _, Role.LEADING:
                is_mine = owner is lease
                written = lease.beat(now, is_mine=is_mine)
                assert (written is not None) == is_mine
                record = written or record
            case _, Role.LEAVING:
                lease.seen(record, now)
            case _, Role.STANDING_BY:
                claim = lease.look(record, now, is_free=owner is None)
                if claim is not None:
                    record, owner = claim.record, lease
                    lease.claimed(claim)
                    led.append(lease.term)
    assert led == sorted(set(led))
