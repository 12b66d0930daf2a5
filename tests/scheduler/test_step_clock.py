"""When steps are expected to end, and when one is late."""

from scheduler.step_clock import StepClock


def test_nothing_under_way_takes_no_time_and_is_never_late() -> None:
    clock = StepClock()
    assert clock.seconds_left(5.0) == 0.0
    assert clock.late_at(10.0) is None


def test_what_is_under_way_is_the_rest_of_the_first_and_all_of_the_second() -> None:
    clock = StepClock()
    clock.sent(1.0, 0.0)
    clock.sent(0.5, 0.2)
    assert clock.seconds_left(0.4) == 0.6 + 0.5
    clock.answered(1.1)
    assert clock.seconds_left(1.1) == 0.5  # the second one began when the first had answered


def test_one_over_its_time_is_taken_to_need_as_long_again() -> None:
    clock = StepClock()
    clock.sent(1.0, 0.0)
    assert clock.seconds_left(3.0) == 3.0


def test_a_step_is_late_after_the_least_time_or_twenty_times_its_own_prediction() -> None:
    clock = StepClock()
    clock.sent(None, 1.0)
    assert clock.late_at(10.0) == 11.0
    clock.answered(2.0)
    clock.sent(3.0, 2.0)
    assert clock.late_at(10.0) == 62.0


def test_b93_the_second_step_is_not_late_for_the_time_of_the_first() -> None:
    clock = StepClock()
    clock.sent(None, 0.0)
    clock.sent(None, 0.0)
    clock.answered(9.0)
    assert clock.late_at(10.0) == 19.0


def test_a_new_stream_counts_from_its_beginning() -> None:
    clock = StepClock()
    clock.sent(None, 0.0)
    clock.resumed(7.0)
    assert clock.late_at(10.0) == 17.0
