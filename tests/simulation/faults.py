"""What breaks, and when. Each fault is a function that lets things happen to nodes and links from now on."""

from collections.abc import Callable, Sequence
from functools import partial

from tests.simulation.executor_node import ExecutorNode
from tests.simulation.links import Link
from tests.simulation.scheduler_node import SchedulerNode
from tests.simulation.world import World


def cut_links(world: World, links: Sequence[Link], *, mean_seconds: float, until: float) -> None:
    """Each link loses its streams now and then, until the given time."""
    for link in links:
        _now_and_then(world, f"cuts of {link.name}", link.cut, mean_seconds, until)


def crash_nodes(
    world: World, nodes: Sequence[ExecutorNode | SchedulerNode], *, mean_seconds: float, until: float
) -> None:
    """Each node crashes now and then and is back a moment later, with nothing in memory."""
    for node in nodes:
        _now_and_then(world, f"crashes of {node.name}", partial(_crash, world, node), mean_seconds, until)


def _crash(world: World, node: ExecutorNode | SchedulerNode) -> None:
    if node.is_up:
        node.crash()
        away_seconds = world.rng(f"absence of {node.name} at {world.now}").uniform(0.0, 0.3)
        world.after(away_seconds, node.start)


def _now_and_then(
    world: World, name: str, happen: Callable[[], None], mean_seconds: float, until: float
) -> None:
    rng = world.rng(name)
    at = rng.expovariate(1 / mean_seconds)
    while at < until:
        world.after(at, happen)
        at += rng.expovariate(1 / mean_seconds)
