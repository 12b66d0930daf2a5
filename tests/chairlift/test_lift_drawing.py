import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chairlift.latency_drawing import Waits
from chairlift.lift import End, Frame, Gauges, Lift
from chairlift.lift_drawing import screen
from chairlift.seats import Member, Step


def drawn(
    lifts: dict[str, Lift],
    *,
    width: int = 100,
    height: int = 30,
    state: str = "",
    now: float = 0.0,
    waits: dict[str, Waits] | None = None,
) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(screen(lifts, title="tiny", state=state, width=width, height=height, now=now, waits=waits))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lift(*, num_riders: int = 2, num_steps: int = 3, queue: tuple[tuple[int, str, int], ...] = ()) -> Lift:
    gauges = Gauges(num_riders, sum(count for *_, count in queue), 8, 100, 60, 20, 2500, 300, queue)
    made = Lift()
    for step_id in range(1, num_steps + 1):
        members = tuple(Member(seq_id, f"request-{seq_id}") for seq_id in range(num_riders))
        chunks = frozenset({0}) if step_id == 1 else frozenset()
        made.take(Frame(Step(step_id, members), chunks, num_riders, {}, gauges), now=0.0)
    return made


def test_a_row_is_a_seat_with_its_rider_and_what_was_done_there() -> None:
    lines = drawn({"executor-0": lift()}).splitlines()
    assert lines[0].startswith("tiny   3 tokens/s   2 riding")
    assert "executor-0   step 3" in lines[1]
    assert lines[2].startswith("│   1 request-0 ")
    assert lines[2].rstrip(" │").endswith("▐▒████")
    assert lines[3].rstrip(" │").endswith("▐█████")
    assert "2 of 8 seats   2.5 ms a step, 0.3 idle before   KV " in lines[4]
    assert "40 owned, 20 cached, 40 free" in drawn({"e": lift()}, width=140)


@pytest.mark.parametrize(("end", "glyph"), [(End.FINISHED, "▌"), (End.PREEMPTED, "◄"), (End.CANCELLED, "✗")])
def test_how_a_ride_ended_is_a_mark_on_its_last_step(end: End, glyph: str) -> None:
    made = lift(num_riders=1, num_steps=2)
    made.take(Frame(Step(3, (), frozenset({0})), ends={0: end}), now=0.0)
    assert f"▐▒█{glyph}  " in drawn({"e": made})


def test_an_address_with_brackets_is_shown_as_it_is() -> None:
    assert "unix:/tmp/[/x].sock   step 3" in drawn({"unix:/tmp/[/x].sock": lift()})


def test_who_waits_is_listed_by_importance() -> None:
    text = drawn({"e": lift(queue=((5, "b", 2), (-1, "a", 3)))})
    assert "5 waiting   class -1 a: 3   class 5 b: 2" in text
    assert "nobody waits" in drawn({"e": lift()})


def test_an_executor_that_brings_no_steps_while_somebody_rides_says_so() -> None:
    assert "no step for" not in drawn({"e": lift()}, now=1.0)
    assert "no step for 9 s" in drawn({"e": lift()}, now=9.0)


def test_nothing_seen_yet_and_a_router_that_is_away_are_sentences() -> None:
    assert "The lift stands still" in drawn({})
    assert "nobody answers" in drawn({"e": lift()}, state="nobody answers")


@given(st.integers(1, 3), st.integers(0, 70), st.integers(24, 200), st.integers(10, 60))
def test_no_line_is_wider_than_the_terminal(num_lifts: int, num_riders: int, width: int, height: int) -> None:
    waits = {"first token": Waits((0.1, 1.0), (1, 2, 3))}
    lifts = {f"e{i}": lift(num_riders=num_riders) for i in range(num_lifts)}
    text = drawn(lifts, width=width, height=height, waits=waits)
    assert max(map(len, text.splitlines())) <= width


def test_more_seats_than_lines_are_counted_and_the_screen_holds_what_is_drawn() -> None:
    lifts = {"a": lift(num_riders=64), "b": lift(num_riders=64)}
    text = drawn(lifts, height=40, width=160)
    assert len(text.splitlines()) <= 40
    assert "50 more seats than fit here" in text
    waits = {name: Waits((1.0,), (1, 0)) for name in ("first token", "between tokens")}
    text = drawn(lifts, height=40, width=160, waits=waits)
    assert len(text.splitlines()) <= 40
    assert "first token" in text
    assert "between tokens" in text
