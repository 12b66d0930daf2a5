"""What breaks, and when: each fault goes on happening, now and then, for as long as the season lasts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.executor_node import ExecutorNode
from tests.simulation.ledger import Ledger
from tests.simulation.links import Link
from tests.simulation.process import Process
from tests.simulation.router_node import RouterNode
from tests.simulation.scheduler_node import SchedulerNode
from tests.simulation.world import World

Node = ExecutorNode | SchedulerNode | RouterNode


@dataclass(frozen=True, slots=True)
class Season:
    """From the start of the world until a given time; the ledger counts what goes wrong."""

    world: World
    until: float
    ledger: Ledger

    def now_and_then(self, name: str, mean_seconds: float, happen: Callable[[random.Random], None]) -> None:
        rng = self.world.rng(name)

        def act() -> None:
            self.ledger.num_faults += 1
            happen(rng)

        at = rng.expovariate(1 / mean_seconds)
        while at < self.until:
            self.world.after(at, act)
            at += rng.expovariate(1 / mean_seconds)


def cut_links(season: Season, links: Sequence[Link], *, mean_seconds: float) -> None:
    """Each link loses its streams; in between it may be slow."""
    for link in links:

        def happen(rng: random.Random, link: Link = link) -> None:
            if rng.random() < 0.25:
                link.slow_down(rng.uniform(0.0, 0.2))
            else:
                link.cut()

        season.now_and_then(f"cuts of {link.name}", mean_seconds, happen)


def crash_nodes(season: Season, nodes: Sequence[Node], *, mean_seconds: float) -> None:
    """Each node crashes and is back a moment later, with nothing in memory."""
    for node in nodes:

        def happen(rng: random.Random, node: Node = node) -> None:
            if node.process.is_up:
                node.crash()
                season.world.after(rng.uniform(0.0, 0.3), node.start)

        season.now_and_then(f"crashes of {node.process.name}", mean_seconds, happen)


def drain_executors(season: Season, executors: Sequence[ExecutorNode], *, mean_seconds: float) -> None:
    """Each executor says that it will leave, leaves, whoever is still there, and is back a moment later."""
    for node in executors:

        def happen(rng: random.Random, node: ExecutorNode = node) -> None:
            if not node.process.is_up or node.is_draining:
                return
            node.drain(rng.uniform(0.0, 0.4))
            season.world.after(rng.uniform(0.2, 0.5), lambda: leave(rng, node))

        def leave(rng: random.Random, node: ExecutorNode) -> None:
            if node.process.is_up and node.is_draining:
                node.crash()
                season.world.after(rng.uniform(0.0, 0.3), node.start)

        season.now_and_then(f"drains of {node.name}", mean_seconds, happen)


def leave_streams(season: Season, routers: Sequence[RouterNode], *, mean_seconds: float) -> None:
    """Each router leaves its streams for new ones, as when a scheduler breaks the protocol.

    What it has sent on them last may arrive behind what it sends on the new ones.
    """
    for router in routers:

        def happen(rng: random.Random, router: RouterNode = router) -> None:
            if rng.random() < 0.5:
                router.hold_up_streams(rng.uniform(0.0, 0.3))
            router.process.after(rng.uniform(0.0, 0.05), router.leave_streams)

        season.now_and_then(f"moods of {router.process.name}", mean_seconds, happen)


def freeze_processes(
    season: Season, processes: Sequence[Process], *, mean_seconds: float, most_seconds: float
) -> None:
    """Each process stands still, as if stopped, or finds that its clock has jumped."""
    for process in processes:

        def happen(rng: random.Random, process: Process = process) -> None:
            if process.is_up and not process.is_frozen:
                if rng.random() < 0.2:
                    process.jump_clock(rng.uniform(0.0, most_seconds / 2))
                else:
                    process.freeze(rng.uniform(0.0, most_seconds))

        season.now_and_then(f"pauses of {process.name}", mean_seconds, happen)


def slow_executors(season: Season, executors: Sequence[ExecutorNode], *, mean_seconds: float) -> None:
    """Each executor is slow: a little, or so much that it is taken to hang."""
    for node in executors:

        def happen(rng: random.Random, node: ExecutorNode = node) -> None:
            node.slow_down(rng.uniform(0.0, 0.4), rng.choice([3.0, 10.0, 100.0]))

        season.now_and_then(f"slowness of {node.name}", mean_seconds, happen)


def lying_executors(season: Season, executors: Sequence[ExecutorNode], *, mean_seconds: float) -> None:
    """Each executor answers everything wrongly for a while."""
    for node in executors:

        def happen(rng: random.Random, node: ExecutorNode = node) -> None:
            node.lie(rng.uniform(0.0, 0.6))

        season.now_and_then(f"bouts of {node.name}", mean_seconds, happen)
