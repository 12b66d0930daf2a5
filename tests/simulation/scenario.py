"""A whole run drawn from one seed: shape, requests, delays, faults; and the laws it must keep.

every accepted request ends exactly once, with the ids and the text of the undisturbed run   clients
a plan sent again is the same bytes; plans fit what the executor knows                       executor_node
no step runs twice, none of an older term; no seq_id is used twice in an epoch               executor_node
executors that hang are given up, and no innocent is found guilty of it                      clients, ledger
an answer that does not fit harms no request, but one that is always answered so             clients, ledger
no term is led at twice; nobody is preempted with a result outstanding                       scheduler_node
what is given up is released within window + 1 plans and computed no more                    scheduler_node
blocks, queue and batch agree after each event                                               scheduler.audit
each fault costs a request one more computation at most; who is deadly kills few executors   here
a moment after the last fault nobody holds anything: no block, sequence, ghost, record       here
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from executor.plan import DRAFT_TOKENS
from scheduler.policy import Admission, Limits
from scheduler.waiting import Policy
from tests.rig.scripted_executor import Script
from tests.simulation import faults
from tests.simulation.clients import Ask, Client
from tests.simulation.executor_node import ExecutorNode
from tests.simulation.ledger import Ledger
from tests.simulation.links import Delay, Link
from tests.simulation.process import Process
from tests.simulation.router_node import RouterNode
from tests.simulation.scheduler_node import SchedulerNode, SharedLease
from tests.simulation.world import World

FAULTS_UNTIL_SECONDS = 1.5
N = TypeVar("N", ExecutorNode, SchedulerNode)
LEASE_SECONDS = 0.4
RECOVERY_SECONDS = 10.0
POISONED_SHARE = 0.1
UNFIT_SHARE = LYING_SHARE = 0.06
UNEQUAL_SHARE = DRAINING_SHARE = 0.1
GUESSING_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Shape:
    """How big everything is, and how unsafe."""

    num_routers: int
    num_schedulers: int
    num_executors: int
    limits: Limits
    delay: Delay
    doubled: float
    lost: float
    script: Script
    asks: tuple[Ask, ...]
    cuts_every_seconds: float | None
    executor_crashes_every_seconds: float | None
    scheduler_crashes_every_seconds: float | None
    router_crashes_every_seconds: float | None
    pauses_every_seconds: float | None
    bouts_every_seconds: float | None = None
    drains_every_seconds: float | None = None
    small_max_seq_len: int | None = None
    """What the last executor holds at most, if that is less than the others do."""

    @property
    def limit_seconds(self) -> float:
        """By when everything must be over: three times the work, one after the other, and time to recover."""
        num_tokens = sum(ask.n * (len(ask.prompt) + ask.max_tokens) for ask in self.asks)
        num_steps = num_tokens / min(self.script.max_num_batched_tokens, self.script.max_num_seqs)
        step_seconds = 0.01 + 2 * self.delay.most
        return FAULTS_UNTIL_SECONDS + RECOVERY_SECONDS + 3 * num_steps * step_seconds

    @classmethod
    def draw(cls, rng: random.Random) -> "Shape":
        """Small numbers, so that every limit is met."""
        block_size = rng.choice([1, 4, 16])
        num_tokens = rng.choice([48, 56, 96, 512])
        bare = Script(
            num_blocks=-(-num_tokens // block_size),
            block_size=block_size,
            max_num_seqs=rng.choice([1, 2, 4, 16]),
            max_num_batched_tokens=rng.choice([1, 7, 16, 64]),
            max_seq_len=rng.choice([48, 64, 256]),
            window=2,
        )
        spread_seconds = rng.choice([0.05, 0.4])
        asks = tuple(
            _draw_ask(rng, f"r{number}", rng.uniform(0.0, spread_seconds))
            for number in range(rng.randint(3, 9))
        )
        scripts = tuple(script for ask in asks if (script := ask.script(bare)) is not None)
        fastest = rng.choice([0.00005, 0.001, 0.01])
        return cls(
            num_routers=rng.choice([1, 1, 2]),
            num_schedulers=rng.choice([1, 2]),
            num_executors=rng.choice([1, 1, 2]),
            limits=Limits(
                window=rng.choice([1, 2]),
                watermark=rng.choice([0.0, 0.01, 0.2]),
                policy=rng.choice(list(Policy)),
                admission=rng.choice([*Admission, *[Admission.OPTIMISTIC] * 5]),  # that one preempts
                max_queued=rng.choice([None, None, 1]),
                orphan_grace_seconds=rng.choice([0.05, 2.0]),
                result_keep_seconds=5.0,
            ),
            delay=Delay(fastest, fastest * rng.choice([1, 3, 10])),
            doubled=rng.choice([0.0, 0.0, 0.1]),
            lost=rng.choice([0.0, 0.0, 0.2]),
            script=replace(bare, requests=scripts),
            asks=asks,
            cuts_every_seconds=rng.choice([None, 0.1, 0.4]),
            executor_crashes_every_seconds=rng.choice([None, None, 0.5]),
            scheduler_crashes_every_seconds=rng.choice([None, None, 0.5]),
            router_crashes_every_seconds=rng.choice([None, None, 0.5]),
            pauses_every_seconds=rng.choice([None, None, 0.6]),
        )

    def with_guesses(self, rng: random.Random) -> "Shape":
        """In some worlds the model repeats itself, and executors take draft tokens: most answers are long."""
        if rng.random() >= GUESSING_SHARE:
            return self
        features = (*self.script.features, DRAFT_TOKENS)
        bare = replace(self.script, memory=rng.choice([1, 2]), features=features, requests=())
        asks = tuple(replace(ask, max_tokens=ask.max_tokens + rng.choice([0, 8])) for ask in self.asks)
        scripts = tuple(script for ask in asks if (script := ask.script(bare)) is not None)
        limits = replace(self.limits, num_speculative_tokens=rng.choice([1, 3, 8]))
        return replace(self, asks=asks, script=replace(bare, requests=scripts), limits=limits)

    def with_lies(self, rng: random.Random) -> "Shape":
        """In some worlds executors answer a request wrongly each time; in others anything, for a while."""
        is_unfit, is_lying = rng.random() < UNFIT_SHARE, rng.random() < LYING_SHARE
        number = rng.randrange(len(self.asks))
        ask = self.asks[number]
        unfit = replace(ask, unfit_at=rng.randrange(len(ask.prompt) + ask.max_tokens))
        return replace(
            self,
            asks=(*self.asks[:number], unfit, *self.asks[number + 1 :]) if is_unfit else self.asks,
            bouts_every_seconds=rng.choice([0.2, 0.5]) if is_lying else None,
        )

    def with_small_one(self, rng: random.Random) -> "Shape":
        """In some worlds an executor is too small for what others can hold, and comes and goes as they do."""
        if rng.random() >= UNEQUAL_SHARE:
            return self
        return replace(
            self,
            num_executors=rng.choice([2, 3]),
            small_max_seq_len=rng.choice([8, 20, 32]),
            executor_crashes_every_seconds=rng.choice([0.3, 0.6]),
        )

    def with_drains(self, rng: random.Random) -> "Shape":
        """In some worlds executors leave in good order, while others go on."""
        if rng.random() >= DRAINING_SHARE:
            return self
        return replace(self, num_executors=rng.choice([2, 3]), drains_every_seconds=rng.choice([0.3, 0.6]))

    def script_of(self, number: int) -> Script:
        """That of the executor with this number."""
        if self.small_max_seq_len is None or number < self.num_executors - 1:
            return self.script
        return replace(self.script, max_seq_len=min(self.script.max_seq_len, self.small_max_seq_len))

    def with_poison(self, rng: random.Random) -> "Shape":
        """In some worlds executors die of computing one of the requests."""
        if rng.random() >= POISONED_SHARE:
            return self
        number = rng.randrange(len(self.asks))
        ask = self.asks[number]
        deadly = replace(ask, deadly_at=rng.randrange(len(ask.prompt) + ask.max_tokens))
        return replace(self, asks=(*self.asks[:number], deadly, *self.asks[number + 1 :]))


def _draw_ask(rng: random.Random, name: str, at: float) -> Ask:
    max_tokens = rng.choice([1, 2, rng.randint(3, 24), rng.randint(16, 24)])
    return Ask(
        name=name,
        at=at,
        # The first id is the request's own: a script is found by its prompt.
        prompt=(int(name[1:]), *(rng.randrange(250) for _ in range(rng.randint(0, 23)))),
        max_tokens=max_tokens,
        n=rng.choice([1, 1, 1, 2]),
        ends_after=rng.choice([None, None, rng.randrange(max_tokens)]),
        stops=tuple(
            "".join(rng.choices("abcdefgh", k=rng.randint(1, 3))) for _ in range(rng.choice([0, 0, 2]))
        ),
        priority=rng.choice([0, 0, 0, -1, 1]),
        cancel_at=at + rng.uniform(0.0, 0.5) if rng.random() < 0.2 else None,
        deadline=at + rng.uniform(0.0, 1.0) if rng.random() < 0.15 else None,
    )


class Scenario:
    """The world of one seed."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        shape = Shape.draw(world.rng("shape")).with_poison(world.rng("poison"))
        shape = shape.with_guesses(world.rng("guesses")).with_lies(world.rng("lies"))
        self.shape = shape = shape.with_small_one(world.rng("small")).with_drains(world.rng("drains"))
        self.ledger = ledger = Ledger()
        world.note("scenario", str(replace(shape, asks=(), script=replace(shape.script, requests=()))))
        executors = [Process(world, f"executor{number}") for number in range(shape.num_executors)]
        schedulers = [Process(world, f"scheduler{number}") for number in range(shape.num_schedulers)]
        routers = [Process(world, f"router{number}") for number in range(shape.num_routers)]
        deadly = {ask.prompt[0]: ask.deadly_at for ask in shape.asks if ask.deadly_at is not None}
        unfit = {ask.prompt[0]: ask.unfit_at for ask in shape.asks if ask.unfit_at is not None}
        self.executors = [
            ExecutorNode(process, shape.script_of(number), deadly, unfit)
            for number, process in enumerate(executors)
        ]
        self.lease = SharedLease(LEASE_SECONDS) if shape.num_schedulers > 1 else None
        self.schedulers = [
            SchedulerNode(process, shape.limits, self._ways(process, self.executors), self.lease, ledger)
            for process in schedulers
        ]
        self.routers = [
            RouterNode(process, self._ways(process, self.schedulers), shape.script.vocab_size)
            for process in routers
        ]
        self.clients = [
            Client(
                world, ask, self.routers[number % shape.num_routers :] + self.routers, shape.script, ledger
            )
            for number, ask in enumerate(shape.asks)
        ]
        world.laws += [node.check_laws for node in self.schedulers]
        world.after(FAULTS_UNTIL_SECONDS, lambda: world.note("scenario", "no more faults"))
        links = list(dict.fromkeys(link for process in [*schedulers, *routers] for link in process.links))
        season = faults.Season(world, FAULTS_UNTIL_SECONDS, ledger)
        if (every_seconds := shape.cuts_every_seconds) is not None:
            faults.cut_links(season, links, mean_seconds=every_seconds)
            faults.leave_streams(season, self.routers, mean_seconds=2 * every_seconds)
        for nodes, every_seconds in (
            (self.executors, shape.executor_crashes_every_seconds),
            (self.schedulers, shape.scheduler_crashes_every_seconds),
            (self.routers, shape.router_crashes_every_seconds),
        ):
            if every_seconds is not None:
                faults.crash_nodes(season, nodes, mean_seconds=every_seconds)
        if (every_seconds := shape.pauses_every_seconds) is not None:
            processes = [*executors, *schedulers, *routers]
            most_seconds = 2 * LEASE_SECONDS
            faults.freeze_processes(season, processes, mean_seconds=every_seconds, most_seconds=most_seconds)
            faults.slow_executors(season, self.executors, mean_seconds=every_seconds)

        if (every_seconds := shape.drains_every_seconds) is not None:
            faults.drain_executors(season, self.executors, mean_seconds=every_seconds)
        if (every_seconds := shape.bouts_every_seconds) is not None:
            faults.lying_executors(season, self.executors, mean_seconds=every_seconds)

    def _ways(self, client: Process, servers: Sequence[N]) -> list[tuple[N, Link]]:
        """Each of these nodes, with a link from `client` to it."""
        delay, doubled, lost = self.shape.delay, self.shape.doubled, self.shape.lost
        return [(node, Link(client, node.process, delay, doubled=doubled, lost=lost)) for node in servers]

    @property
    def leader(self) -> SchedulerNode | None:
        """The one scheduler that leads; None when none or several do."""
        leaders = [node for node in self.schedulers if node.is_leading]
        return leaders[0] if len(leaders) == 1 else None

    def run(self) -> None:
        """From start to quiet. Raises SimulationError."""
        self.world.run(lambda: all(client.is_done for client in self.clients), self.shape.limit_seconds)
        self.world.run(self._is_quiet, self.shape.limit_seconds)
        self.world.check(self._check_cost)

    def _check_cost(self) -> None:
        """Laws: what is computed again, and how many epochs a request, or a bout of an executor, can cost."""
        num_choices = sum(ask.n for ask in self.shape.asks)
        num_faults, num_deaths = self.ledger.num_faults, sum(node.num_deaths for node in self.executors)
        num_unfit = sum(node.num_lies[False] for node in self.executors)
        num_in_bouts = sum(node.num_lies[True] for node in self.executors)
        most_deaths = (1 + num_faults) * (math.log2(num_choices) + 2)
        assert num_deaths <= most_deaths, f"{num_deaths} executors died of one of {num_choices}"
        assert num_unfit <= most_deaths, f"one of {num_choices} was answered wrongly in {num_unfit} epochs"
        assert num_in_bouts <= 2 * num_faults, f"{num_in_bouts} epochs broke in {num_faults} faults"
        for ask in self.shape.asks:
            computed = sum(node.num_computed[ask.prompt[0]] for node in self.executors)
            num_losses = (
                num_faults
                + num_deaths
                + num_unfit
                + num_in_bouts
                + self.ledger.num_preemptions[ask.prompt[0]]
            )
            most = ask.n * (len(ask.prompt) + ask.max_tokens) * (1 + num_losses)
            assert computed <= most, f"{computed} tokens of {ask.name} were computed, {most} may be"

    def _is_quiet(self) -> bool:
        """Whether one scheduler leads and nobody holds anything any more."""
        leader = self.leader
        if self.world.now < FAULTS_UNTIL_SECONDS or leader is None:
            return False
        states = leader.core.executors.values()
        return (
            all(
                node.process.is_up and node.core.is_idle and not node.core.sequences
                for node in self.schedulers
            )
            and len(states) == len(self.executors)
            and all(state.blocks.num_free == state.blocks.num_blocks for state in states)
            and all(state.session.num_unanswered == 0 for state in states)
            and all(node.num_held == 0 for node in self.executors)
            and all(router.num_live == 0 for router in self.routers)
        )
