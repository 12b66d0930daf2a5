"""A whole run drawn from one seed: shape, requests, delays, faults; and the laws it must keep.

every accepted request ends exactly once, with the ids and the text of the undisturbed run   clients
a plan sent again is the same bytes; plans fit what the executor knows                       executor_node
blocks, queue and batch agree after each event                                               scheduler.audit
at the end nobody holds anything: no block, no sequence, no ghost, no record                 here
"""

import random
from dataclasses import dataclass, replace

from scheduler.policy import Admission, Limits
from scheduler.waiting import Policy
from tests.rig.scripted_executor import Script
from tests.simulation import faults
from tests.simulation.clients import Ask, Client
from tests.simulation.executor_node import ExecutorNode
from tests.simulation.links import Delay, Link
from tests.simulation.router_node import RouterNode
from tests.simulation.scheduler_node import SchedulerNode
from tests.simulation.world import World

FAULTS_UNTIL_SECONDS = 1.5
LIMIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How big everything is, and how unsafe."""

    num_routers: int
    num_executors: int
    window: int
    watermark: float
    policy: Policy
    admission: Admission
    delay: Delay
    script: Script
    asks: tuple[Ask, ...]
    cuts_every_seconds: float | None
    executor_crashes_every_seconds: float | None
    scheduler_crashes_every_seconds: float | None

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
            for number in range(rng.randint(4, 12))
        )
        scripts = tuple(script for ask in asks if (script := ask.script(bare)) is not None)
        fastest = rng.choice([0.00005, 0.001, 0.01])
        return cls(
            num_routers=rng.choice([1, 1, 2]),
            num_executors=rng.choice([1, 1, 2]),
            window=rng.choice([1, 2]),
            watermark=rng.choice([0.0, 0.01, 0.2]),
            policy=rng.choice(list(Policy)),
            admission=rng.choice([*Admission, Admission.OPTIMISTIC]),  # that one preempts
            delay=Delay(fastest, fastest * rng.choice([1, 3, 10])),
            script=replace(bare, requests=scripts),
            asks=asks,
            cuts_every_seconds=rng.choice([None, 0.1, 0.4]),
            executor_crashes_every_seconds=rng.choice([None, None, 0.5]),
            scheduler_crashes_every_seconds=rng.choice([None, None, 0.5]),
        )


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
        self.shape = shape = Shape.draw(world.rng("shape"))
        world.note("scenario", str(replace(shape, asks=(), script=replace(shape.script, requests=()))))
        self.executors = [
            ExecutorNode(world, f"executor{number}", shape.script) for number in range(shape.num_executors)
        ]
        executor_links = [self._link(f"scheduler to {node.name}") for node in self.executors]
        for node, link in zip(self.executors, executor_links, strict=True):
            node.links.append(link)
        self.scheduler = SchedulerNode(
            world,
            "scheduler",
            Limits(
                window=shape.window,
                watermark=shape.watermark,
                policy=shape.policy,
                admission=shape.admission,
                orphan_grace_seconds=2.0,
                result_keep_seconds=5.0,
            ),
            list(zip(self.executors, executor_links, strict=True)),
        )
        router_links = [self._link(f"router{number} to scheduler") for number in range(shape.num_routers)]
        self.scheduler.links += router_links
        self.routers = [
            RouterNode(world, f"router{number}", self.scheduler, link, shape.script.vocab_size)
            for number, link in enumerate(router_links)
        ]
        self.clients = [
            Client(world, ask, self.routers[number % shape.num_routers], shape.script)
            for number, ask in enumerate(shape.asks)
        ]
        world.laws.append(self.scheduler.check_laws)
        world.after(FAULTS_UNTIL_SECONDS, lambda: world.note("scenario", "no more faults"))
        if shape.cuts_every_seconds is not None:
            faults.cut_links(
                world,
                [*router_links, *executor_links],
                mean_seconds=shape.cuts_every_seconds,
                until=FAULTS_UNTIL_SECONDS,
            )
        for nodes, every_seconds in (
            (self.executors, shape.executor_crashes_every_seconds),
            ([self.scheduler], shape.scheduler_crashes_every_seconds),
        ):
            if every_seconds is not None:
                faults.crash_nodes(world, nodes, mean_seconds=every_seconds, until=FAULTS_UNTIL_SECONDS)

    def _link(self, name: str) -> Link:
        return Link(self.world, name, self.shape.delay)

    def run(self) -> None:
        """From start to quiet. Raises SimulationError."""
        self.world.run(lambda: all(client.is_done for client in self.clients), LIMIT_SECONDS)
        self.world.run(self._is_quiet, LIMIT_SECONDS)

    def _is_quiet(self) -> bool:
        """Whether nobody holds anything any more."""
        core = self.scheduler.core
        return (
            self.world.now >= FAULTS_UNTIL_SECONDS
            and core.is_idle
            and not core.sequences
            and len(core.executors) == len(self.executors)
            and all(state.blocks.num_free == state.blocks.num_blocks for state in core.executors.values())
            and all(state.session.num_unanswered == 0 for state in core.executors.values())
            and all(node.num_held == 0 for node in self.executors)
            and all(router.session.num_live == 0 for router in self.routers)
        )
