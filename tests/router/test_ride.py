from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.ride import Leaver, Ride, Rider, Step


def rider(seq_id: int, num_tokens: int = 1, *, prefill: bool = False, padding: bool = False) -> Rider:
    return Rider(seq_id, f"r{seq_id}", 0, num_tokens, prefill, padding)


def step(step_id: int, *riders: Rider, left: tuple[Leaver, ...] = (), num_dropped: int = 0) -> Step:
    return Step("e", step_id, step_id / 10, riders, left, num_dropped, {"seats": 4})


def test_the_first_frame_tells_everybody() -> None:
    assert Ride().frame(step(1, rider(1), rider(2))) == {
        "executor": "e",
        "step": 1,
        "time": 0.1,
        "seats": 4,
        "entered": [[1, "r1", 0], [2, "r2", 0]],
    }


def test_a_step_in_which_nothing_changes_names_nobody() -> None:
    ride = Ride()
    ride.frame(step(1, rider(1)))
    assert ride.frame(step(2, rider(1))) == {"executor": "e", "step": 2, "time": 0.2, "seats": 4}


def test_who_left_is_told_with_the_reason_and_who_never_sat_here_is_not() -> None:
    ride = Ride()
    ride.frame(step(1, rider(1), rider(2)))
    frame = ride.frame(step(2, rider(2), left=(Leaver(1, "STOP"), Leaver(77, "ABORT"))))
    assert frame["left"] == [[1, "STOP"]]
    assert "still" not in frame


def test_a_number_that_leaves_and_another_that_comes_in_one_step_are_both_told() -> None:
    ride = Ride()
    ride.frame(step(1, rider(1)))
    frame = ride.frame(step(2, rider(5), left=(Leaver(1, "PREEMPTED"),)))
    assert (frame["left"], frame["entered"]) == ([[1, "PREEMPTED"]], [[5, "r5", 0]])


def test_chunks_of_prompt_are_told_and_apart_from_them_the_last() -> None:
    frame = Ride().frame(step(1, rider(1, 64, prefill=True), rider(2, 30), rider(3, padding=True)))
    assert (frame["prefill"], frame["last_chunk"]) == ([[1, 64]], [[2, 30]])
    assert frame["entered"][2] == [3, "r3", 0, 1]


def test_whose_request_it_is_stands_behind_its_name() -> None:
    frame = Ride().frame(
        step(1, replace(rider(1), tenant="red"), replace(rider(2, padding=True), tenant="red"))
    )
    assert frame["seated" if "seated" in frame else "entered"] == [
        [1, "r1", 0, 0, "red"],
        [2, "r2", 0, 1, "red"],
    ]


def test_who_has_no_row_sits_still() -> None:
    ride = Ride()
    ride.frame(step(1, rider(1), rider(2)))
    assert ride.frame(step(2, rider(2)))["still"] == [1]


def test_after_dropped_summaries_the_frame_is_whole_and_nobody_is_left_behind() -> None:
    ride = Ride()
    ride.frame(step(1, rider(1), rider(2)))
    frame = ride.frame(step(9, rider(2), rider(3), num_dropped=7))
    assert frame["seated"] == [[2, "r2", 0], [3, "r3", 0]]


def test_a_fresh_epoch_counts_from_one_again_and_is_whole() -> None:
    ride = Ride()
    ride.frame(step(5, rider(1)))
    assert ride.frame(step(1, rider(1)))["seated"] == [[1, "r1", 0]]


def follow(frames: list[dict[str, Any]]) -> set[int]:
    """Who sits on the lift, as a looker works it out."""
    seated: set[int] = set()
    for frame in frames:
        if "seated" in frame:
            seated = {one[0] for one in frame["seated"]}
            continue
        seated -= {one[0] for one in frame.get("left", ())}
        seated |= {one[0] for one in frame.get("entered", ())}
    return seated


@given(st.lists(st.tuples(st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9)), st.booleans()), min_size=1))
def test_whoever_follows_the_frames_knows_who_has_a_row(
    steps: list[tuple[set[int], set[int], bool]],
) -> None:
    ride, frames = Ride(), []
    for step_id, (riders, leavers, dropped) in enumerate(steps, start=1):
        left = tuple(Leaver(seq_id, "STOP") for seq_id in leavers - riders)
        frames.append(ride.frame(step(step_id, *map(rider, riders), left=left, num_dropped=int(dropped))))
        assert follow(frames) >= riders
        assert follow(frames) == follow([ride.whole()])
        assert not follow(frames) & (leavers - riders)
