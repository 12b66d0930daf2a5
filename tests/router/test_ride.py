from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.ride import Changes, Ride, Rider, Step


def rider(seq_id: int, *, padding: bool = False, tenant: str = "") -> Rider:
    return Rider(seq_id, f"r{seq_id}", 0, padding, tenant)


def changes(*steps: Step, seated: tuple[Rider, ...] | None = None) -> Changes:
    newest = max((step.step_id + step.num_alike for step in steps), default=0)
    return Changes("e", newest, newest / 10, seated, steps, {"seats": 4})


def test_a_frame_tells_of_every_step_what_it_changed_and_of_the_newest_how_things_stand() -> None:
    steps = [Step(1, entered=(rider(1), rider(2))), Step(2, num_alike=3)]
    assert Ride().frame(changes(*steps, seated=())) == {
        "executor": "e",
        "step": 5,
        "time": 0.5,
        "seats": 4,
        "seated": [],
        "steps": [{"step": 1, "entered": [[1, "r1", 0], [2, "r2", 0]]}, {"step": 2, "alike": 3}],
    }


def test_who_left_who_is_in_prefill_and_who_sits_still_is_told() -> None:
    step = Step(7, left=((1, "STOP"),), prefill=((2, 64),), last_chunk=((3, 30),), still=(4,))
    (told,) = Ride().frame(changes(step))["steps"]
    assert told == {
        "step": 7,
        "left": ((1, "STOP"),),
        "prefill": ((2, 64),),
        "last_chunk": ((3, 30),),
        "still": (4,),
    }


def test_whose_request_it_is_stands_behind_its_name() -> None:
    riders = (rider(1, tenant="red"), rider(2, padding=True, tenant="red"), rider(3, padding=True))
    (told,) = Ride().frame(changes(Step(1, entered=riders)))["steps"]
    assert told["entered"] == [[1, "r1", 0, 0, "red"], [2, "r2", 0, 1, "red"], [3, "r3", 0, 1]]


def test_a_number_that_leaves_and_comes_again_in_one_step_sits_there() -> None:
    ride = Ride()
    ride.frame(changes(Step(1, entered=(rider(1),))))
    ride.frame(changes(Step(2, left=((1, "PREEMPTED"),), entered=(rider(1),))))
    assert ride.whole()["seated"] == [[1, "r1", 0]]


def test_a_whole_one_forgets_who_sat_there_before() -> None:
    ride = Ride()
    ride.frame(changes(Step(5, entered=(rider(1),))))
    assert ride.frame(changes(seated=(rider(2),)))["seated"] == [[2, "r2", 0]]
    assert ride.whole()["seated"] == [[2, "r2", 0]]


def follow(frames: list[dict[str, Any]]) -> set[int]:
    """Who sits on the lift, as a looker works it out."""
    seated: set[int] = set()
    for frame in frames:
        if "seated" in frame:
            seated = {one[0] for one in frame["seated"]}
        for step in frame["steps"]:
            seated -= {one[0] for one in step.get("left", ())}
            seated |= {one[0] for one in step.get("entered", ())}
    return seated


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9))), max_size=3),
            st.none() | st.sets(st.integers(1, 9)),
        ),
        min_size=1,
    )
)
def test_who_comes_late_knows_what_whoever_followed_from_the_first_frame_knows(
    told: list[tuple[list[tuple[set[int], set[int]]], set[int] | None]],
) -> None:
    ride, frames = Ride(), []
    for steps, seated in told:
        made = [
            Step(step_id, left=tuple((one, "STOP") for one in left), entered=tuple(map(rider, entered)))
            for step_id, (left, entered) in enumerate(steps, start=1)
        ]
        whole = None if seated is None else tuple(map(rider, seated))
        frames.append(ride.frame(changes(*made, seated=whole)))
        assert follow(frames) == follow([ride.whole()])
