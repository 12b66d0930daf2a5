"""Virtual time: a heap of events, one seed, one trace. Knows nothing of what is simulated."""

import hashlib
import heapq
import random
from collections.abc import Callable

LINES_SHOWN = 30


class SimulationError(AssertionError):
    """A law was broken. Tells the seed and the end of the trace."""


class World:
    """What happens when. Two worlds of one seed, given the same nodes, do the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.seconds_jumped = 0.0
        """By which clocks of processes have jumped, all together."""
        self.num_events = 0
        self.trace: list[str] = []
        self.laws: list[Callable[[], None]] = []
        """Asked after each event; one that does not hold raises."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def rng(self, name: str) -> random.Random:
        """Randomness of its own for one part: a new part does not change what the others draw."""
        return random.Random(f"{self.seed}/{name}")

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does `action` in `seconds` from now."""
        assert seconds >= 0
        self.at(self.now + seconds, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Does `action` at `time`; what is due at one time happens in the order of asking."""
        assert time >= self.now
        self._num_scheduled += 1
        heapq.heappush(self._events, (time, self._num_scheduled, action))

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.now * 1000:12.3f} ms  {who:<12} {what}")

    def run(self, until: Callable[[], bool], limit_seconds: float) -> None:
        """Lets things happen until `until` holds. Raises SimulationError: a law broke, or it never holds."""
        try:
            while not until():
                assert self._events, "nothing will ever happen again"
                assert self._events[0][0] <= limit_seconds, f"not at an end after {limit_seconds} seconds"
                self.now, _, action = heapq.heappop(self._events)
                self.num_events += 1
                action()
                for law in self.laws:
                    law()
        except Exception as error:
            raise SimulationError(self._report(error)) from error

    def check(self, law: Callable[[], None]) -> None:
        """Asks one law, at the end. Raises SimulationError."""
        try:
            law()
        except AssertionError as error:
            raise SimulationError(self._report(error)) from error

    @property
    def digest(self) -> str:
        """Equal for two runs that did the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def _report(self, error: Exception) -> str:
        lines = "\n".join(self.trace[-LINES_SHOWN:])
        return (
            f"seed {self.seed}, at {self.now * 1000:.3f} ms: {type(error).__name__}: {error}\n"
            f"... the last of {len(self.trace)} lines; `python -m tests.simulation {self.seed}` shows all:\n"
            f"{lines}"
        )
