"""The one thread that owns the device, and what it does for each plan.

Loading, warming up and every step run here and nowhere else, one after the other, so that the event loop
answers gRPC and health checks whatever the device does. If the next plan has already arrived, it starts the
moment the one before it ends, without a turn through the event loop.

`Runner` and `Pipeline` are described here as protocols: `runner` and `pipeline` implement them with torch,
which this module and its tests do without. `EpochWork.execute` is a whole step, in order.

Must not know: protos, streams, which scheduler or client is asking.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from executor.constraints import MatcherOf
from executor.inputs import SampleRow, StepBatch, StepInputs, build_inputs
from executor.plan import BatchPlan, PromptLogprobs, StepResult
from executor.rows import Sampled
from executor.sequences import SequenceTable

T = TypeVar("T")

IDLE_SECONDS: Final = 0.5
"""So long without a job is more than a pause between steps, or between the requests of one client."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What two processes must share for their numbers to mean the same; "" is *not known*."""

    model: str
    """digest of the weights"""
    tokenizer: str
    """digest of the vocabulary"""
    numerics: str
    """what the bits of the logits depend on beside the weights"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step chose, and the microseconds that the forward pass and the sampling took.

    `sampled` has one entry for each sampling row. `prompt_logprobs` are those of the stretches that
    `StepInputs.scored` names, without any that are no numbers; they belong to the forward pass.
    """

    sampled: Sampled
    prompt_logprobs: list[PromptLogprobs]
    forward_us: int
    sample_us: int


@dataclass(frozen=True, slots=True)
class LateOutput:
    """What a step that was waited for later chose, and the device's microseconds.

    They are those of standing still before it, of the forward pass, and of the sampling.
    """

    sampled: Sampled
    prompt_logprobs: list[PromptLogprobs]
    idle_us: int
    forward_us: int
    sample_us: int


class Pipeline(Protocol):
    """A device that is asked for steps and waited for later."""

    def launch(self, batch: StepBatch, settle_before: Callable[[], None]) -> Any:
        """Ask for a step. What is returned can `wait()`, in any thread, and is to be collected."""

    def collect(self, launched: Any) -> LateOutput:
        """A launched step's results, in the order of the launches."""

    def forget(self) -> None:
        """Drop the memory of the last step: the next one takes no tokens and no idle time from it."""


class Runner(Protocol):
    """A model on a device, as the protocol side needs it. Called from the device's thread alone."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that plans may use."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    @property
    def fingerprints(self) -> Fingerprints:
        """What the parts are."""

    @property
    def dtype(self) -> str:
        """Number type of the computation."""

    @property
    def device(self) -> str:
        """Kind of device."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of optional abilities, such as "logprobs"."""

    @property
    def row_invariant(self) -> bool:
        """Whether a token's logits are bit-identical whatever the batch, the chunks and the cache."""

    @property
    def matcher_of(self) -> MatcherOf | None:
        """What may follow output ids under a constraint; None where outputs cannot be constrained."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The device as one that works while the host goes on; None when each step is waited for."""

    def warm_up(self) -> None:
        """Make one real token. Raises when the device cannot."""

    def work_ahead(self) -> bool:
        """Do a few milliseconds of what later steps would wait for; returns whether there was any."""

    def step(self, inputs: StepInputs, sample_rows: Sequence[SampleRow]) -> StepOutput:
        """Compute one step."""


def fault_of(runner: Runner) -> BaseException | None:
    """What keeps the device from making a token; None when it can. Makes one."""
    try:
        runner.warm_up()
    except Exception as error:  # noqa: BLE001 - whatever it is, the device is lost
        return error
    return None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one step's time went, microseconds. `idle_us` is the gap since the epoch's step before."""

    idle_us: int = 0
    inputs_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    total_us: int = 0


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


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """What a job returns when it has asked the device for something and not waited for it."""

    wait: Callable[[], None]
    """returns when it is there; called in another thread"""
    finish: Callable[[], T]
    """the outcome; called in the device's thread, as a job of its own. Must not raise"""


class DeviceThread:
    """Runs functions one after the other in a thread of its own.

    What is there `Later` is waited for in a second thread, so that the jobs behind it run meanwhile. Both
    threads are daemons: a step that never returns does not keep the process from ending.

    `work_ahead`, once it is set, is called while there has been no job for `IDLE_SECONDS`, until it returns
    False or a job comes. It must not raise.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.work_ahead: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiter: threading.Thread | None = None

    def submit(self, job: Callable[[], T | Later[T]], done: Callable[[T], None]) -> None:
        """Run `job` after all before it; then `done` on the event loop with its outcome.

        `job` must not raise. Outcomes that are there later come in the order of their jobs.
        """

        def run() -> None:
            outcome = job()
            if isinstance(outcome, Later):
                self._finish_later(outcome, done)
            else:
                self._loop.call_soon_threadsafe(done, outcome)

        self._jobs.put(run)

    def _finish_later(self, later: Later[T], done: Callable[[T], None]) -> None:
        def finish() -> None:
            self._loop.call_soon_threadsafe(done, later.finish())

        def wait() -> None:
            # What is wrong with the device shows again where the outcome is made, and is dealt with there.
            with suppress(Exception):
                later.wait()
            self._jobs.put(finish)

        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="device-waiter", daemon=True)
            self._waiter.start()
        self._waits.put(wait)

    def _wait(self) -> None:
        while True:
            self._waits.get()()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` after all before it and hand on what it returns or raises."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> tuple[T | None, BaseException | None]:
            try:
                return function(), None
            except Exception as error:  # noqa: BLE001 - handed on to the caller
                return None, error

        def done(outcome: tuple[T | None, BaseException | None]) -> None:
            if future.cancelled():
                return
            value, error = outcome
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]  # None only if T is None

        self.submit(job, done)
        return await future

    def close(self) -> bool:
        """End the thread after what it has; wait a second for it at most. Whether it has ended."""
        self._jobs.put(None)
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        seconds = IDLE_SECONDS
        while True:
            with suppress(Empty):
                return self._jobs.get(timeout=seconds)
            if not self.work_ahead():
                return self._jobs.get()
            seconds = 0.0
