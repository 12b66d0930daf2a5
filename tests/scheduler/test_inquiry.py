"""Where suspects are tried when executors differ in size: where they can be, and in nobody's way."""

from dataclasses import replace
from typing import NoReturn

import pytest

from scheduler import audit
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.inquiry import name_of
from scheduler.policy import Admission, Limits
from scheduler.sequence import FinishReason, Sequence, State
from tests.scheduler.fleet import Fleet

BIG = {"num_blocks": 200, "max_num_seqs": 16, "max_seq_len": 300}
SMALL = BIG | {"max_seq_len": 40}


def answer(fleet: Fleet, name: str) -> None:
    fleet.now += 0.001
    fleet.done_at[name].pop(0)
    fleet.core.update(name, fleet.executors[name].run(), fleet.now)


def fleet_with_two_suspects() -> tuple[Fleet, list[Sequence]]:
    """Two long ones have met two crashes; both big executors run others, and a small one is idle."""
    fleet = Fleet()
    fleet.attach("big1", **BIG)
    fleet.attach("big2", **BIG)
    for number in range(4):
        fleet.submit(f"w{number}", [60 + number] * 4, 250)
    fleet.plan("big2")
    answer(fleet, "big2")
    suspects = [fleet.submit(f"r{number}", [number] * 20, 100) for number in range(2)]
    fleet.plan("big1")
    fleet.attach("small", **SMALL)
    for _ in range(2):
        fleet.plan("big1")
        assert {seq.executor_id for seq in suspects} == {"big1"}
        fleet.lose("big1", is_crash=True)
        fleet.attach("big1", **BIG)
    assert fleet.core.inquiry.suspects.group
    return fleet, suspects


def test_an_executor_that_is_too_small_for_the_suspects_is_not_their_host() -> None:
    fleet, suspects = fleet_with_two_suspects()
    short = fleet.submit("short", [3, 4], 5)
    fleet.plan("small")
    assert short.executor_id == "small"
    fleet.plan("big1")
    assert any(seq.executor_id == "big1" for seq in suspects)
    fleet.run()
    fleet.check_outputs()


def test_a_suspect_that_is_asked_for_again_with_another_deadline_stays_out_of_its_turn() -> None:
    fleet, suspects = fleet_with_two_suspects()
    for seq in suspects:
        if fleet.core.inquiry.holds(seq):
            again = replace(seq.request, deadline=fleet.now + 1000.0)
            assert fleet.core.submit(again, now=fleet.now) is seq
            assert not fleet.core.waiting.is_parked_freely(seq)
            audit.check(fleet.core)
            break
    else:
        pytest.fail("nobody is searched")


def test_a_host_that_goes_away_gives_the_part_to_another() -> None:
    fleet, suspects = fleet_with_two_suspects()
    state = fleet.core.executors["big1"]
    assert fleet.core.inquiry.only_these(state, fleet.now) is not None
    state.is_draining, state.leaves_at = True, fleet.now + 3600
    fleet.attach("big3", **BIG)
    fleet.plan("big3")
    assert any(seq.executor_id == "big3" for seq in suspects)


def test_nobody_is_left_to_the_host_which_takes_no_newcomers() -> None:
    fleet, suspects = fleet_with_two_suspects()
    fleet.plan("big1")
    assert fleet.core.inquiry.is_host(fleet.core.executors["big1"])
    fleet.lose("small")
    answer(fleet, "big1")
    fleet.plan("big2")
    newcomer = fleet.submit("new", [3, 4] * 10, 30)
    answer(fleet, "big2")
    fleet.plan("big2")  # the host has nothing under way, and would begin with it sooner
    assert newcomer.executor_id == "big2"
    assert all(seq.state is not State.FINISHED for seq in suspects)


def test_a_suspect_that_nobody_here_can_hold_does_not_keep_those_who_are_searched_with_it() -> None:
    fleet = Fleet()
    fleet.attach("big1", **BIG)
    short, long = fleet.submit("short", [7] * 4, 9), fleet.submit("long", [8] * 20, 100)
    fleet.plan("big1")
    fleet.attach("small", **SMALL)
    for _ in range(2):
        fleet.plan("big1")
        fleet.lose("big1", is_crash=True)
        fleet.attach("big1", **BIG)
    fleet.lose("big1")
    assert fleet.core.inquiry.suspects.group == [("", "short")]
    for _ in range(6):
        if fleet.plan("small"):
            answer(fleet, "small")
    assert short.num_output_tokens
    assert long.state is State.WAITING
    fleet.attach("big1", **BIG)
    fleet.run()
    fleet.check_outputs()
    assert not fleet.core.inquiry


def test_a_suspect_that_ends_is_not_looked_for_among_all_requests() -> None:
    """A crash with hundreds of rows, and tens of thousands waiting: their ends must not cost the product."""

    class Untouched(dict[bytes, Sequence]):
        def values(self) -> NoReturn:
            raise AssertionError("all sequences were gone through")

    fleet, suspects = fleet_with_two_suspects()
    fleet.core.sequences = Untouched(fleet.core.sequences)
    for seq in suspects:
        assert fleet.core.inquiry.suspects.num_crashes(name_of(seq))
        fleet.core.cancel(seq.request.key, FinishReason.ABORT, fleet.now)
        assert not fleet.core.inquiry.suspects.num_crashes(name_of(seq))


def test_nobody_makes_way_where_suspects_alone_may_enter_once_there_is_room() -> None:
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.OPTIMISTIC))
    for name in ("e1", "e2"):
        fleet.attach(name, max_num_seqs=1)
        fleet.submit(f"runs at {name}", [4, 5], 200, priority=1)
        fleet.plan(name)
        answer(fleet, name)
        fleet.plan(name)
        answer(fleet, name)
    suspects = [fleet.submit(f"r{number}", [1, 2, number], 100, priority=1) for number in range(2)]
    for _ in range(2):
        fleet.attach("e3", max_num_seqs=2)
        fleet.plan("e3")
        assert {seq.executor_id for seq in suspects} == {"e3"}
        fleet.lose("e3", is_crash=True)
    assert fleet.core.inquiry.suspects.trial
    head = fleet.submit("head", [7, 8, 9], 10, priority=0)
    fleet.plan("e1")
    assert fleet.core.counters.displacements == 0
    assert head.state is State.WAITING
    fleet.attach("e3", max_num_seqs=2)
    fleet.run()
    fleet.check_outputs()


@pytest.mark.parametrize("has_newcomer", [True, False])
def test_a_suspect_has_all_tokens_of_the_host_which_nobody_else_may_enter(has_newcomer: bool) -> None:
    """Half of a step's tokens are left to a newcomer that waits, but not where it cannot enter."""
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.OPTIMISTIC, window=1))
    large = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_blocks": 200}
    fleet.attach("a", **large)
    suspects = [fleet.submit(f"r{number}", [number] * 40, 100) for number in range(2)]
    for _ in range(2):
        while not all(seq.num_computed_tokens > 40 for seq in suspects):
            fleet.turn()
        fleet.plan("a")
        fleet.lose("a", is_crash=True)
        fleet.attach("a", **large)
    fleet.lose("a")
    fleet.attach("a", **large | {"max_num_batched_tokens": 16})
    (on_trial,) = fleet.core.inquiry.suspects.trial
    if has_newcomer:
        fleet.submit("newcomer", [6] * 60, 9)
    for _ in range(2):
        (plan,) = fleet.plan("a")
        assert fleet.core.inquiry.is_host(fleet.core.executors["a"])
        assert ([name_of(seq) for seq in plan.rows], plan.num_tokens) == ([on_trial], [16])
        answer(fleet, "a")
    fleet.run()
    fleet.check_outputs()


def test_one_that_recovers_has_all_tokens_where_a_closed_batch_lets_nobody_enter() -> None:
    limits = Limits(watermark=0.0, admission=Admission.OPTIMISTIC, window=1)
    fleet = Fleet()
    fleet.core = SchedulerCore(limits, batching=Batching.REQUEST)
    shape = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_blocks": 200}
    fleet.attach("a", **shape)
    lost = fleet.submit("lost", [5] * 60, 9)
    while not lost.num_output_tokens:
        fleet.turn()
    fleet.lose("a")
    fleet.attach("a", **shape)
    fleet.plan("a")
    fleet.submit("other", [6] * 60, 9)
    answer(fleet, "a")
    (plan,) = fleet.plan("a")
    assert (plan.rows, plan.num_tokens) == ([lost], [16])
    fleet.run()
    fleet.check_outputs()
