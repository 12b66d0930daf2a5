"""Several executors under one core: where work goes, how it comes back, who is to blame for a death."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import entrance
from scheduler.executor_state import ExecutorState
from scheduler.plan import BatchPlan
from scheduler.policy import Admission, Limits
from scheduler.recovery import recompute_budget
from scheduler.sequence import FinishReason, Sequence, State, StatusCode
from scheduler.suspects import MAX_EXCUSES
from tests.scheduler.fleet import Fleet


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 13 * salt) % 90 for i in range(length)]


# --- placement ----------------------------------------------------------------------------------------


def test_a_burst_is_shared_out_among_idle_executors() -> None:
    fleet = Fleet(Limits(watermark=0.0, window=1))
    fleet.attach("a")
    fleet.attach("b")
    for number in range(8):
        fleet.submit(f"r{number}", prompt(12, number), 5)
    fleet.plan("a")
    fleet.plan("b")
    assert [len(state.running) for state in fleet.core.executors.values()] == [4, 4]


def test_b105_a_request_goes_where_its_prefix_is_though_the_other_one_is_asked_first() -> None:
    fleet = Fleet()
    fleet.attach("a")
    fleet.attach("b")
    fleet.plan("b")
    first = fleet.submit("first", prompt(40), 3)
    fleet.plan("b")  # its turn came first: it has the request, and soon its prefix
    assert first.executor_id == "b"
    fleet.run()
    second = fleet.submit("second", [*prompt(40), 1, 2], 3)
    fleet.plan("a")
    assert second.state is State.WAITING
    fleet.plan("b")
    assert (second.executor_id, second.num_cached_tokens) == ("b", 40)


def test_an_idle_executor_takes_what_the_other_one_is_too_full_for() -> None:
    fleet = Fleet()
    fleet.attach("b", max_num_seqs=2)
    fleet.submit("first", prompt(40), 3)
    fleet.run()
    for number in range(2):
        fleet.submit(f"long{number}", prompt(4, 1 + number), 90)
    fleet.plan("b")
    seq = fleet.submit("second", [*prompt(40), 1, 2], 3)  # its prefix is there
    fleet.attach("a")
    fleet.plan("a")
    assert seq.executor_id == "a"


def test_an_idle_executor_does_not_wait_for_one_that_stands_still() -> None:
    fleet = Fleet()
    fleet.attach("a")
    fleet.attach("b")
    fleet.submit("first", prompt(60), 3)
    fleet.plan("b")
    fleet.run()
    fleet.submit("busy", prompt(4, 9), 90)
    fleet.plan("b")
    fleet.frozen.add("b")
    seq = fleet.submit("second", [*prompt(60), 1, 2], 3)
    fleet.plan("a")
    state = fleet.core.executors["a"]
    looks = 0
    while seq.state is State.WAITING:
        assert state.look_again_at is not None, "it would sleep for ever"
        fleet.now = max(state.look_again_at, fleet.now + 0.001)
        fleet.plan("a")
        looks += 1
        assert looks < 50
    assert seq.executor_id == "a"


def test_what_is_too_long_for_one_goes_to_the_other_and_holds_nobody_back() -> None:
    fleet = Fleet()
    fleet.attach("big", max_seq_len=256)
    long = fleet.submit("long", prompt(100), 30)
    fleet.attach("small", max_seq_len=64)
    short = fleet.submit("short", prompt(8, 1), 4)
    fleet.plan("small")
    assert (long.state, short.executor_id) == (State.WAITING, "small")
    fleet.plan("big")
    assert long.executor_id == "big"
    fleet.run()
    fleet.check_outputs()


@pytest.mark.parametrize("num_long", [1, 40, 2000])
def test_an_executor_does_not_see_those_it_can_never_compute_however_many_wait(
    num_long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    fleet.attach("big", max_num_seqs=1, num_blocks=256, max_seq_len=1024)
    for i in range(num_long):
        fleet.submit(f"long{i}", prompt(100, i), 200)
    fleet.plan("big")
    fleet.attach("small", max_num_seqs=8, num_blocks=32, max_seq_len=128)
    shorts = [fleet.submit(f"short{i}", [i, 1, 2], 4) for i in range(8)]
    asked: list[Sequence] = []
    find_place = fleet.core.find_place

    def watched(state: ExecutorState, seq: Sequence, *, follows: bool) -> entrance.Found:
        asked.append(seq)
        return find_place(state, seq, follows=follows)

    monkeypatch.setattr(fleet.core, "find_place", watched)
    fleet.plan_once("small")
    assert {seq.executor_id for seq in shorts} == {"small"}
    assert asked == shorts


def test_those_it_can_never_compute_are_seen_again_where_they_can_be() -> None:
    fleet = Fleet()
    fleet.attach("big", max_num_seqs=2, num_blocks=256, max_seq_len=1024)
    for i in range(6):
        fleet.submit(f"long{i}", prompt(60, i), 80)
    fleet.attach("small", max_num_seqs=2, num_blocks=32, max_seq_len=128)
    for i in range(6):
        fleet.submit(f"short{i}", prompt(9, i), 10)
    for _ in range(5):
        fleet.turn()
    fleet.lose("big")
    fleet.attach("big", max_num_seqs=2, num_blocks=256, max_seq_len=1024)
    fleet.run()
    fleet.check_outputs()


def test_who_can_be_computed_at_one_executor_alone_keeps_its_place_there() -> None:
    fleet = Fleet()
    fleet.attach("big", num_blocks=256, max_seq_len=1024)
    order = [fleet.submit(f"r{i}", prompt(9, i), 4 if i % 2 else 200) for i in range(6)]
    fleet.attach("small", num_blocks=32, max_seq_len=128)
    fleet.core.executors["small"].is_away = True
    fleet.plan_once("big")
    assert list(fleet.core.executors["big"].running.values()) == order


def test_one_executor_is_never_left_anything() -> None:
    fleet = Fleet()
    fleet.attach("a")
    fleet.attach("gone")
    fleet.core.executors["gone"].is_away = True
    seq = fleet.submit("r", prompt(12), 5)
    fleet.plan("a")
    assert seq.executor_id == "a"


def test_what_is_still_to_be_named_on_one_executor_is_not_when_its_sequence_runs_on_another() -> None:
    """Though it has the same number there: numbers are counted for each executor."""
    fleet = Fleet(Limits(window=1, watermark=0.0, admission=Admission.OPTIMISTIC))
    sizes = {"num_blocks": 2000, "block_size": 4, "max_num_seqs": 100, "max_num_batched_tokens": 1000}
    fleet.attach("a", **sizes)
    for number in range(80):
        fleet.submit(f"r{number}", [number % 97, 1, 2], 30)
    state = fleet.core.executors["a"]
    while not state.to_register:
        fleet.plan("a")
        fleet.done_at["a"].pop(0)
        fleet.core.update("a", fleet.executors["a"].run(), fleet.now)
    fleet.attach("b", **sizes)
    state.is_draining, state.leaves_at = True, fleet.now
    fleet.plan("a")
    fleet.plan("b")
    assert any(seq.executor_id == "b" and seq.seq_id == seq_id for seq, seq_id, _ in state.to_register)
    fleet.run()
    fleet.check_outputs()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shapes=st.lists(
        st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 3, 4, 8]),
                "num_blocks": st.sampled_from([40, 64]),
                "max_num_seqs": st.integers(1, 6),
                "max_num_batched_tokens": st.sampled_from([3, 16, 64]),
            }
        ),
        min_size=2,
        max_size=4,
    ),
    admission=st.sampled_from(list(Admission)),
)
def test_executors_of_any_shape_work_together_come_and_go_and_every_output_is_right(
    seed: int, shapes: list[dict[str, int]], admission: Admission
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(Limits(watermark=0.0, admission=admission), seed)
    for number, shape in enumerate(shapes):
        fleet.attach(f"e{number}", **shape)
    longest = fleet.core.max_total_tokens
    for number in range(rng.randint(4, 14)):
        length = rng.randint(1, min(24, longest - 1))
        shared = prompt(length, rng.choice([0, 0, number]))
        fleet.submit(f"r{number}", shared, rng.randint(1, min(12, longest - length)))
        for _ in range(rng.randint(0, 3)):
            fleet.turn()
        if rng.random() < 0.15:
            name = rng.choice(sorted(fleet.executors))
            fleet.lose(name)
            fleet.attach(name, **shapes[int(name[1:])])
    fleet.run()
    fleet.check_outputs()
    for state in fleet.core.executors.values():
        assert state.blocks.num_free == state.blocks.num_blocks
    num_idle = sum(not state.running for state in fleet.core.executors.values())
    assert num_idle == len(shapes)


# --- recovery -----------------------------------------------------------------------------------------


def test_recovery_leaves_every_second_seat_and_half_of_the_tokens_to_others() -> None:
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.OPTIMISTIC, window=1))
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=16, num_blocks=256)
    lost = [fleet.submit(f"lost{number}", prompt(24, number), 20) for number in range(6)]
    while not all(seq.has_progressed and seq.num_output_tokens for seq in lost):
        fleet.turn()
    newcomers = [fleet.submit(f"new{number}", prompt(24, 20 + number), 3) for number in range(6)]
    fleet.lose("a")
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=16, num_blocks=256)
    seats: list[bool] = []
    while any(seq.state is State.WAITING for seq in [*lost, *newcomers]):
        waited = any(
            seq.state is State.WAITING or seq.num_computable_tokens > seq.num_computed_tokens + 1
            for seq in newcomers
        )
        plan = fleet.plan_once("a")
        if plan is not None:
            recomputed = sum(
                count
                for seq, count, samples in zip(plan.rows, plan.num_tokens, plan.num_samples, strict=True)
                if seq in lost and (count > 1 or not samples)
            )
            assert recomputed <= 8 or not waited
            seats += [
                next(seq for seq in [*lost, *newcomers] if seq.seq_id == new.seq_id) in lost
                for new in plan.admitted
            ]
        fleet.turn()
    assert seats[0]  # the lost come first
    while_others_wait = seats[: len(seats) - seats[::-1].index(False)]
    assert not any(one and other for one, other in pairwise(while_others_wait))
    fleet.run()
    fleet.check_outputs()


def test_recovery_has_everything_while_nobody_else_waits() -> None:
    fleet = Fleet()
    fleet.attach("a", max_num_batched_tokens=16)
    seq = fleet.submit("r", prompt(40), 9)
    while not seq.num_output_tokens:
        fleet.turn()
    fleet.lose("a")
    fleet.attach("a", max_num_batched_tokens=16)
    assert fleet.plan("a")[0].num_tokens == [16]


@pytest.mark.parametrize(("priority", "count"), [(5, 16), (1, 16), (0, 8), (-1, 0)])
def test_recovery_shares_its_tokens_with_those_as_important_alone(priority: int, count: int) -> None:
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.OPTIMISTIC, window=1))
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=16)
    lost = fleet.submit("lost", prompt(24, 1), 9)
    while not lost.num_output_tokens:
        fleet.turn()
    fleet.lose("a")
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=16)
    for number in range(2):
        fleet.submit(f"r{number}", prompt(24, 2 + number), 3, priority=priority)
    (plan,) = fleet.plan("a")
    assert dict(zip(plan.rows, plan.num_tokens, strict=True)).get(lost, 0) == count
    fleet.run()
    fleet.check_outputs()


def lost_and_seated(num_seats: int) -> tuple[Fleet, Sequence, BatchPlan]:
    """One that was lost has the first seat, one as important has come since; the second step's plan."""
    fleet = Fleet(Limits(watermark=0.0, admission=Admission.OPTIMISTIC, window=1))
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=num_seats)
    lost = fleet.submit("lost", prompt(40, 1), 9)
    while not lost.num_output_tokens:
        fleet.turn()
    fleet.lose("a")
    fleet.attach("a", max_num_batched_tokens=16, max_num_seqs=num_seats)
    fleet.submit("other", prompt(40, 2), 3)
    fleet.turn()
    (plan,) = fleet.plan("a")
    return fleet, lost, plan


def test_recovery_leaves_half_of_the_tokens_to_a_prompt_that_is_under_way() -> None:
    fleet, lost, plan = lost_and_seated(num_seats=2)
    assert not fleet.core.waiting
    assert (plan.rows[0], plan.num_tokens) == (lost, [8, 8])
    fleet.run()
    fleet.check_outputs()


def test_recovery_leaves_nothing_to_who_could_have_no_seat() -> None:
    fleet, lost, plan = lost_and_seated(num_seats=1)
    assert (plan.rows, plan.num_tokens) == ([lost], [16])
    fleet.run()
    fleet.check_outputs()


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 1), (2, 1), (3, 1), (16, 8)])
def test_recovery_gets_half_of_what_decoding_leaves_and_never_nothing(num_tokens: int, most: int) -> None:
    assert recompute_budget(num_tokens) == most


def test_a_more_important_one_that_was_lost_is_not_held_up_by_the_pace() -> None:
    fleet = Fleet()
    fleet.attach("a", max_num_seqs=2)
    lost = [fleet.submit(f"r{number}", prompt(8, number), 9, priority=-1) for number in range(2)]
    fleet.turn()
    fleet.submit("new", prompt(8, 7), 3)
    fleet.lose("a")
    fleet.attach("a", max_num_seqs=2)
    fleet.plan("a")
    assert all(seq.executor_id == "a" for seq in lost)


# --- nobody left --------------------------------------------------------------------------------------


def test_b92_when_no_executor_comes_back_everything_ends_when_the_time_is_over() -> None:
    fleet = Fleet(Limits(watermark=0.0, recovery_timeout_seconds=60.0))
    fleet.attach("a")
    seq = fleet.submit("r", prompt(8), 90)
    for _ in range(6):
        fleet.turn()
    lost_at = fleet.now
    assert fleet.lose("a") == []
    assert fleet.core.next_timer == lost_at + 60.0
    assert fleet.core.expire(lost_at + 59.9) == []
    assert fleet.core.expire(lost_at + 60.0) == [seq]
    assert seq.finish is not None
    assert seq.finish.status_code is StatusCode.UNAVAILABLE
    assert fleet.core.next_timer is not None  # only to forget the result


def test_who_is_told_to_try_again_may_do_so_at_once() -> None:
    """Though nobody has acknowledged the end of the first try, and its record is there."""
    fleet = Fleet(Limits(watermark=0.0, recovery_timeout_seconds=1.0))
    fleet.attach("a")
    first = fleet.submit("r", prompt(8), 9)
    fleet.turn()
    fleet.lose("a")
    fleet.now += 1.0
    assert fleet.core.expire(fleet.now) == [first]
    fleet.attach("a")
    assert fleet.submit("r", prompt(8), 9) is not first
    fleet.sequences.remove(first)
    fleet.run()
    fleet.check_outputs()


def test_b92_an_executor_in_time_stops_the_clock() -> None:
    fleet = Fleet(Limits(watermark=0.0, recovery_timeout_seconds=1.0))
    fleet.attach("a")
    fleet.submit("r", prompt(8), 9)
    fleet.turn()
    fleet.lose("a")
    fleet.now += 0.9
    fleet.attach("a")
    assert fleet.core.expire(fleet.now + 100) == []
    fleet.run()
    fleet.check_outputs()


# --- leaving ------------------------------------------------------------------------------------------


def test_a_draining_executor_keeps_what_ends_in_time_and_moves_the_rest_with_nothing_in_flight() -> None:
    fleet = Fleet()
    fleet.attach("a", num_blocks=256)
    short, long = fleet.submit("short", prompt(8), 12), fleet.submit("long", prompt(8, 1), 200)
    for _ in range(6):
        fleet.turn()
    fleet.attach("b", num_blocks=256)
    state = fleet.core.executors["a"]
    state.is_draining, state.leaves_at = True, fleet.now + 0.01
    assert fleet.plan("a") == [] or state.session.num_unanswered
    while state.session.num_unanswered:
        fleet.done_at["a"].pop(0)
        fleet.core.update("a", fleet.executors["a"].run(), fleet.now)
    state.is_draining, state.leaves_at = True, fleet.now + 0.01
    plans = fleet.plan("a")
    assert plans[0].released_seq_ids
    assert (short.executor_id, long.state) == ("a", State.WAITING)
    fleet.plan("b")
    assert long.executor_id == "b"
    fleet.run()
    fleet.check_outputs()


def test_where_there_is_nobody_to_move_to_all_stay() -> None:
    fleet = Fleet()
    fleet.attach("a")
    seq = fleet.submit("r", prompt(8), 60)
    for _ in range(6):
        fleet.turn()
    state = fleet.core.executors["a"]
    state.is_draining, state.leaves_at = True, fleet.now
    assert fleet.plan("a") or state.session.num_unanswered
    assert seq.executor_id == "a"


# --- poison -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_seqs=st.integers(1, 20),
    num_executors=st.integers(1, 3),
    window=st.sampled_from([1, 2]),
    chunk=st.sampled_from([8, 64]),
)
def test_one_poisonous_request_is_the_only_one_that_ends_in_error(
    seed: int, num_seqs: int, num_executors: int, window: int, chunk: int
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(Limits(watermark=0.0, window=window), seed)
    for number in range(num_executors):
        fleet.attach(f"e{number}", max_num_seqs=24, num_blocks=512, max_num_batched_tokens=chunk)
    poison = rng.randrange(num_seqs)
    lengths = [rng.randint(1, 20) for _ in range(num_seqs)]
    place = lengths[poison] - 1 + rng.choice([0, 0, 3]) if rng.random() < 0.8 else 0
    is_deadly_everywhere_then = rng.random() < 0.2
    num_excuses = MAX_EXCUSES if is_deadly_everywhere_then else 0

    def dies(plan: BatchPlan) -> bool:
        for seq, begin, end in fleet.ranges(plan):
            if seq.request.request_id == f"r{poison}":
                if is_deadly_everywhere_then and fleet.num_deaths:
                    return True
                if begin <= place < end:
                    return True
        return False

    fleet.dies_of = dies
    for number in range(num_seqs):
        fleet.submit(f"r{number}", prompt(lengths[number], number), rng.randint(6, 12))
        if rng.random() < 0.3:
            fleet.turn()
    fleet.run()
    fleet.check_outputs(but={f"r{poison}"})
    for number, seq in enumerate(fleet.sequences):
        assert seq.finish is not None
        assert (seq.finish.reason is FinishReason.ERROR) == (number == poison)
    guilty = fleet.sequences[poison]
    assert guilty.finish is not None
    assert guilty.finish.status_code is StatusCode.INTERNAL
    assert f"r{poison}" in guilty.finish.message
    assert fleet.num_deaths <= math.log2(num_seqs) + 2 + num_excuses


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([1, 2]), chunk=st.sampled_from([8, 64]))
def test_one_alone_whose_executor_is_killed_elsewhere_than_before_is_not_to_blame(
    seed: int, window: int, chunk: int
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(Limits(watermark=0.0, window=window), seed)
    fleet.attach("e", max_num_batched_tokens=chunk)
    seq = fleet.submit("r", prompt(rng.randint(2, 40)), 30)
    first_at = rng.randint(1, len(seq.token_ids) + 20)

    def dies(plan: BatchPlan) -> bool:
        ends = [end for _, _, end in fleet.ranges(plan)]
        if fleet.num_deaths == 0:
            return any(end >= first_at for end in ends)
        is_elsewhere = all(
            end <= seq.num_proven_tokens or begin >= seq.num_tokens_at_crash
            for _, begin, end in fleet.ranges(plan)
        )
        return is_elsewhere and fleet.num_deaths <= MAX_EXCUSES and rng.random() < 0.7

    fleet.dies_of = dies
    fleet.run()
    fleet.check_outputs()
    assert not fleet.core.inquiry


def test_while_some_are_on_trial_newcomers_are_served_by_another_executor() -> None:
    fleet = Fleet()
    fleet.attach("a")
    fleet.attach("b")
    fleet.dies_of = lambda plan: any(seq.request.request_id == "poison" for seq in plan.rows)
    fleet.submit("poison", prompt(8), 9)
    for number in range(4):
        fleet.submit(f"r{number}", prompt(8, 1 + number), 30)
    while fleet.num_deaths < 2:
        fleet.turn()
    newcomer = fleet.submit("new", prompt(8, 50), 5)
    fleet.run()
    fleet.check_outputs(but={"poison"})
    assert newcomer.finish is not None


@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_a_suspect_that_is_given_up_does_not_keep_the_others_waiting(how: str) -> None:
    fleet = Fleet()
    fleet.attach("a")
    fleet.dies_of = lambda plan: fleet.num_deaths < 2
    for number in range(4):
        fleet.submit(
            f"r{number}", prompt(8, number), 9, deadline=5.0 if how == "expire" and number == 3 else None
        )
    while fleet.num_deaths < 2:
        fleet.turn()
    if how == "cancel":
        fleet.core.cancel(fleet.sequences[3].request.key, FinishReason.ABORT, fleet.now)
    else:
        fleet.now = 5.0
        fleet.core.expire(fleet.now)
    assert fleet.sequences[3].state is State.FINISHED
    del fleet.sequences[3]
    fleet.run()
    fleet.check_outputs()
    assert not fleet.core.inquiry
