"""What breaks, and when: functions that let things happen to processes and links from now on."""

import random
from collections.abc import Callable, Sequence

from tests.simulation.executor_node import ExecutorNode
from tests.simulation.links import Link
from tests.simulation.process import Process
from tests.simulation.router_node import RouterNode
from tests.simulation.scheduler_node import SchedulerNode
from tests.simulation.world import World

Node = ExecutorNode | SchedulerNode | RouterNode


def cut_links(world: World, links: Sequence[Link], *, mean_seconds: float, until: float) -> None:
    """Each link loses its streams now and then, until the given time; in between it may be slow."""
    for link in links:

        def happen(rng: random.Random, link: Link = link) -> None:
            if rng.random() < 0.25:
                link.slow_down(rng.uniform(0.0, 0.2))
            else:
                link.cut()

        _now_and_then(world, f"cuts of {link.name}", happen, mean_seconds, until)


def crash_nodes(world: World, nodes: Sequence[Node], *, mean_seconds: float, until: float) -> None:
    """Each node crashes now and then and is back a moment later, with nothing in memory."""
    for node in nodes:

        def happen(rng: random.Random, node: Node = node) -> None:
            if node.process.is_up:
                node.crash()
                world.after(rng.uniform(0.0, 0.3), node.start)

        _now_and_then(world, f"crashes of {node.process.name}", happen, mean_seconds, until)


def leave_streams(world: World, routers: Sequence[RouterNode], *, mean_seconds: float, until: float) -> None:
    """Each router leaves its streams for new ones now and then, as when a scheduler breaks the protocol.

    What it has sent on them last may arrive behind what it sends on the new ones.
    """
    for router in routers:

        def happen(rng: random.Random, router: RouterNode = router) -> None:
            if rng.random() < 0.5:
                router.hold_up_streams(rng.uniform(0.0, 0.3))
            router.process.after(rng.uniform(0.0, 0.05), router.leave_streams)

        _now_and_then(world, f"moods of {router.process.name}", happen, mean_seconds, until)


def freeze_processes(
    world: World, processes: Sequence[Process], *, mean_seconds: float, most_seconds: float, until: float
) -> None:
    """Each process stands still now and then, as if stopped, or finds that its clock has jumped."""
    for process in processes:

        def happen(rng: random.Random, process: Process = process) -> None:
            if process.is_up and not process.is_frozen:
                if rng.random() < 0.2:
                    process.jump_clock(rng.uniform(0.0, most_seconds / 4))
                else:
                    process.freeze(rng.uniform(0.0, most_seconds))

        _now_and_then(world, f"pauses of {process.name}", happen, mean_seconds, until)


def _now_and_then(
    world: World, name: str, happen: Callable[[random.Random], None], mean_seconds: float, until: float
) -> None:
    rng = world.rng(name)
    at = rng.expovariate(1 / mean_seconds)
    while at < until:
        world.after(at, lambda: happen(rng))
        at += rng.expovariate(1 / mean_seconds)
