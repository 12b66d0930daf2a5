import grpc
import pytest

from chairlift.patience import Patience
from rpc.errors import RequestError, invalid

LOST = RequestError(grpc.StatusCode.UNAVAILABLE, "gone")
HELD = RequestError(grpc.StatusCode.ALREADY_EXISTS, "running", field="request_id")
FULL = RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=2.0)


def test_the_servers_word_goes_before_a_guess() -> None:
    delay = Patience(3, None).delay_after(FULL, now=0, chance=0)
    assert delay == 2.0


def test_guesses_grow_and_are_spread() -> None:
    patience = Patience(9, None)
    least = [patience.delay_after(LOST, now=0, chance=0) for _ in range(9)]
    assert least == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5, 2.5]
    assert Patience(1, None).delay_after(LOST, now=0, chance=1) == 0.1


def test_retries_are_bounded_in_a_row_and_begin_anew_with_each_progress() -> None:
    patience = Patience(2, None)
    assert [patience.delay_after(LOST, 0, 0) is not None for _ in range(3)] == [True, True, False]
    patience.renew()
    assert patience.delay_after(LOST, 0, 0) is not None


@pytest.mark.parametrize(
    "refusal",
    [
        invalid("n", "n is 0"),
        RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than the limit"),
        RequestError(grpc.StatusCode.INTERNAL, "defect"),
        RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(refusal: RequestError) -> None:
    assert Patience(5, None).delay_after(refusal, 0, 0) is None


def test_nobody_waits_beyond_the_deadline() -> None:
    patience = Patience(5, deadline=10.0)
    assert patience.remaining_seconds(4.0) == 6.0
    assert patience.remaining_seconds(11.0) == 0.0
    assert patience.delay_after(FULL, now=8.5, chance=0) is None
    assert patience.delay_after(FULL, now=7.5, chance=0) == 2.0


def test_an_id_that_is_in_use_may_be_our_own_after_a_loss_until_a_router_must_have_noticed() -> None:
    patience = Patience(max_retries=2, deadline=None)
    assert patience.delay_after(HELD, now=0, chance=0) is None, "somebody else's"
    assert patience.delay_after(LOST, now=0, chance=0) is not None
    now, num_tries = 0.0, 0
    while (delay := patience.delay_after(HELD, now, chance=1)) is not None:
        assert 0.05 <= delay <= 1
        now, num_tries = now + delay, num_tries + 1
    assert 15 < now <= 21, "noticing takes 15 s at most (rpc.channel)"
    assert num_tries < 30
    assert patience.delay_after(LOST, now, 0) is not None, "these were none of the two retries"
    assert patience.delay_after(HELD, now, 0) is not None
    assert patience.delay_after(LOST, now, 0) is None


def test_nobody_waits_beyond_the_deadline_for_an_id_to_be_free() -> None:
    patience = Patience(5, deadline=10.0)
    assert patience.delay_after(LOST, now=8.0, chance=0) is not None
    assert patience.delay_after(HELD, now=9.0, chance=0) == 0.5
    assert patience.delay_after(HELD, now=9.8, chance=0) is None
