"""Five times what the executor can do: the good work done stays the same, and what is held stays bounded.

In logical time: a step is a step. Good is a request that ends with all its tokens before its client loses
patience; who is refused comes back after the wait it was told, or gives up.
"""

import random
from collections import Counter

import pytest

from scheduler.door import RefusedError
from scheduler.policy import Limits
from scheduler.sequence import FinishReason
from scheduler.waiting import Policy
from tests.scheduler.harness import Harness

SEATS, MAX_QUEUED, MAX_TOKENS = 8, 16, 20
STEP_SECONDS = 0.01
CAPACITY = SEATS / (MAX_TOKENS + 1)  # requests a step: a prompt takes one, too
PATIENCE_SECONDS = 2.0
NUM_STEPS = 600


def serve(policy: Policy, load: float) -> tuple[Counter[str], int]:
    """What became of the requests at `load` times the capacity, and the most that was held at a time."""
    rng = random.Random(1)
    limits = Limits(policy=policy, max_queued=MAX_QUEUED, watermark=0.0)
    h = Harness(limits, num_blocks=512, block_size=16, max_num_seqs=SEATS, max_num_batched_tokens=64)
    ends: Counter[str] = Counter()
    most_held, number, due = 0, 0, 0.0
    comes_back: list[tuple[float, int, float]] = []
    for _ in range(NUM_STEPS):
        h.now += STEP_SECONDS
        due += load * CAPACITY
        arriving = [(number + i, h.now + PATIENCE_SECONDS) for i in range(int(due))]
        number, due = number + int(due), due - int(due)
        arriving += [(name, deadline) for at, name, deadline in comes_back if at <= h.now < deadline]
        comes_back = [item for item in comes_back if item[0] > h.now]
        for name, deadline in arriving:
            told = submit(h, name, deadline)
            if told is not None:
                assert told > 0, "who is refused is told how long to wait"
                ends["refused"] += 1
                comes_back.append((h.now + told * rng.uniform(1.0, 1.25), name, deadline))
        most_held = max(most_held, len(h.core.sequences))
        for seq in [*h.core.expire(h.now), *h.step()]:
            assert seq.finish is not None
            ends["good" if seq.finish.reason is FinishReason.LENGTH else "late"] += 1
            h.core.forget(seq)  # its reader has it
            h.sequences.pop(seq.request.request_id)
    return ends, most_held


def submit(h: Harness, number: int, deadline: float) -> float | None:
    """Seconds to wait that a refused request was told, None for one that is taken in."""
    try:
        h.submit(f"r{number}", [number % 90, 7, 8], MAX_TOKENS, ignore_eos=True, deadline=deadline)
    except RefusedError as refusal:
        return refusal.retry_after_seconds or 0.0
    return None


@pytest.mark.parametrize("policy", list(Policy))
def test_b94_goodput_is_flat_from_once_to_five_times_the_load_and_what_is_held_is_bounded(
    policy: Policy,
) -> None:
    at_capacity, _ = serve(policy, 1.0)
    assert at_capacity["good"] > 0.9 * NUM_STEPS * CAPACITY
    for load in (2.0, 5.0):
        ends, most_held = serve(policy, load)
        assert ends["good"] > 0.95 * at_capacity["good"], (load, ends)
        assert ends["refused"] > ends["late"], "whoever cannot be served is told so at the door"
        assert most_held <= 2 * SEATS + MAX_QUEUED
