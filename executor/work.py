"""The steps of one epoch on a device that is waited for: `EpochWork.execute` is a whole step, in order.

`late_work` is the same for a device that works while the host goes on.

Must not know: torch, protos, streams, which scheduler or client is asking.
"""

import time
from collections.abc import Callable

from executor.device import Runner, StepTimings, fault_of
from executor.inputs import build_inputs
from executor.plan import BatchPlan, StepResult
from executor.rows import Sampled
from executor.sequences import SequenceTable


class EpochWork:
    """The steps of one epoch, as the device's thread runs them."""

    __slots__ = ("_clock_ns", "_last_end_ns", "_runner", "is_over", "table")

    def __init__(
        self, runner: Runner, table: SequenceTable, *, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._runner = runner
        self._clock_ns = clock_ns
        self._last_end_ns: int | None = None
        self.table = table
        self.is_over = False
        """Set from outside when the epoch has ended: plans still waiting are not run."""

    def execute(self, plan: BatchPlan) -> tuple[StepResult, StepTimings]:
        """Run one plan. Raises PlanError when it does not fit what is known here."""
        start = self._clock_ns()
        idle_ns = 0 if self._last_end_ns is None else start - self._last_end_ns
        rows = self.table.apply(plan)
        if rows:
            batch = build_inputs(rows, self._runner.block_size)
            launched = self._clock_ns()
            output = self._runner.step(batch.inputs, batch.sample_rows)
            computed = self._clock_ns()
            result = self.table.commit(plan, batch.sampled_seq_ids, output.sampled, output.prompt_logprobs)
            end = self._clock_ns()
            forward_us, sample_us = output.forward_us, output.sample_us + (end - computed) // 1000
        else:
            launched = self._clock_ns()
            result = self.table.commit(plan, [], Sampled([], [], []))
            end = self._clock_ns()
            forward_us, sample_us = 0, (end - launched) // 1000
        self._last_end_ns = end
        return result, StepTimings(
            idle_us=idle_ns // 1000,
            inputs_us=(launched - start) // 1000,
            forward_us=forward_us,
            sample_us=sample_us,
            total_us=(end - start) // 1000,
        )

    def device_fault(self) -> BaseException | None:
        """What keeps the device from making a token; None when it can. To be asked after a failed step."""
        return fault_of(self._runner)
