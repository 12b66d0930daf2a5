"""The gRPC face of the executor: moves messages between streams, the session and the device's thread.

The session decides (who holds, which plan runs, who gets a result); the device computes; this module only
carries. All of it but the steps themselves runs on the event loop.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.message import DecodeError

from executor import wire
from executor.device import Runner, StepTimings
from executor.device_thread import DeviceThread, Later
from executor.late_work import LateEpochWork
from executor.metrics import ExecutorMetrics
from executor.plan import DRAFT_TOKENS, BatchPlan, StepResult
from executor.sequences import PlanError, SequenceTable
from executor.session import Answer, Broken, Held, NotOpen, Run, Session, Superseded
from executor.traces import StepTraces
from executor.work import EpochWork
from protos.v1 import executor_pb2, executor_pb2_grpc
from rpc.errors import RequestError, abort, shortened

SERVICE_NAME: Final = "chairlift.v1.Executor"

# Metadata are printable ASCII, and a scheduler is named as somebody liked: the rest is percent-encoded.
_AS_IT_IS: Final = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
_log = structlog.get_logger()

T = TypeVar("T")
_Work = EpochWork | LateEpochWork

Context = grpc.aio.ServicerContext[Any, Any]


class _Leaving(Exception):  # noqa: N818 - it ends a call, it is no failure
    """This executor has nothing left to do and goes away."""


_STATUS: Final[dict[type[Exception], grpc.StatusCode]] = {
    Held: grpc.StatusCode.PERMISSION_DENIED,
    NotOpen: grpc.StatusCode.FAILED_PRECONDITION,
    Superseded: grpc.StatusCode.ABORTED,
    Broken: grpc.StatusCode.DATA_LOSS,
    _Leaving: grpc.StatusCode.UNAVAILABLE,
    DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
}


@dataclass(slots=True)
class _Call:
    """One Execute call: what is to be sent on it, its end included."""

    outbox: asyncio.Queue[executor_pb2.StepResult | Exception | None] = field(default_factory=asyncio.Queue)
    """Results; then one exception that becomes the status, or None for OK."""
    num_owed: int = 0
    """Plans received here whose results are not in the outbox."""
    is_half_closed: bool = False
    """The client sends no more plans."""

    def answer(self, result: executor_pb2.StepResult) -> None:
        self.num_owed -= 1
        self.outbox.put_nowait(result)
        self._end_if_all_is_sent()

    def half_close(self) -> None:
        self.is_half_closed = True
        self._end_if_all_is_sent()

    def end(self, reason: Exception) -> None:
        self.outbox.put_nowait(reason)

    def _end_if_all_is_sent(self) -> None:
        if self.is_half_closed and self.num_owed == 0:
            self.outbox.put_nowait(None)


class ExecutorServicer(executor_pb2_grpc.ExecutorServicer):
    """Serves one runner. Made on the event loop; `ready` puts it into service.

    `token_budget` tells the most tokens in a step on a kind of device, `max_window` is the most unanswered
    plans, `grace_seconds` how long it drains. `on_device_lost` is told, with the reason, when the device
    cannot make a token any more.
    """

    def __init__(
        self,
        device: DeviceThread,
        *,
        max_num_seqs: int,
        token_budget: Callable[[str], int],
        max_window: int,
        grace_seconds: float,
        on_device_lost: Callable[[BaseException], None],
        traces: StepTraces | None = None,
    ) -> None:
        self._device = device
        self._traces = traces
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._max_num_batched_tokens = 0  # until it is known what the device is
        self._max_window = max_window
        self._on_device_lost = on_device_lost
        self._runner: Runner | None = None
        self._instance_id = secrets.token_hex(8)
        self._session: Session[executor_pb2.StepResult] = Session(max_window)
        self._work: _Work | None = None
        self._calls: dict[int, _Call] = {}
        self._grace_seconds = grace_seconds
        self._leaves_at: float | None = None  # on the event loop's clock; set when it begins to drain
        self._drained = asyncio.Event()
        self.metrics = ExecutorMetrics(lambda: 0 if self._work is None else self._work.table.num_sequences)

    def ready(self, runner: Runner) -> None:
        """Serve with `runner`, which has been loaded and has made a token."""
        self._runner = runner
        self._max_num_batched_tokens = self._token_budget(runner.device)

    async def drain(self) -> None:
        """Say `draining` in every result from now on; return when the scheduler has nothing left here."""
        self._leaves_at = asyncio.get_running_loop().time() + self._grace_seconds
        self._check_drained()
        await self._drained.wait()
        self._end_calls(_Leaving("the executor has drained and shuts down"))

    # --- the two methods of the protocol --------------------------------------------------------

    async def Open(self, request: executor_pb2.OpenRequest, context: Context) -> executor_pb2.OpenResponse:
        """See executor.proto."""
        if self._runner is None:
            await abort(
                context,
                RequestError(grpc.StatusCode.UNAVAILABLE, "the executor is still loading its model"),
            )
        if not request.scheduler_id:
            await abort(
                context,
                RequestError(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "scheduler_id is empty; it names the holder",
                    "scheduler_id",
                ),
            )
        past_epoch, epoch = self._session.epoch, secrets.randbits(63) + 1
        try:
            term = self._session.open(request.scheduler_id, request.term, epoch)
        except Held as held:
            _log.warning(
                "open_refused", scheduler_id=request.scheduler_id, term=request.term, held_by=str(held)
            )
            await _end_with(context, held)
        self._end_epoch(
            NotOpen("this stream is older than the epoch")
            if past_epoch is None
            else self._session.refusal(past_epoch)
        )
        runner = self._runner
        table = SequenceTable(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_seq_len=runner.max_seq_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            takes_draft_tokens=DRAFT_TOKENS in runner.features,
            matcher_of=runner.matcher_of,
        )
        pipeline = runner.pipeline
        self._work = EpochWork(runner, table) if pipeline is None else LateEpochWork(runner, pipeline, table)
        _log.info("opened", scheduler_id=request.scheduler_id, term=term, epoch=epoch)
        return wire.open_response(
            runner,
            epoch=epoch,
            instance_id=self._instance_id,
            term=term,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_window=self._max_window,
        )

    async def Execute(  # type: ignore[override]
        self, request_iterator: AsyncIterator[executor_pb2.BatchPlan], context: Context
    ) -> None:
        """See executor.proto.

        Writes through the context and not as a generator: when the client breaks off, a coroutine is
        cancelled where it stands and lets go of its stream at once. Refuses nothing before the first plan is
        in: a client of grpc.aio that is writing when its call ends sees INTERNAL in place of the status
        (grpc/grpc#36066).
        """
        stream = self._session.attach()
        call = self._calls[stream] = _Call()
        reader = asyncio.create_task(self._read(stream, call, request_iterator))
        try:
            while (item := await call.outbox.get()) is not None:
                if isinstance(item, Exception):
                    await _end_with(context, item)
                await context.write(item)
        finally:
            reader.cancel()
            del self._calls[stream]
            self._session.detach(stream)
            self._check_drained()

    async def _read(self, stream: int, call: _Call, plans: AsyncIterator[executor_pb2.BatchPlan]) -> None:
        try:
            async for message in plans:
                self._on_plan(stream, call, wire.plan_from_proto(message))
        except Broken as broken:
            _log.error("epoch_over", reason=str(broken))
            self._end_epoch(broken)
        except (Held, NotOpen, Superseded, DecodeError) as reason:
            call.end(reason)
        else:
            call.half_close()

    def _on_plan(self, stream: int, call: _Call, plan: BatchPlan) -> None:
        before = self._session.current_stream
        action = self._session.receive(stream, plan)
        if before not in {None, stream}:
            _log.info("stream_superseded", step_id=plan.step_id)
            self._calls[before].end(Superseded("a newer stream of this epoch has taken over"))
        call.num_owed += 1
        if isinstance(action, Answer):
            call.answer(action.result)
        elif isinstance(action, Run):
            work = self._work
            assert work is not None, "an open session has work"
            self._device.submit(
                lambda: _execute(work, plan), lambda outcome: self._on_executed(plan, outcome)
            )

    # --- what comes back from the device --------------------------------------------------------

    def _on_executed(self, plan: BatchPlan, outcome: "_Outcome") -> None:
        if isinstance(outcome, _Failed):
            self.metrics.step_failed()
            if outcome.device_lost is not None:
                self._on_device_lost(outcome.device_lost)
            if self._session.epoch == plan.epoch:
                _log.error("epoch_over", step_id=plan.step_id, reason=outcome.sentence)
                self._session.fail(plan.epoch, outcome.sentence)
                self._end_epoch(Broken(outcome.sentence))
        elif outcome is not None:
            result, timings = outcome
            _log.debug("step", step_id=plan.step_id, rows=len(plan.seq_ids), total_us=timings.total_us)
            if plan.seq_ids:
                self.metrics.step(sum(plan.num_tokens), timings)
            message = self._result_message(result, timings)
            for stream in self._session.complete(plan.epoch, plan.step_id, message):
                self._calls[stream].answer(message)
            if self._traces is not None and plan.epoch == self._session.epoch:
                self._traces.step(plan, result, timings, time.monotonic())
        self._check_drained()

    def _result_message(self, result: StepResult, timings: StepTimings) -> executor_pb2.StepResult:
        if self._leaves_at is None:
            return wire.result_to_proto(result, timings)
        left = self._leaves_at - asyncio.get_running_loop().time()
        return wire.result_to_proto(result, timings, draining=True, leaves_in_seconds=left)

    def _end_epoch(self, reason: Exception) -> None:
        if self._work is not None:
            self._work.is_over = True
            self._work = None
        if self._traces is not None:
            self._traces.epoch_over(time.monotonic())
        self._end_calls(reason)

    def _end_calls(self, reason: Exception) -> None:
        for call in self._calls.values():
            call.end(reason)

    def _check_drained(self) -> None:
        """Drained: nobody is connected, or nothing runs and no sequence is left.

        The table belongs to the device's thread; while no plan is with it, it stands still.
        """
        if self._leaves_at is None or self._session.num_running > 0:
            return
        if not self._session.is_connected or self._work is None or self._work.table.num_sequences == 0:
            self._drained.set()


# --- on the device's thread -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that has no result, and why the device is lost if it is."""

    sentence: str
    device_lost: BaseException | None = None


_Outcome = tuple[StepResult, StepTimings] | _Failed | None


def _execute(work: _Work, plan: BatchPlan) -> _Outcome | Later[_Outcome]:
    """Run one plan; None when its epoch has ended meanwhile."""
    outcome = _guarded(work, plan, lambda: work.execute(plan))
    if not isinstance(outcome, Later):
        return outcome
    finish = outcome.finish
    return Later(outcome.wait, lambda: _guarded(work, plan, finish))


def _guarded(work: _Work, plan: BatchPlan, step: Callable[[], T]) -> T | _Failed | None:
    if work.is_over:
        return None
    try:
        return step()
    except PlanError as error:
        return _fail(work, f"step {plan.step_id}: {error}")
    except Exception as error:  # noqa: BLE001 - what failed is unknown: all state of the epoch is in doubt
        _log.exception("step_failed", step_id=plan.step_id)
        sentence = f"step {plan.step_id} failed: {type(error).__name__}: {error}"
        return _fail(work, sentence, device_lost=work.device_fault())


def _fail(work: _Work, sentence: str, device_lost: BaseException | None = None) -> _Failed:
    work.is_over = True  # the plans behind this one are already with the device
    return _Failed(sentence, device_lost)


# --- how calls end --------------------------------------------------------------------------------


async def _end_with(context: Context, reason: Exception) -> NoReturn:
    """End a call with the status the protocol gives for `reason`."""
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(reason, Held):
        holder = quote(shortened(reason.scheduler_id), safe=_AS_IT_IS)
        trailers = (("chairlift-scheduler-id", holder), ("chairlift-term", str(reason.term)))
    elif isinstance(reason, _Leaving):
        trailers = (("chairlift-leaving", "1"),)
    await context.abort(_STATUS[type(reason)], shortened(str(reason)), trailers)
