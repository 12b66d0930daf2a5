"""Importance classes under more load than can be served, in the logical time of the checking executor.

A step takes 100 µs and 10 µs a token.
"""

import random
from dataclasses import dataclass
from statistics import median

import pytest

from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence, State
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


# --- prompts take all tokens ----------------------------------------------------------------------------


class PromptFlood:
    """Prompts of the best class keep coming, more than the token budget can serve; seats are plenty."""

    LENGTH = 200

    def __init__(self, policy: Policy = Policy.FCFS, num_waiting: int = 10) -> None:
        self.num_waiting = num_waiting
        limits = Limits(window=1, watermark=0.0, aging_seconds=1.0, prefix_caching=False, policy=policy)
        self.h = Harness(
            limits,
            num_blocks=2048,
            block_size=4,
            max_num_seqs=32,
            max_num_batched_tokens=BUDGET,
            max_seq_len=8192,
        )
        self.rng = random.Random(1)
        self.num_best = self.num_ended = 0

    def submit(self, name: str, length: int = LENGTH, **fields: int) -> Sequence:
        ids = [self.rng.randrange(90) for _ in range(length)]
        return self.h.submit(name, ids, 1, ignore_eos=True, **fields)

    def step(self) -> None:
        """A step of the flood, which takes 50 ms."""
        while self.h.core.waiting.counts.get((0, ""), 0) < self.num_waiting:
            self.submit(f"best{self.num_best}")
            self.num_best += 1
        for seq in self.h.step():
            self.num_ended += seq.request.priority == 0
            self.h.core.forget(seq)
        running = list(self.h.core.executors[EXECUTOR].running.values())
        best = min([seq.request.priority for seq in [*running, *self.h.core.waiting]])
        for seq in running:
            assert seq.importance == seq.request.priority or best < seq.request.priority, (
                "age counts against better classes alone"
            )
        self.h.now += 0.05

    def until_done(self, seq: Sequence, most_seconds: float) -> float:
        """How long `seq` takes from now on, seconds."""
        start = self.h.now
        while seq.state is not State.FINISHED:
            self.step()
            assert self.h.now - start <= most_seconds
        return self.h.now - start


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.FAIR])
@pytest.mark.parametrize("num_waiting", [10, 100])
def test_what_an_aged_request_wins_is_its_whole_prompt_and_not_just_a_seat(
    policy: Policy, num_waiting: int
) -> None:
    flood = PromptFlood(policy, num_waiting)
    for _ in range(10):
        flood.step()
    low = flood.submit("low", priority=2)
    # (2 + 1) * 1 s until its turn, then four steps of 64 tokens behind what the step before had begun.
    assert flood.until_done(low, 5.0) >= 3.0


def test_a_prompt_that_the_flood_has_overtaken_in_its_seat_ages_there() -> None:
    flood = PromptFlood()
    low = flood.submit("low", priority=2)
    flood.h.step()
    assert low.num_computed_tokens == BUDGET, "it came first, and got a first chunk"
    assert flood.until_done(low, 5.0) >= 3.0


def test_prompts_of_a_worse_class_take_one_turn_after_the_other_from_the_best() -> None:
    flood = PromptFlood()
    low = [flood.submit(f"low{i}", priority=2) for i in range(40)]
    for _ in range(600):
        flood.step()
    num_low = sum(seq.state is State.FINISHED for seq in low)
    assert num_low == pytest.approx(30 / 3, abs=1), "one each (2 + 1) * 1 s, of 30 s"
    assert flood.num_ended >= 0.9 * (600 * BUDGET / flood.LENGTH - num_low)


def test_a_turn_that_was_won_is_not_lost_to_those_of_a_still_better_class_for_ever() -> None:
    flood = PromptFlood()
    low = flood.submit("low", 20 * flood.LENGTH, priority=2)
    flood.h.now += 3.0
    flood.step()
    flood.step()
    assert low.importance == -1, "better than those that came so far"
    for i in range(300):
        flood.submit(f"still better{i}", priority=-4)
    assert flood.until_done(low, 12.0) >= 6.0
