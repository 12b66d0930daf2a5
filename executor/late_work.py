"""The steps of one epoch on a device that works while the host goes on.

    plan k comes      apply, launch
    plan k+1 comes    apply, launch: its rows begin with tokens that only the device has
    step k is done    collect, settle: finds which sequences have ended; their rows in step k+1 are skipped

So ends are detected one step late, and nobody notices: this is what the protocol has ghosts for.

Must not know: torch, protos, streams.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from executor.device import Pipeline, Runner, StepTimings, fault_of
from executor.device_thread import Later
from executor.inputs import build_inputs
from executor.plan import BatchPlan, StepResult
from executor.rows import Sampled
from executor.sequences import Flight, PlanError, SequenceTable

Outcome = tuple[StepResult, StepTimings]


class _Step:
    """One launched step, settled once."""

    def __init__(self, pipeline: Pipeline, table: SequenceTable, flight: Flight, inputs_us: int) -> None:
        self.pipeline = pipeline
        self.table = table
        self.flight = flight
        self.inputs_us = inputs_us
        self.launched: Any = None
        """None where the plan has no rows."""
        self.sampled_seq_ids: list[int] = []
        self._outcome: Outcome | None = None

    def wait(self) -> None:
        if self.launched is not None:
            self.launched.wait()

    def outcome(self) -> Outcome:
        if self._outcome is None:
            self._outcome = self._settled()
        return self._outcome

    def _settled(self) -> Outcome:
        if self.launched is None:
            result = self.table.settle(self.flight, [], Sampled([], [], []))
            return result, StepTimings(inputs_us=self.inputs_us, total_us=self.inputs_us)
        output = self.pipeline.collect(self.launched)
        result = self.table.settle(self.flight, self.sampled_seq_ids, output.sampled, output.prompt_logprobs)
        return result, StepTimings(
            idle_us=output.idle_us,
            inputs_us=self.inputs_us,
            forward_us=output.forward_us,
            sample_us=output.sample_us,
            # Its inputs are made while the step before runs; where the device waits for them, it is idle.
            total_us=output.forward_us + output.sample_us,
        )


class LateEpochWork:
    """What `EpochWork` is for a device that is waited for."""

    def __init__(
        self,
        runner: Runner,
        pipeline: Pipeline,
        table: SequenceTable,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._runner = runner
        self._pipeline = pipeline
        self._clock_ns = clock_ns
        self._unsettled: deque[_Step] = deque()
        self._has_failed = False
        self.table = table
        self.is_over = False
        """Set from outside when the epoch has ended: plans still waiting are not run."""
        self._has_begun = False

    def execute(self, plan: BatchPlan) -> Later[Outcome]:
        """Launch one plan. What goes wrong is raised when it is finished, behind the plans before."""
        if self._has_failed:
            return Later(_nothing, _raising(PlanError("the step before it failed")))
        try:
            step = self._launched(plan)
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._has_failed = True
            return Later(_nothing, _raising(error))
        self._unsettled.append(step)
        return Later(step.wait, lambda: self._finish(step))

    def device_fault(self) -> BaseException | None:
        """What keeps the device from making a token; None when it can. To be asked after a failed step."""
        return fault_of(self._runner)

    def _launched(self, plan: BatchPlan) -> _Step:
        start = self._clock_ns()
        if not self._has_begun:
            # Not where the epoch is opened: until now the device's thread may have run another one.
            self._pipeline.forget()
            self._has_begun = True
        rows = self.table.apply(plan)
        batch = build_inputs(rows, self._runner.block_size) if rows else None
        flight = self.table.advance(plan)
        step = _Step(self._pipeline, self.table, flight, (self._clock_ns() - start) // 1000)
        if batch is not None:
            step.sampled_seq_ids = batch.sampled_seq_ids
            step.launched = self._pipeline.launch(batch, self._settle_all)
        return step

    def _settle_all(self) -> None:
        """Those that are under way, before a step behind them goes on."""
        for step in self._unsettled:
            step.outcome()

    def _finish(self, step: _Step) -> Outcome:
        assert self._unsettled[0] is step, "steps finish in their order"
        outcome = step.outcome()
        self._unsettled.popleft()
        return outcome


def _nothing() -> None:
    pass


def _raising(error: Exception) -> Callable[[], Outcome]:
    def finish() -> Outcome:
        raise error

    return finish
