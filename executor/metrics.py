"""What an executor reports to Prometheus: its steps, counted on the event loop as the device returns them.

It must not know the ids of sequences, streams, or which scheduler is asking.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from executor.device import StepTimings
from rpc.histogram import Histogram
from rpc.metrics import counter, gauge, histograms

_PHASES: Final = ("total", "inputs", "forward", "sample", "idle")
_BOUNDS_US: Final = tuple(
    1e3 * ms for ms in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 5000)
)


class ExecutorMetrics:
    """The steps of one executor since it started; `num_sequences` tells how many it holds now."""

    def __init__(self, num_sequences: Callable[[], int]) -> None:
        self._num_sequences = num_sequences
        self._phases: dict[tuple[str, ...], Histogram] = {
            (phase,): Histogram(_BOUNDS_US) for phase in _PHASES
        }
        self._num_tokens = 0
        self._num_failed = 0

    def step(self, num_tokens: int, timings: StepTimings) -> None:
        """A step with rows has ended well."""
        self._num_tokens += num_tokens
        for phase in _PHASES:
            self._phases[phase,].observe(getattr(timings, f"{phase}_us"))

    def step_failed(self) -> None:
        """A step has no result: its epoch is over."""
        self._num_failed += 1

    def families(self) -> Iterator[Metric]:
        """All of them."""
        yield gauge(
            "executor_num_sequences",
            "Sequences that the scheduler has placed here and not released.",
            self._num_sequences(),
        )
        yield counter("executor_tokens", "Tokens computed, prompt and output alike.", self._num_tokens)
        yield counter(
            "executor_failed_steps", "Steps without a result: their epoch was over.", self._num_failed
        )
        yield histograms(
            "executor_step_seconds",
            "Where the time of steps with rows went; idle is the gap before a step, no part of its total.",
            ("phase",),
            self._phases,
            1e-6,
        )
