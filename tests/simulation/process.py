"""One process of the simulation: it lives, dies, freezes, and has a clock of its own.

Whatever a node does goes through its process, so that nothing is done by the dead, and what falls to the
frozen is done when they thaw, in order.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.links import Link


class Process:
    """Starts dead."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_up = False
        self.life = 0
        """Counts starts and crashes: what was begun in one life is not done in another."""
        self.num_acts = 0
        self.links: list[Link] = []
        """Ways to it and from it; they break when it crashes."""
        self.on_clock_jump: Callable[[], None] = lambda: None
        self._frozen_until = 0.0
        self.clock_ahead = 0.0

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.world.now + self.clock_ahead

    @property
    def is_frozen(self) -> bool:
        return self.world.now < self._frozen_until

    def start(self) -> None:
        assert not self.is_up
        self.world.note(self.name, "starts")
        self.is_up = True
        self.life += 1
        self._frozen_until = 0.0

    def crash(self) -> None:
        """As by kill -9: its peers learn it from their streams."""
        self.world.note(self.name, "crashes")
        self.is_up = False
        self.life += 1
        for link in self.links:
            link.cut()

    def freeze(self, seconds: float) -> None:
        """As by SIGSTOP, and SIGCONT later."""
        self.world.note(self.name, f"freezes for {seconds * 1000:.0f} ms")
        self._frozen_until = max(self._frozen_until, self.world.now + seconds)

    def jump_clock(self, seconds: float) -> None:
        """Its clock goes forward, as after a pause of the whole machine."""
        self.world.note(self.name, f"'s clock jumps by {seconds * 1000:.0f} ms")
        self.world.seconds_jumped += seconds
        self.clock_ahead += seconds
        self.act(self.on_clock_jump)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does `action` in `seconds`, unless it has died by then."""
        life = self.life
        self.world.after(seconds, lambda: self.act(action, life))

    def act(self, action: Callable[[], None], life: int | None = None) -> None:
        """Does `action` now, or when it has thawed; never in another life than this (or than `life`)."""
        life = self.life if life is None else life
        if not self.is_up or self.life != life:
            return
        if self.is_frozen:
            self.world.at(self._frozen_until, lambda: self.act(action, life))
            return
        self.num_acts += 1
        action()
