from hypothesis import given
from hypothesis import strategies as st

from chairlift.seats import Member, Seats, Step, picture

LETTERS = {letter: letter for letter in "ABCDEFG"}


def step(step_id: int, names: str, left: str = "", *, padding: str = "", num_dropped: int = 0) -> Step:
    members = tuple(Member(ord(name), name.upper(), name in padding) for name in names)
    return Step(step_id, members, frozenset(map(ord, left)), num_dropped)


def test_the_seat_picture_each_newcomer_takes_the_seat_that_got_free_while_d_rides_on() -> None:
    steps = [
        step(1, "ABCD"),
        step(2, "ABCD"),
        step(3, "ABED", left="C"),
        step(4, "AFED", left="B"),
        step(5, "GFED", left="A"),
        step(6, "GFED"),
    ]
    rows = picture(steps, num_seats=4, letters=LETTERS)
    assert [str(row) for row in rows] == [
        "step     1   A B C D   A takes seat 1, B takes seat 2, C takes seat 3, D takes seat 4",
        "step     3   A B E D   C left, E takes seat 3",
        "step     4   A F E D   B left, F takes seat 2",
        "step     5   G F E D   A left, G takes seat 1",
    ]


def test_who_has_no_row_in_a_step_keeps_the_seat_until_told_to_have_left() -> None:
    seats = Seats(2)
    seats.take(step(1, "AB"))
    assert seats.take(step(2, "B")) is None
    row = seats.take(step(3, "BC", left="A"))
    assert row is not None
    assert row.seats == ("C", "B")
    assert (row.left, row.entered) == (("A",), (("C", 1),))


def test_who_comes_back_after_a_preemption_sits_down_again() -> None:
    seats = Seats(2)
    seats.take(step(1, "AB"))
    seats.take(step(2, "A", left="B"))
    returned = Step(3, (Member(ord("A"), "A"), Member(1000, "B")))
    row = seats.take(returned)
    assert row is not None
    assert row.seats == ("A", "B")


def test_after_a_gap_in_the_story_those_without_a_row_are_taken_to_have_left() -> None:
    seats = Seats(2)
    seats.take(step(1, "AB"))
    row = seats.take(step(9, "BC", num_dropped=7))
    assert row is not None
    assert row.seats == ("C", "B")


def test_padding_is_drawn_small_and_leaves_without_being_told() -> None:
    steps = [
        step(1, "AB"),
        Step(2, (Member(1, "A", padding=True), Member(ord("B"), "B")), frozenset({ord("A")})),
        step(3, "CD", left="B"),
    ]
    assert [" ".join(row.seats) for row in picture(steps, num_seats=2, letters=LETTERS)] == [
        "A B",
        "a B",
        "C D",
    ]


def test_a_batch_wider_than_its_picture_gets_more_seats() -> None:
    row = Seats(1).take(step(1, "AB"))
    assert row is not None
    assert row.seats == ("A", "B")


@given(st.lists(st.sets(st.sampled_from("ABCDEFG"), max_size=4), max_size=30))
def test_the_seats_hold_exactly_the_members_and_nobody_moves_while_riding(batches: list[set[str]]) -> None:
    seats, before, shown = Seats(4), set[str](), ("·",) * 4
    for step_id, batch in enumerate(batches, start=1):
        row = seats.take(step(step_id, "".join(sorted(batch)), left="".join(before - batch)))
        assert (row is None) == (batch == before)
        after = row.seats if row else shown
        assert len(after) == 4
        assert {name for name in after if name != "·"} == batch
        assert all(after[seat] == name for seat, name in enumerate(shown) if name in batch)
        before, shown = batch, after
