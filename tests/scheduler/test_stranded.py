"""Who waits for an executor that is not there: not for ever, in nobody's way, and on as soon as one is."""

from dataclasses import replace

import pytest

from scheduler import audit
from scheduler.door import RefusedError
from scheduler.explain import Reason
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State, StatusCode
from tests.rig.checking_executor import capacity
from tests.scheduler.fleet import Fleet

BIG = {"max_seq_len": 300, "num_blocks": 200}
SMALL = {"max_seq_len": 40, "num_blocks": 200}
ABLE = frozenset({"constraints"})


def patient(timeout_seconds: float) -> Limits:
    return Limits(watermark=0.0, admission=Admission.OPTIMISTIC, recovery_timeout_seconds=timeout_seconds)


def fleet_with_long_one(timeout_seconds: float = 60.0) -> tuple[Fleet, Sequence]:
    """It ran at the big executor, which is lost; a small one is there."""
    fleet = Fleet(patient(timeout_seconds))
    fleet.attach("big", **BIG)
    long = fleet.submit("long", [1] * 20, 100)
    fleet.plan("big")
    fleet.attach("small", **SMALL)
    fleet.now = 10.0
    assert fleet.lose("big", is_crash=True) == []
    return fleet, long


def test_what_is_too_long_for_all_who_are_left_waits_and_holds_nobody_back() -> None:
    fleet, long = fleet_with_long_one()
    short = fleet.submit("short", [3, 4], 5)
    fleet.plan("small")
    assert (long.state, short.executor_id) == (State.WAITING, "small")
    fleet.attach("big", **BIG)
    fleet.run()
    fleet.check_outputs()


def test_one_that_is_asked_for_again_with_another_deadline_stays_out_of_its_turn() -> None:
    fleet, long = fleet_with_long_one()
    again = replace(long.request, deadline=fleet.now + 1000.0, accepted_before=True)
    assert fleet.core.submit(again, now=fleet.now) is long
    audit.check(fleet.core)
    assert fleet.core.waiting.peek(fleet.now) is None


def test_it_is_given_up_when_nobody_who_could_comes_back_in_time() -> None:
    fleet, long = fleet_with_long_one()
    assert fleet.core.next_timer == 70.0
    assert fleet.core.expire(69.9) == []
    assert fleet.core.expire(70.0) == [long]
    assert long.finish is not None
    assert long.finish.status_code is StatusCode.UNAVAILABLE
    assert "holds 120 tokens, prompt and max_tokens together within 60 seconds" in long.finish.message
    assert fleet.core.next_timer is None or fleet.core.next_timer > 70.0


def test_without_patience_it_ends_at_once() -> None:
    fleet = Fleet(patient(0.0))
    fleet.attach("big", **BIG)
    long = fleet.submit("long", [1] * 20, 100)
    fleet.attach("small", **SMALL)
    assert fleet.lose("big") == [long]
    assert not fleet.core.waiting


def test_what_waited_for_any_executor_waits_on_when_the_first_to_come_is_too_small() -> None:
    fleet = Fleet()
    long = fleet.submit("long", [1] * 20, 100, accepted_before=True)
    fleet.now = 5.0
    fleet.attach("small", **SMALL)
    assert fleet.core.next_timer == 60.0
    assert fleet.plan("small") == []
    fleet.attach("big", **BIG)
    fleet.run()
    assert long.state is State.FINISHED
    fleet.check_outputs()


def test_who_waits_for_the_first_executor_of_all_does_not_wait_for_ever() -> None:
    fleet = Fleet()
    fleet.now = 5.0
    seq = fleet.submit("promised", [1, 2], 4, accepted_before=True)
    assert fleet.core.next_timer == 65.0
    assert fleet.core.expire(65.0) == [seq]
    assert seq.finish is not None
    assert seq.finish.status_code is StatusCode.UNAVAILABLE


def test_one_that_is_too_small_does_not_start_the_time_anew() -> None:
    fleet = Fleet()
    fleet.attach("big", **BIG)
    long = fleet.submit("long", [1] * 20, 100)
    fleet.now = 10.0
    fleet.lose("big")
    fleet.now = 60.0
    fleet.attach("small", **SMALL)
    assert fleet.core.expire(69.9) == []
    assert fleet.core.expire(70.0) == [long]


def test_when_the_last_executor_goes_too_it_still_ends_in_its_time() -> None:
    fleet, long = fleet_with_long_one()
    short = fleet.submit("short", [3, 4], 5)
    fleet.now = 30.0
    fleet.lose("small")
    assert fleet.core.expire(70.0) == [long]
    assert long.finish is not None
    assert "no executor came back" in long.finish.message
    assert fleet.core.expire(90.0) == [short]
    assert short.finish is not None
    assert "no executor came back" in short.finish.message


def test_one_that_is_given_up_while_it_waits_leaves_nothing_behind() -> None:
    fleet, long = fleet_with_long_one()
    fleet.core.cancel(long.request.key, FinishReason.ABORT, now=fleet.now)
    assert not fleet.core.stranded.holds(long)
    fleet.attach("big", **BIG)
    assert fleet.plan("big") == []


def test_what_its_client_was_promised_is_taken_in_though_the_least_of_the_executors_is_too_small() -> None:
    fleet = Fleet()
    fleet.attach("big", **BIG)
    fleet.attach("small", **SMALL)
    with pytest.raises(RefusedError, match="at most 40"):
        fleet.submit("new", [1] * 20, 100)
    promised = fleet.submit("promised", [2] * 20, 100, accepted_before=True)
    fleet.plan("small")
    fleet.plan("big")
    assert promised.executor_id == "big"


def test_an_ability_counts_as_a_length_does() -> None:
    fleet = Fleet()
    fleet.core.attach("plain", 91, capacity(), fleet.now)
    seq = fleet.submit("held", [1, 2], 3, needs=ABLE, accepted_before=True)
    assert fleet.core.schedule("plain", fleet.now) is None
    fleet.core.attach("able", 92, replace(capacity(), features=ABLE), fleet.now)
    assert fleet.core.schedule("plain", fleet.now) is None
    assert fleet.core.schedule("able", fleet.now) is not None
    assert seq.executor_id == "able"
    with pytest.raises(RefusedError, match="the abilities \\['constraints'\\]") as refused:
        fleet.submit("new", [1, 2], 3, needs=ABLE)  # not everybody has it
    assert refused.value.status_code is StatusCode.UNIMPLEMENTED


def test_a_time_line_says_so() -> None:
    fleet, long = fleet_with_long_one()
    fleet.now = 14.0
    (entries,) = fleet.core.explain("long", fleet.now).values()
    assert (entries[-1].reason, entries[-1].duration) == (Reason.QUEUED_FOR_EXECUTOR, 4.0)
    assert entries[-1].detail == "no executor that is here can ever compute it"
    assert long.state is State.WAITING
