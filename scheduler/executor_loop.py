"""One executor's life from the scheduler's side: open it, drive its epoch, lose it, open it again.

How it is driven is `epoch`'s business, which executors there are `executor_directory`'s.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from rpc.address import Address
from rpc.tls import Tls
from scheduler.epoch import Epoch, Loss
from scheduler.executor_client import (
    EpochLostError,
    ExecutorClient,
    ExecutorUnreachableError,
    HeldError,
    LeftError,
    Opened,
)
from scheduler.loop import SchedulerLoop

_log = structlog.get_logger()
RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 1.0
STEP_TIMEOUT_SECONDS = 10.0
_TWIN_GONE_LOOKS = 5


def _backoff(attempt: int) -> float:
    """Seconds until the next attempt; with jitter, so that many do not ask at once."""
    return min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2.0 ** min(attempt, 8)) * random.uniform(0.5, 1.0)  # noqa: S311


class ExecutorLoop:
    """Of one address, for as long as there is an executor."""

    def __init__(
        self,
        loop: SchedulerLoop,
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
        """`term`: of the lease, 0 without one. `on_held(holder, term)` tells who has the executor instead."""
        self._loop = loop
        self._term = term
        self._on_held = on_held
        self._step_timeout_seconds = step_timeout_seconds
        self._num_late = 0  # epochs in a row that ended with their first step late
        self._address = address
        self._scheduler_id = scheduler_id
        self._reattach_seconds = reattach_seconds
        self._client = ExecutorClient(address, max_message_bytes=max_message_bytes, tls=tls)

    @property
    def is_attached(self) -> bool:
        """Whether an epoch of this executor is being driven."""
        return str(self._address) in self._loop.core.executors

    async def run(self) -> None:
        """Runs until cancelled."""
        executor_id = str(self._address)
        log = _log.bind(executor=executor_id)
        try:
            while True:
                opened = await self._open_fitting(executor_id)
                wake = asyncio.Event()
                self._loop.executor_attached(executor_id, opened, wake)
                capacity = opened.capacity
                log.info(
                    "executor_attached",
                    instance_id=capacity.instance_id,
                    num_blocks=capacity.num_blocks,
                    block_size=capacity.block_size,
                    max_num_seqs=capacity.max_num_seqs,
                    max_num_batched_tokens=capacity.max_num_batched_tokens,
                    row_invariant=capacity.row_invariant,
                )
                loss = Loss("the scheduler is shutting down")
                try:
                    loss = await self._drive_epoch(executor_id, wake)
                finally:
                    self._loop.executor_lost(executor_id, loss.reason, is_crash=loss.is_crash)
                log.warning("executor_lost", reason=loss.reason, is_crash=loss.is_crash)
                # Not at once: an executor that breaks every epoch must not spin, and a scheduler that has
                # just taken it over needs a moment to open its stream, by which it holds the executor.
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._loop.executor_given_up(executor_id)
            await self._client.close()

    async def _open_fitting(self, executor_id: str) -> Opened:
        """Opens the executor until it is one that may be attached."""
        attempt = 0
        while True:
            opened = await self._open(executor_id)
            twin = self._loop.twin_of(executor_id, opened.capacity.instance_id)
            if twin is not None:
                self._loop.executor_missing(executor_id, f"{executor_id} is the same executor as {twin}")
                await self._until_gone(twin)
                continue
            refusal = self._loop.refusal_of(executor_id, opened.capacity)
            if refusal is None:
                return opened
            self._loop.executor_missing(executor_id, refusal)
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    async def _until_gone(self, executor_id: str) -> None:
        """Returns when that executor was not attached for a while: opening its twin would end its epoch."""
        num_looks = 0
        while num_looks < _TWIN_GONE_LOOKS:
            await asyncio.sleep(MAX_RETRY_SECONDS)
            num_looks = 0 if executor_id in self._loop.core.executors else num_looks + 1

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
            self._loop.executor_missing(executor_id, reason)
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    def _tell_held(self, error: Exception) -> None:
        if isinstance(error, HeldError) and self._on_held is not None:
            self._on_held(error.holder, error.term)

    async def _drive_epoch(self, executor_id: str, wake: asyncio.Event) -> Loss:
        """Until it is over; returns why."""
        # An executor whose first steps are slow, and nobody knows how slow yet, is given more time each time.
        step_timeout_seconds = self._step_timeout_seconds * 2.0 ** min(self._num_late, 8)
        epoch = Epoch(
            self._loop,
            executor_id,
            wake,
            reattach_seconds=self._reattach_seconds,
            step_timeout_seconds=step_timeout_seconds,
        )
        loss = await epoch.run(self._client.execute)
        if loss.is_late:
            has_answered = self._loop.core.executors[executor_id].session.acked_step_id > 0
            self._num_late = 0 if has_answered else self._num_late + 1
        if loss.held is not None:
            self._tell_held(loss.held)
        return loss
