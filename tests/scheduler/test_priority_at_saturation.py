"""Importance classes under more load than can be served, in the logical time of the checking executor.

A step takes 100 µs and 10 µs a token.
"""

import random
from dataclasses import dataclass
from statistics import median

import pytest

from scheduler.policy import Admission, Limits
from scheduler.sequence import State
from scheduler.waiting import Policy
from tests.scheduler.harness import EXECUTOR, Harness

BUDGET = 64
LONGEST_STEP = (100 + 10 * BUDGET) * 1e-6  # seconds
BEST, MIDDLE, WORST = -5, 0, 5


@dataclass(frozen=True)
class Arrival:
    name: str
    at: float  # seconds
    length: int
    max_tokens: int
    priority: int


def arrivals(seed: int, count: int, per_second: float) -> list[Arrival]:
    """One in eight is of the best class, the rest of the two below."""
    rng = random.Random(seed)
    now = 0.0
    listed = []
    for i in range(count):
        now += rng.expovariate(per_second)
        priority = BEST if rng.random() < 1 / 8 else rng.choice([MIDDLE, WORST])
        listed.append(Arrival(f"r{i}", now, rng.randrange(4, 60), rng.randrange(10, 50), priority))
    return listed


class Run:
    """Serves a list of arrivals to the end of the last one."""

    def __init__(self, listed: list[Arrival], limits: Limits, *, with_priorities: bool = True) -> None:
        self.first_token: dict[str, float] = {}
        self.h = h = Harness(limits, num_blocks=160, max_num_batched_tokens=BUDGET)
        rng = random.Random(9)
        coming = list(reversed(listed))
        while coming or not h.core.is_idle:
            if h.core.is_idle and coming[-1].at > h.now:
                h.now = coming[-1].at
            while coming and coming[-1].at <= h.now:
                item = coming.pop()
                ids = [rng.randrange(90) for _ in range(item.length)]
                priority = item.priority if with_priorities else 0
                h.submit(item.name, ids, item.max_tokens, priority=priority, arrival=item.at, ignore_eos=True)
            h.plan()
            if h.executor.plans:
                result = h.executor.run()
                h.now += result.total_us * 1e-6
                for seq in h.core.update(EXECUTOR, result, h.now).progressed:
                    name = seq.request.request_id
                    self.first_token.setdefault(name, h.now - seq.request.arrival)
        self.duration = h.now - listed[0].at

    def median_of(self, listed: list[Arrival], priority: int) -> float:
        return median(self.first_token[item.name] for item in listed if item.priority == priority)


def limits(admission: Admission, policy: Policy = Policy.FCFS) -> Limits:
    return Limits(window=1, admission=admission, policy=policy)


@pytest.mark.parametrize(
    ("admission", "policy"),
    [*((admission, Policy.FCFS) for admission in Admission), (Admission.FORECAST, Policy.FAIR)],
)
def test_at_saturation_the_best_class_hardly_waits_nothing_is_lost_and_the_worst_class_ends(
    admission: Admission, policy: Policy
) -> None:
    listed = arrivals(seed=4, count=300, per_second=1600.0)
    best = [item for item in listed if item.priority == BEST]
    alone = Run(best, limits(admission, policy))
    loaded = Run(listed, limits(admission, policy))
    equal = Run(listed, limits(admission), with_priorities=False)

    assert equal.median_of(listed, BEST) > 10 * alone.median_of(listed, BEST), "the load saturates"
    assert loaded.median_of(listed, BEST) <= 1.5 * alone.median_of(listed, BEST) + LONGEST_STEP
    assert loaded.median_of(listed, BEST) < loaded.median_of(listed, MIDDLE)
    assert loaded.median_of(listed, MIDDLE) < loaded.median_of(listed, WORST)
    assert equal.duration / loaded.duration >= 0.95, "as many tokens in the time, or nearly"
    assert all(seq.state is State.FINISHED for seq in loaded.h.sequences.values())
    loaded.h.check_outputs()


def test_under_a_long_overload_aged_requests_do_not_pass_the_best_class_again_and_again() -> None:
    """Once the load has lasted much longer than aging needs, all that waits below the best class is aged."""
    listed = arrivals(seed=4, count=300, per_second=1600.0)
    best = [item for item in listed if item.priority == BEST]
    aging = Limits(window=1, aging_seconds=0.005)
    alone = Run(best, aging)
    loaded = Run(listed, aging)
    assert loaded.duration > 10 * (MIDDLE - BEST + 1) * 0.005, "even the worst class had its turns"
    assert loaded.median_of(listed, BEST) <= 1.5 * alone.median_of(listed, BEST) + LONGEST_STEP
    assert all(seq.state is State.FINISHED for seq in loaded.h.sequences.values())


def test_aging_lets_the_worst_class_start_while_the_important_keep_coming() -> None:
    """Without it, a class may wait as long as there is any other work."""
    starts: dict[float | None, float] = {}
    for aging in (None, 0.02):
        h = Harness(Limits(window=1, aging_seconds=aging), max_num_seqs=2)
        for i in range(4):
            h.submit(f"first{i}", [1 + i], 4, priority=0, ignore_eos=True)
        worst = h.submit("worst", [1, 2, 3], 4, priority=5, ignore_eos=True)
        for i in range(1500):
            if len(h.core.waiting) < 3:
                h.submit(f"best{i}", [1 + i % 90], 4, priority=0, ignore_eos=True)
            h.step()
            h.now += 0.0002
            if worst.has_started:
                starts[aging] = h.now
                break
    assert None not in starts
    # Five classes apart: after six times 20 ms it stands before those that come now.
    assert 5 * 0.02 <= starts[0.02] <= 6 * 0.02 + 0.01
