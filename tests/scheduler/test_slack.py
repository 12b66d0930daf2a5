"""When a sequence must begin to be in time."""

import pytest

from scheduler.policy import Limits
from scheduler.slack import SERVICE_MARGIN
from scheduler.waiting import Policy
from tests.scheduler.harness import Harness


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


def test_the_latest_start_is_the_deadline_less_the_measured_service_and_its_margin() -> None:
    h = Harness(Limits(policy=Policy.DEADLINE, watermark=0.0, window=1), num_blocks=256)
    never = h.submit("no deadline", prompt(10), 5, ignore_eos=True)
    unknown = h.submit("unknown", prompt(10, 1), 5, deadline=50.0, ignore_eos=True)
    assert never.latest_start == float("inf")
    assert unknown.latest_start == 50.0, "nothing was measured yet"
    for i in range(20):
        h.submit(f"r{i}", prompt(3 + i, i), 3, ignore_eos=True)
    h.run_to_end()
    seq = h.submit("A", prompt(30), 10, deadline=50.0, ignore_eos=True)
    # 30 tokens of 10 µs, and three steps of 110 µs: others ended after three or so.
    service = 30 * 10e-6 + 3 * 110e-6
    assert 50.0 - seq.latest_start == pytest.approx(SERVICE_MARGIN * service, rel=0.01)
