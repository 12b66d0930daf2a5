"""Distributions of what happened since start, as plain counts that the core keeps for any reader.

Times are in seconds unless a name says microseconds. Pure.
"""

from dataclasses import dataclass, field
from typing import Final

from rpc.histogram import Histogram

STEP_US_BOUNDS: Final = tuple(
    1e3 * ms for ms in (0.5, 1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 5000)
)
IDLE_US_BOUNDS: Final = tuple(1e3 * ms for ms in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 100, 1000))
QUEUE_BOUNDS: Final = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ROWS_BOUNDS: Final = (0.0, *(float(2**power) for power in range(11)))


@dataclass(slots=True)
class Meters:
    """Measurements over all executors of one scheduler."""

    step_us: Histogram = field(default_factory=lambda: Histogram(STEP_US_BOUNDS))
    """Time that the executor took for a step."""
    idle_us: Histogram = field(default_factory=lambda: Histogram(IDLE_US_BOUNDS))
    """How long it had been idle before."""
    wall_seconds: float = 0.0
    """All steps as seen from here: each from when it was sent, or the one before answered, to its answer."""
    overhead_seconds: float = 0.0
    """The part of it that the executor did not compute: the network, and planning that came too late."""
    rows: Histogram = field(default_factory=lambda: Histogram(ROWS_BOUNDS))
    """Sequences in a step."""
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))
    """From arrival to the first admission."""
    steps_to_free: Histogram = field(default_factory=lambda: Histogram((0.0, 1.0, 2.0)))
    """Steps in flight when a running sequence was aborted: these still compute it, the next does not."""

    def step(self, num_rows: int, total_us: int, idle_us: int, wall_seconds: float) -> None:
        """One step was answered."""
        self.rows.observe(num_rows)
        self.step_us.observe(total_us)
        self.idle_us.observe(idle_us)
        wall_seconds = max(0.0, wall_seconds)
        self.wall_seconds += wall_seconds
        self.overhead_seconds += max(0.0, wall_seconds - total_us / 1e6)
