import pytest

from scheduler.batching import Batching


@pytest.mark.parametrize("num_running", [0, 1, 100])
def test_at_every_iteration_newcomers_may_enter(num_running: int) -> None:
    assert Batching.ITERATION.may_enter(num_running=num_running)


@pytest.mark.parametrize("batching", [Batching.REQUEST, Batching.REQUEST_PADDED])
def test_a_request_level_batch_opens_only_when_it_is_empty(batching: Batching) -> None:
    assert batching.may_enter(num_running=0)
    assert not batching.may_enter(num_running=1)


def test_the_values_are_what_an_operator_writes() -> None:
    assert {item.value for item in Batching} == {"iteration", "request", "request-padded"}
