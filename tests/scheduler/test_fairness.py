"""The bounds of the fair policy, and that it is the policy which keeps them.

Of two tenants of equal weight ("Fairness in Serving Large Language Models", OSDI'24): over any interval in
which both *compete* (have requests waiting, and are at no limit of their own), the virtual tokens received
differ by at most 2 U, with U = max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens the caches can
hold). Over any interval in which one competes, no other gets more than 3 U beyond it, whatever that one did
before and does now: nobody banks what it did not use. Service is counted without weights and lifts. Why it is
so:

- While a tenant competes, its service (lifts counted in) is no less than the floor, and at most U above it:
  when its newest one entered it was the floor itself, the floor never falls, and what all of its sequences
  that run can still be charged is U.
- So two that compete differ by U at most, at both ends of the interval: 2 U.
- Another one is charged U at most for what ran before it began to compete in the interval, then begins at
  most U below the one that competes, and when its newest one enters it is below that one: it ends at most U
  above.

With weights w, U / w stands for U, for each tenant its own. The proof needs that those admitted together fit
in the cache to their ends, so it is one of `--admission reserve`, and that nobody waits for a prefix. Under
`forecast` and `optimistic` the same bounds are tested, not proved: who is preempted is not chosen by what its
tenant has had, but it comes back only when it is its tenant's turn.
"""

import random
from collections.abc import Callable

import pytest

from scheduler.policy import Admission, Limits
from scheduler.sequence import Sequence, State
from scheduler.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT, Tenant, TenantLimits
from scheduler.waiting import Policy
from tests.scheduler.harness import Harness

LONGEST_PROMPT = 60
NUM_BLOCKS, BLOCK_SIZE = 28, 4
U = max(INPUT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * NUM_BLOCKS * BLOCK_SIZE)
BOUND = 2 * U

Shape = Callable[[random.Random], tuple[int, int]]  # → prompt length, max_tokens


def few_long(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(30, LONGEST_PROMPT + 1), rng.randrange(20, 50)


def many_short(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(1, 10), rng.randrange(1, 20)


def alike(_: random.Random) -> tuple[int, int]:
    return 8, 16


def mixed(rng: random.Random) -> tuple[int, int]:
    return rng.choice([few_long, many_short])(rng)


Mood = Callable[[int, Tenant], bool]  # step → whether it sends one more request now


def always(depth: int) -> Mood:
    """So many wait at all times."""
    return lambda _, tenant: tenant.num_waiting < depth


def steadily(step: int, tenant: Tenant) -> bool:
    """A small load: something always runs, and hardly ever anything waits."""
    return step % 12 == 0 and tenant.num_running + tenant.num_waiting < 3


def then(first: Mood, steps: int, second: Mood) -> Mood:
    return lambda step, tenant: (first if step < steps else second)(step, tenant)


def never(_: int, __: Tenant) -> bool:
    return False


def once(step: int, tenant: Tenant) -> bool:
    return step == 0 and not tenant.num_waiting


def in_bursts(step: int, tenant: Tenant) -> bool:
    """Five at once, more often than they can be done for a time, and nothing for a time."""
    return step % 300 < 150 and step % 30 == 0 and tenant.num_waiting < 5


class Contest:
    """Tenants that always have something waiting; the difference of what they received, after each step."""

    def __init__(
        self, limits: Limits, seed: int, shapes: dict[str, Shape], depth: dict[str, int | Mood]
    ) -> None:
        self.rng = random.Random(seed)
        self.h = Harness(limits, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=48)
        self.shapes = shapes
        self.moods = {name: always(item) if isinstance(item, int) else item for name, item in depth.items()}
        self.count = self.num_steps = 0

    def refill(self) -> None:
        for name, shape in self.shapes.items():
            tenant = self.h.core.tenants.get(name, 0.0)
            while self.moods[name](self.num_steps, tenant):
                self.count += 1
                length, max_tokens = shape(self.rng)
                prompt = [self.rng.randrange(90) for _ in range(length)]
                self.h.submit(f"r{self.count}", prompt, max_tokens, tenant=name, ignore_eos=True)

    def service(self, name: str) -> float:
        tenant = self.h.core.tenants.get(name, 0.0)
        return INPUT_WEIGHT * tenant.num_input_tokens + OUTPUT_WEIGHT * tenant.num_output_tokens

    def step(self) -> float:
        self.refill()
        for seq in self.h.step():
            self.h.core.forget(seq)  # as when its router has said that it has it: no audit looks at it again
        self.h.now += 0.01
        self.num_steps += 1
        return self.difference

    @property
    def difference(self) -> float:
        return self.service("a") - self.service("b")

    def largest_difference(self, steps: int, backlogged: str = "") -> float:
        """Over every interval: the difference's highest point less its lowest.

        `backlogged`: of these something waits at every moment, also when a plan has just been made.
        """
        differences = [self.difference]
        for _ in range(steps):
            differences.append(self.step())
            assert all(self.h.core.tenants.get(name, 0.0).num_waiting for name in backlogged)
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
    contest = Contest(limits(Policy.FAIR, admission, window), seed, shapes, {"a": 40, "b": 20})
    assert contest.largest_difference(1000, backlogged="ab") <= BOUND
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


# --- whoever does not compete banks nothing -------------------------------------------------------------


def most_beyond(contest: Contest, steps: int, name: str, weights: dict[str, float]) -> dict[str, float]:
    """By how much each other tenant got more than this one, by weight, in the interval where it is most."""
    others = contest.shapes.keys() - {name}
    lowest = dict.fromkeys(others, 0.0)
    most = dict.fromkeys(others, 0.0)
    start = {other: contest.service(other) for other in contest.shapes}
    tenant = contest.h.core.tenants.get(name, 0.0)
    for _ in range(steps):
        contest.step()
        won = {item: (contest.service(item) - start[item]) / weights.get(item, 1.0) for item in start}
        assert tenant.num_waiting
        for other in others:
            beyond = won[other] - won[name]
            lowest[other] = min(lowest[other], beyond)
            most[other] = max(most[other], beyond - lowest[other])
    return most


@pytest.mark.parametrize("admission", list(Admission))
def test_a_small_steady_load_saves_nothing_for_a_burst(admission: Admission) -> None:
    steps = 800
    moods: dict[str, int | Mood] = {"a": 20, "b": then(steadily, steps, always(20))}
    shapes = {"a": alike, "b": alike}
    contest = Contest(limits(Policy.FAIR, admission, 1), 1, shapes, moods)
    for _ in range(steps):
        contest.step()
    assert contest.service("a") - contest.service("b") > 3 * BOUND
    assert contest.largest_difference(500, backlogged="ab") <= BOUND, "both wait from now on"


@pytest.mark.parametrize("held", [TenantLimits(max_running=1), TenantLimits(max_blocks=6)])
@pytest.mark.parametrize("admission", [Admission.RESERVE, Admission.FORECAST])
def test_one_at_its_own_limit_lets_nobody_bank_what_it_did_not_use(
    held: TenantLimits, admission: Admission
) -> None:
    """`back` was idle, `limited` waits all the time: neither, nor a newcomer, gets ahead of `a`."""
    moods: dict[str, int | Mood] = {
        "a": 10,
        "limited": 10,
        "back": then(once, 700, always(10)),
        "new": then(never, 800, always(10)),
    }
    shapes = dict.fromkeys(moods, many_short)
    contest = Contest(limits(Policy.FAIR, admission, 1, tenants={"limited": held}), 1, shapes, moods)
    for _ in range(700):
        contest.step()
    assert contest.service("a") - contest.service("limited") > 3 * BOUND
    assert all(beyond <= 3 * U for beyond in most_beyond(contest, 400, "a", {}).values())


def test_one_whose_limit_no_longer_holds_it_gets_its_share_and_not_what_it_missed() -> None:
    """Its one long sequence keeps it at its block limit for a long time."""
    held = TenantLimits(max_blocks=20)
    contest = Contest(
        limits(Policy.FAIR, Admission.RESERVE, 1, tenants={"held": held}),
        1,
        {"a": many_short, "held": lambda _: (2, 50)},
        {"a": 10, "held": 2},
    )
    most = most_beyond(contest, 600, "a", {})
    assert contest.service("a") > contest.service("held") > 2 * BOUND
    contest.shapes["held"] = many_short  # these fit beside each other, now and then
    assert most["held"] <= 3 * U
    assert most_beyond(contest, 600, "a", {})["held"] <= 3 * U


@pytest.mark.parametrize("admission", list(Admission))
@pytest.mark.parametrize("seed", range(4))
def test_nobody_gets_more_than_the_bound_beyond_one_that_competes(admission: Admission, seed: int) -> None:
    """Whatever the others do: small loads, bursts, limits of their own, all weights; over every interval."""
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 2.0]) for name in ("a", "steady", "bursts", "limited", "late")}
    tenants = {name: TenantLimits(weight=weight) for name, weight in weights.items()}
    tenants["limited"] = TenantLimits(weight=weights["limited"], max_running=1 + seed)
    moods: dict[str, int | Mood] = {
        "a": 20,
        "steady": then(steadily, 400, always(3)),
        "bursts": in_bursts,
        "limited": 5,
        "late": then(never, 500, always(20)),
    }
    shapes = {name: rng.choice([few_long, many_short, mixed]) for name in moods}
    contest = Contest(limits(Policy.FAIR, admission, 1 + seed % 2, tenants=tenants), seed, shapes, moods)
    for name, beyond in most_beyond(contest, 800, "a", weights).items():
        assert beyond <= U / weights["a"] + 2 * U / weights[name], name
