"""The bound of the fair policy, and that it is the policy which keeps it.

Proved for two tenants of equal weight ("Fairness in Serving Large Language Models", OSDI'24): over any
interval in which both have requests waiting, the virtual tokens received differ by at most 2 U, with
U = max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the caches can hold). Service is counted without
weights and lifts. The proof needs that those admitted together fit in the cache to their ends, so it is one
of `--admission reserve`. Under `forecast` and `optimistic` the same bound is tested, not proved: who is
preempted is not chosen by what its tenant has had, but it comes back only when it is its tenant's turn.
"""

import random
from collections.abc import Callable

import pytest

from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence, State
from scheduler.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT, TenantLimits
from scheduler.waiting import Policy
from tests.scheduler.harness import Harness

LONGEST_PROMPT = 60
NUM_BLOCKS, BLOCK_SIZE = 28, 4
BOUND = 2 * max(INPUT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * NUM_BLOCKS * BLOCK_SIZE)

Shape = Callable[[random.Random], tuple[int, int]]  # → prompt length, max_tokens


def few_long(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(30, LONGEST_PROMPT + 1), rng.randrange(20, 50)


def many_short(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(1, 10), rng.randrange(1, 20)


def mixed(rng: random.Random) -> tuple[int, int]:
    return rng.choice([few_long, many_short])(rng)


class Contest:
    """Tenants that always have something waiting; the difference of what they received, after each step."""

    def __init__(self, limits: Limits, seed: int, shapes: dict[str, Shape], depth: dict[str, int]) -> None:
        self.rng = random.Random(seed)
        self.h = Harness(limits, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=48)
        self.shapes, self.depth = shapes, depth
        self.count = 0

    def refill(self) -> None:
        for name, shape in self.shapes.items():
            tenant = self.h.core.tenants.get(name, 0.0)
            while tenant.num_waiting < self.depth[name]:
                self.count += 1
                length, max_tokens = shape(self.rng)
                prompt = [self.rng.randrange(90) for _ in range(length)]
                self.h.submit(f"r{self.count}", prompt, max_tokens, tenant=name, ignore_eos=True)

    def service(self, name: str) -> float:
        tenant = self.h.core.tenants.get(name, 0.0)
        return INPUT_WEIGHT * tenant.num_input_tokens + OUTPUT_WEIGHT * tenant.num_output_tokens

    def step(self) -> float:
        self.refill()
        self.h.step()
        self.h.now += 0.01
        return self.service("a") - self.service("b")

    def largest_difference(self, steps: int) -> float:
        """Over every interval: the difference's highest point less its lowest."""
        differences = [0.0, *(self.step() for _ in range(steps))]
        return max(differences) - min(differences)


def limits(policy: Policy, admission: Admission, window: int, **fields: object) -> Limits:
    return Limits(policy=policy, admission=admission, window=window, watermark=0.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("admission", list(Admission))
@pytest.mark.parametrize("a", [few_long, many_short, mixed])
@pytest.mark.parametrize("seed", range(2))
def test_two_backlogged_tenants_never_differ_by_more_than_the_bound(
    window: int, admission: Admission, a: Shape, seed: int
) -> None:
    shapes = {"a": a, "b": mixed if seed else many_short}
    contest = Contest(limits(Policy.FAIR, admission, window), seed, shapes, {"a": 20, "b": 3})
    assert contest.largest_difference(1000) <= BOUND
    assert contest.service("a") > 3 * BOUND, "the run is long against the bound"


def test_first_come_first_served_gives_the_one_with_bursts_as_much_more_as_it_asks_for() -> None:
    """The same measure sees what the fair policy prevents."""
    contest = Contest(
        limits(Policy.FCFS, Admission.RESERVE, 1), 1, {"a": mixed, "b": mixed}, {"a": 40, "b": 3}
    )
    assert contest.largest_difference(800) > BOUND


def test_a_weight_is_a_share_of_the_service() -> None:
    tenants = {"a": TenantLimits(weight=3.0), "b": TenantLimits(weight=1.0)}
    contest = Contest(
        limits(Policy.FAIR, Admission.RESERVE, 2, tenants=tenants),
        1,
        {"a": mixed, "b": mixed},
        {"a": 5, "b": 5},
    )
    for _ in range(2000):
        contest.step()
    assert contest.service("a") / contest.service("b") == pytest.approx(3.0, rel=0.1)


def test_a_tenant_that_comes_back_gets_its_share_and_not_what_it_missed() -> None:
    contest = Contest(limits(Policy.FAIR, Admission.RESERVE, 1), 2, {"a": mixed}, {"a": 5, "b": 5})
    contest.h.submit("early", [1, 2, 3], 2, tenant="b", ignore_eos=True)
    for _ in range(700):
        contest.step()
    before = {name: contest.service(name) for name in "ab"}
    assert before["a"] > 3 * BOUND
    contest.shapes["b"] = mixed
    for _ in range(700):
        contest.step()
    won = {name: contest.service(name) - before[name] for name in "ab"}
    assert won["a"] == pytest.approx(won["b"], abs=BOUND)


def test_nobody_is_held_back_while_a_seat_is_empty() -> None:
    """Work-conserving: alone, a tenant gets everything, however much it had before."""
    contest = Contest(limits(Policy.FAIR, Admission.RESERVE, 1), 3, {"a": many_short}, {"a": 20})
    contest.h.submit("idle", [1], 1, tenant="b")
    for _ in range(200):
        contest.step()
        assert len(contest.h.members()) >= 4  # what the blocks allow


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(5))
def test_with_seat_and_block_limits_a_newcomers_first_token_comes_within_a_stated_number_of_steps(
    policy: Policy, seed: int
) -> None:
    """A seat and blocks are left for it, so only tokens can lack.

    Before its prompt come at most those of the other seats, and, until the others have been charged as much
    as itself, as many tokens as its own prompt and one prompt more. A step gives chunks T - S tokens or more.
    """
    budget, seats, own = 48, 8, 24
    tenants = {"a": TenantLimits(max_running=seats - 1, max_blocks=NUM_BLOCKS // 2)}
    contest = Contest(
        limits(policy, Admission.OPTIMISTIC, 1, tenants=tenants), seed, {"a": few_long}, {"a": 50}
    )
    for _ in range(100 + 7 * seed):
        contest.step()
    seq: Sequence = contest.h.submit("new", list(range(own)), 4, tenant="new", ignore_eos=True)
    ahead = (seats - 1) * LONGEST_PROMPT + LONGEST_PROMPT + own
    most = -(-(ahead + own) // (budget - seats)) + 1
    steps = 0
    while seq.num_output_tokens == 0:
        contest.step()
        steps += 1
    assert steps <= most
    contest.shapes = {}
    contest.h.run_to_end()
    contest.h.check_outputs()
    assert seq.state is State.FINISHED
