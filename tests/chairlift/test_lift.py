import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from chairlift.lift import RATE_SECONDS, End, Frame, Gauges, Kind, Lift
from chairlift.seats import Member, Step


def frame(
    step_id: int, *seq_ids: int, left: dict[int, End] | None = None, chunks: set[int] | None = None
) -> Frame:
    left = left or {}
    members = tuple(Member(seq_id, f"r{seq_id}") for seq_id in seq_ids)
    step = Step(step_id, members, frozenset(left))
    return Frame(step, frozenset(chunks or ()), len(seq_ids), left, Gauges(num_running=len(seq_ids)))


def lift_of(*frames: Frame) -> Lift:
    lift = Lift()
    for one in frames:
        lift.take(one, now=0.0)
    return lift


def kinds(lift: Lift, seat: int) -> list[Kind | None]:
    cells = [column[seat] if seat < len(column) else None for column in lift.columns]
    return [cell.kind if cell else None for cell in cells]


def test_a_column_tells_who_computes_prompt_who_decodes_and_who_sits_still() -> None:
    lift = lift_of(frame(1, 1, 2, chunks={2}), frame(2, 2, chunks={2}), frame(3, 1, 2))
    assert kinds(lift, 0) == [Kind.DECODE, Kind.STILL, Kind.DECODE]
    assert kinds(lift, 1) == [Kind.PREFILL, Kind.PREFILL, Kind.DECODE]
    entered = [cell.entered for cell in lift.columns[0] if cell]
    assert entered == [True, True]
    assert not any(cell.entered for column in list(lift.columns)[1:] for cell in column if cell)


def test_an_end_that_is_told_later_is_marked_where_the_rider_last_moved() -> None:
    lift = lift_of(frame(1, 1, 2), frame(2, 2), frame(3, 2, 3, left={1: End.FINISHED}))
    first, second, third = (column[0] for column in lift.columns)
    assert first is not None
    assert first.end is End.FINISHED
    assert second is None, "a seat whose rider had ended is empty, not still"
    assert third is not None
    assert (third.rider.name, third.entered, third.end) == ("r3", True, None)


def test_a_fresh_epoch_begins_with_empty_seats_whatever_its_numbers() -> None:
    lift = lift_of(frame(8, 1, 2), frame(1, 2))
    assert [member.name for member in lift.seated if member] == ["r2"]
    newest = lift.columns[-1][0]
    assert newest is not None
    assert newest.entered


def test_who_gets_on_elsewhere_sits_here_no_more() -> None:
    lost, found = lift_of(frame(1, 1, 2), frame(2, 1, 2)), lift_of(frame(7, 2))
    lost.lose(found.boarded)
    assert [member and member.name for member in lost.seated] == ["r1", None]
    newest = lost.columns[-1][1]
    assert newest is not None
    assert newest.end is End.PREEMPTED
    assert (lost.num_riding, found.num_riding) == (1, 1)


def test_the_rate_counts_what_was_sampled_lately() -> None:
    lift = Lift()
    lift.take(frame(1, 1, 2), now=10.0)
    lift.take(frame(2, 1, 2), now=11.5)
    assert lift.tokens_per_second(11.5) == 4 / RATE_SECONDS
    assert lift.tokens_per_second(12.5) == 2 / RATE_SECONDS
    assert lift.tokens_per_second(99.0) == 0


def test_the_rate_counts_right_guesses_but_not_those_of_before() -> None:
    lift = Lift()
    for step_id, accepted in ((5, 100), (6, 107), (1, 3)):  # the last one is of a fresh epoch
        told = frame(step_id, 1)
        told = dataclasses.replace(
            told, gauges=dataclasses.replace(told.gauges, num_accepted_tokens=accepted)
        )
        lift.take(told, now=10.0)
    assert lift.tokens_per_second(10.0) == (3 + 7 + 3) / RATE_SECONDS


@given(st.lists(st.sets(st.integers(1, 6), max_size=4), max_size=25))
def test_every_column_has_exactly_the_steps_members_in_seats_that_nobody_shares(
    batches: list[set[int]],
) -> None:
    lift, before = Lift(), set[int]()
    for step_id, batch in enumerate(batches, start=1):
        left = dict.fromkeys(before - batch, End.FINISHED)
        lift.take(frame(step_id, *sorted(batch), left=left), now=0.0)
        riders = [cell.rider.seq_id for cell in lift.columns[-1] if cell]
        assert sorted(riders) == sorted(batch)
        before = batch
