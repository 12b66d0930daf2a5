"""The life of one executor: open it, drive its epoch, lose it, open it again.

An executor that answered wrongly rehearses before it gets any client's request again (`rehearsal`).

How an epoch is driven is `epoch`'s business; which executors there are, `executor_directory`'s.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from rpc.address import Address
from rpc.tls import Tls
from scheduler import rehearsal, wire
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.epoch import Epoch, Loss
from scheduler.executor_client import (
    EpochLostError,
    ExecutorClient,
    ExecutorUnreachableError,
    HeldError,
    LeftError,
    Opened,
)
from scheduler.running_scheduler import RunningScheduler

_log = structlog.get_logger()
RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 1.0
MAX_FENCED_SECONDS = 30.0
FENCE_LOOK_SECONDS = 1.0
STEP_TIMEOUT_SECONDS = 10.0
_TWIN_GONE_LOOKS = 5


def _backoff(attempt: int, at_most: float = MAX_RETRY_SECONDS) -> float:
    """Seconds until the next attempt; with jitter, so that many do not ask at once."""
    return min(at_most, RETRY_SECONDS * 2.0 ** min(attempt, 8)) * random.uniform(0.5, 1.0)  # noqa: S311


class ExecutorLoop:
    """Serves one address, for as long as there is an executor."""

    def __init__(
        self,
        scheduler: RunningScheduler,
        address: Address,
        *,
        scheduler_id: str,
        reattach_seconds: float,
        max_message_bytes: int,
        step_timeout_seconds: float = STEP_TIMEOUT_SECONDS,
        tls: Tls | None = None,
        term: int = 0,
        on_held: Callable[[str, int], None] | None = None,
    ) -> None:
        """`term`: of the lease, or 0. `on_held(holder, term)`: called if another scheduler has it."""
        self._scheduler = scheduler
        self._term = term
        self._on_held = on_held
        self._step_timeout_seconds = step_timeout_seconds
        self._num_late = 0  # epochs in a row in which the first step was late
        self._is_doubted = False  # it answered wrongly, and has not passed a rehearsal since
        self._address = address
        self._scheduler_id = scheduler_id
        self._reattach_seconds = reattach_seconds
        self._client = ExecutorClient(address, max_message_bytes=max_message_bytes, tls=tls)

    @property
    def is_attached(self) -> bool:
        """Whether an epoch of this executor is being driven."""
        return str(self._address) in self._scheduler.core.executors

    async def run(self) -> None:
        """Runs until cancelled."""
        executor_id = str(self._address)
        log = _log.bind(executor=executor_id)
        try:
            while True:
                opened = await self._open_fitting(executor_id)
                wake = asyncio.Event()
                self._scheduler.executor_attached(executor_id, opened, wake)
                capacity = opened.capacity
                log.info(
                    "executor_attached",
                    instance_id=capacity.instance_id,
                    num_blocks=capacity.num_blocks,
                    block_size=capacity.block_size,
                    max_num_seqs=capacity.max_num_seqs,
                    max_num_batched_tokens=capacity.max_num_batched_tokens,
                    num_seats=self._scheduler.core.executors[executor_id].max_num_seqs,
                    row_invariant=capacity.row_invariant,
                )
                loss = Loss("the scheduler is shutting down")
                try:
                    loss = await self._drive_epoch(executor_id, wake)
                    self._is_doubted = loss.is_unfit
                finally:
                    self._scheduler.executor_lost(executor_id, loss.reason, is_crash=loss.is_crash)
                log.warning("executor_lost", reason=loss.reason, is_crash=loss.is_crash)
                # Not at once: an executor that breaks every epoch must not spin, and a scheduler that has
                # just taken it over needs a moment to open its stream, which is what lets it hold the
                # executor.
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._scheduler.executor_given_up(executor_id)
            await self._client.close()

    async def _open_fitting(self, executor_id: str) -> Opened:
        """Opens the executor again and again until it may be attached."""
        attempt = num_fenced = 0
        while True:
            opened = await self._open(executor_id)
            twin = self._scheduler.twin_of(executor_id, opened.capacity.instance_id)
            if twin is not None:
                self._scheduler.executor_missing(executor_id, f"{executor_id} is the same executor as {twin}")
                await self._until_gone(twin)
                continue
            refusal = self._scheduler.refusal_of(executor_id, opened.capacity)
            if refusal is not None:
                self._scheduler.executor_missing(executor_id, refusal)
                await asyncio.sleep(_backoff(attempt))
                attempt += 1
            elif not self._is_doubted:
                return opened
            elif (fault := await self._rehearse(executor_id, opened)) is None:
                self._is_doubted = False  # opened again, it will know nothing of its rehearsal
            else:
                seconds = _backoff(num_fenced, MAX_FENCED_SECONDS)
                num_fenced += 1
                _log.error("executor_fenced", executor=executor_id, seconds=round(seconds, 1), fault=fault)
                if not await self._sit_out(executor_id, opened.capacity.instance_id, seconds, fault):
                    num_fenced = 0

    async def _rehearse(self, executor_id: str, opened: Opened) -> str | None:
        """Lets it compute a made-up request; returns what went wrong, or None."""
        scheduler = RunningScheduler(SchedulerCore(), on_serving=lambda *_: None)
        wake = asyncio.Event()
        scheduler.executor_attached(executor_id, opened, wake)
        count = rehearsal.num_tokens(scheduler.core.max_total_tokens)
        request = rehearsal.request(opened.capacity, count, wire.greedy_sampling(count))
        try:
            seq = scheduler.core.submit(request, now=scheduler.now())
        except RefusedError as error:
            return error.message
        driving = asyncio.create_task(self._epoch(scheduler, executor_id, wake).run(self._client.execute))
        ending = asyncio.create_task(scheduler.drained())
        try:
            await asyncio.wait([driving, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return rehearsal.fault_of(seq)
            loss = driving.result()
        finally:
            driving.cancel()
            ending.cancel()
            await asyncio.gather(driving, ending, return_exceptions=True)
        if loss.held is not None:
            self._tell_held(loss.held)
        return loss.reason

    async def _sit_out(self, executor_id: str, instance_id: str, seconds: float, fault: str) -> bool:
        """Waits out a fence; returns False once another process answers, which is not the one to blame."""
        fenced = f"the executor at {executor_id} is fenced until it answers rightly: {fault}"
        until = self._scheduler.now() + seconds
        while (left := until - self._scheduler.now()) > 0:
            self._scheduler.executor_missing(executor_id, fenced)
            await asyncio.sleep(min(left, FENCE_LOOK_SECONDS))
            opened = await self._open(executor_id)
            if opened.capacity.instance_id != instance_id:
                return False
        return True

    async def _until_gone(self, executor_id: str) -> None:
        """Returns once that executor has been detached for a while: opening its twin would end its epoch."""
        num_looks = 0
        while num_looks < _TWIN_GONE_LOOKS:
            await asyncio.sleep(MAX_RETRY_SECONDS)
            num_looks = 0 if executor_id in self._scheduler.core.executors else num_looks + 1

    async def _open(self, executor_id: str) -> Opened:
        attempt = 0
        while True:
            try:
                return await self._client.open(self._scheduler_id, self._term)
            except (ExecutorUnreachableError, LeftError) as error:
                reason = f"waiting for an executor at {executor_id} ({error})"
            except (HeldError, EpochLostError) as error:
                self._tell_held(error)
                # Asking again takes nothing from the holder: it is granted only when the holder has gone.
                reason = f"the executor at {executor_id} belongs to another scheduler ({error})"
            self._scheduler.executor_missing(executor_id, reason)
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    def _tell_held(self, error: Exception) -> None:
        if isinstance(error, HeldError) and self._on_held is not None:
            self._on_held(error.holder, error.term)

    async def _drive_epoch(self, executor_id: str, wake: asyncio.Event) -> Loss:
        """Drives one epoch; returns why it is over."""
        loss = await self._epoch(self._scheduler, executor_id, wake).run(self._client.execute)
        if loss.is_late:
            has_answered = self._scheduler.core.executors[executor_id].session.acked_step_id > 0
            self._num_late = 0 if has_answered else self._num_late + 1
        if loss.held is not None:
            self._tell_held(loss.held)
        return loss

    def _epoch(self, scheduler: RunningScheduler, executor_id: str, wake: asyncio.Event) -> Epoch:
        # An executor with slow first steps gets more time on each attempt: how slow is not known yet.
        return Epoch(
            scheduler,
            executor_id,
            wake,
            reattach_seconds=self._reattach_seconds,
            step_timeout_seconds=self._step_timeout_seconds * 2.0 ** min(self._num_late, 8),
        )
