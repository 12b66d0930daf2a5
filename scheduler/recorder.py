"""`--record FILE`: writes down everything that the core is told, so that it can be replayed.

    shell ─► RecordingCore ──► SchedulerCore
                  │ the call: a reference or two
                  ▼
              Recorder, a thread: hashes ids, makes JSON, compresses, writes

The event loop only puts values into a queue. These are values that never change any more: requests, plans,
results, and of a token log, which grows, a finished part. When the queue is full (a disk that hangs) or
writing fails, the recording ends and the server goes on: a record has no gaps, and its last event says why it
ended (if that can still be written).
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, ClassVar

import structlog

from rpc.version import version
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.counters import Outcome
from scheduler.door import RefusedError
from scheduler.plan import BatchPlan, Capacity, StepResult
from scheduler.policy import Limits
from scheduler.record_events import (
    Digester,
    Event,
    capacity_event,
    header,
    line,
    plan_event,
    request_event,
    result_event,
)
from scheduler.record_file import MAGIC, Sealer
from scheduler.sequence import FinishReason, Request, Sequence, State
from scheduler.token_ids import NO_IDS, TokenIds

_log = structlog.get_logger()
MAX_PENDING = 65_536  # calls that are not written yet
CHUNK_BYTES = 1 << 18  # of lines
CHUNK_SECONDS = 1.0  # at most this much is lost when the process is killed
_LOOK_SECONDS = 0.05
_STRETCH_UNTOLD = 16


class _EndedError(Exception):
    """The recording cannot go on: a sentence."""


class _Filled:
    """The stretches of a token log that a result has filled: one, but where it brought many ids."""

    __slots__ = ("ids", "index", "seq", "seq_id")

    def __init__(self, seq: Sequence, seq_id: int, num_before: int, num_now: int, num_ids: int) -> None:
        """Of the log, `num_before` ids were there before, and `num_now` are now."""
        self.seq = seq
        self.seq_id = seq_id
        self.index = num_before // num_ids  # of the first of them
        end = num_now // num_ids * num_ids
        self.ids: TokenIds = seq.token_ids[self.index * num_ids : end]


class _Encoding:
    """Turns recorded calls into events, in the writer's thread; knows how far each token log is hashed."""

    def __init__(self, digester: Digester) -> None:
        self.digester = digester
        self._logs: dict[Sequence, tuple[int, bytes]] = {}  # number of stretches hashed, digest of the last

    def submit(self, request: Request, output_token_ids: TokenIds, seq: Sequence | None) -> Event:
        """A request that was taken in as `seq`, or was refused."""
        digests = self.digester.of_log(request.prompt_token_ids + output_token_ids)
        if seq is not None:
            self._logs[seq] = len(digests), digests[-1] if digests else b""
        return request_event(request, len(output_token_ids), self.digester, digests)

    def update(self, result: StepResult, plan: BatchPlan | None, filled: list[_Filled]) -> Event:
        """A result, and the stretches that it filled."""
        full = {}
        for item in filled:
            count, before = self._logs[item.seq]
            if count != item.index:
                raise _EndedError(f"stretch {item.index} of a token log came after {count}: a fault of ours")
            digests = self.digester.of_log(item.ids, before)
            self._logs[item.seq] = count + len(digests), digests[-1]
            full[item.seq_id] = b"".join(digests)
        return result_event(result, plan, full)

    def ended(self) -> list[Sequence]:
        """Sequences that have ended by now: no more filled stretches of theirs will be reported."""
        return [seq for seq in self._logs if seq.state is State.FINISHED]

    def forget(self, ended: list[Sequence]) -> None:
        """Drops their logs, once everything reported about them is encoded."""
        for seq in ended:
            self._logs.pop(seq, None)  # it may come a second time


class Recorder:
    """Writes one record, in a thread of its own."""

    close_seconds: ClassVar = 10.0

    def __init__(self, path: Path, limits: Limits, batching: Batching, *, scheduler_id: str = "") -> None:
        """Creates a file; an existing one is kept, and the new one numbered. Raises OSError."""
        self._file, self.path = _created(path)
        self.is_on = True
        self.num_ids: int | None = None  # of a stretch: a block of the first executor
        self.in_hand: list[Sequence] = []  # what the result that is being applied fills is not recorded yet
        self._settings = limits, batching, scheduler_id
        self._pending: deque[Callable[[_Encoding], Event | None]] = deque()
        self._sealer = Sealer()
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._sealed_at = time.monotonic()
        self._encoding: _Encoding | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, encode: Callable[[_Encoding], Event]) -> None:
        """Adds an event; `encode` is called later, in another thread."""
        if not self.is_on:
            return
        if len(self._pending) >= MAX_PENDING:
            self.stop(f"{MAX_PENDING} events wait to be written")
        else:
            self._pending.append(encode)

    def begin(self, block_size: int) -> None:
        """An executor was attached: the first one's block size is the length of all stretches."""
        if self.num_ids is None:
            self.num_ids = block_size
        elif block_size % self.num_ids:
            self.stop(
                f"an executor with blocks of {block_size} tokens has come, and ids are recorded "
                f"by {self.num_ids}: its prefix hits could not be replayed"
            )

    def stop(self, reason: str) -> None:
        """Ends the recording here; what was recorded so far is written, and the reason."""
        if self.is_on:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.is_on = False
        self._pending.append(lambda _: {"e": "ended", "reason": reason})
        _log.error("recording_stopped", file=str(self.path), reason=reason)

    def close(self) -> None:
        """Writes what is left, and the end of the file, unless that takes longer than `close_seconds`."""
        self._is_closing.set()
        self._thread.join(self.close_seconds)
        if self._thread.is_alive():
            self.stop(f"it has not taken what was left within {self.close_seconds:g} seconds")

    # --- the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._file as file:
                file.write(MAGIC)
                while not self._is_closing.wait(_LOOK_SECONDS):
                    self._write_pending(file)
                self.num_ids = self.num_ids or _STRETCH_UNTOLD
                self._write_pending(file)
                self._seal(file, is_last=True)
        except OSError as error:
            self._give_up(f"it cannot be written: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on without its record
            self._give_up(f"a fault of ours: {type(error).__name__}")  # its text may reveal token ids

    def _write_pending(self, file: BinaryIO) -> None:
        if self._encoding is None:
            if self.num_ids is None:
                return
            self._encoding = self._begun(self.num_ids)
        try:
            while self._pending:
                event = self._pending.popleft()(self._encoding)
                if event is not None:
                    self._write(event)
                if self._num_bytes >= CHUNK_BYTES:
                    self._seal(file)
                time.sleep(0)  # lets the event loop run
        except _EndedError as error:
            self._give_up(str(error))
            self._write_pending(file)  # writes that it has ended
        if self._lines and time.monotonic() - self._sealed_at >= CHUNK_SECONDS:
            self._seal(file)

    def _give_up(self, reason: str) -> None:
        self._pending.clear()
        self._end(reason)

    def _begun(self, num_ids: int) -> _Encoding:
        limits, batching, scheduler_id = self._settings
        began = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"version": version(), "scheduler_id": scheduler_id, "began": began}
        self._write(header(limits, batching, num_ids, **told))
        return _Encoding(Digester(num_ids, secrets.token_bytes(32)))

    def _write(self, event: Event) -> None:
        self._lines.append(line(event))
        self._num_bytes += len(self._lines[-1])

    def _seal(self, file: BinaryIO, *, is_last: bool = False) -> None:
        file.write(self._sealer.seal(b"".join(self._lines), is_last=is_last))
        file.flush()
        self._lines, self._num_bytes, self._sealed_at = [], 0, time.monotonic()
        if self._encoding is not None and not is_last:
            ended = self._encoding.ended()  # looked for before `in_hand` is: of others, all is in the queue
            in_hand = self.in_hand
            ended = [seq for seq in ended if seq not in in_hand]
            self._pending.append(lambda encoding: encoding.forget(ended))


def _created(path: Path) -> tuple[BinaryIO, Path]:
    """A new file: a record that exists already (of a scheduler that died, say) is someone's evidence."""
    number, free = 1, path
    while True:
        try:
            return free.open("xb"), free
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.name}.{number}")


class RecordingCore(SchedulerCore):
    """The core, with a record of what it is told: every call that changes it, and each plan's digest."""

    def __init__(
        self,
        recorder: Recorder,
        limits: Limits,
        batching: Batching = Batching.ITERATION,
        padding_sampling: bytes = b"",
        cache_secret: bytes = b"",
    ) -> None:
        super().__init__(limits, batching, padding_sampling, cache_secret)
        self._recorder = recorder
        self._is_inside = False  # a call made by the core itself: replay will make it by itself
        self._streams: dict[str, tuple[bool, float]] = {}  # is_away and the clock's beginning, as recorded

    # --- from clients ------------------------------------------------------------------------------------

    def submit(self, request: Request, output_token_ids: TokenIds = NO_IDS, *, now: float) -> Sequence:
        """As the core's."""
        live = self.sequences.get(request.key)
        what: Event = {"e": "submit", "t": now}
        seq: Sequence | None = None
        self._is_inside = True
        try:
            seq = super().submit(request, output_token_ids, now=now)
        except RefusedError:
            what["refused"] = True
            raise
        finally:
            self._is_inside = False
            if seq is not None and seq is live:
                what["goes_on"] = True
            elif seq is not None and _is_over(seq):
                what["is_over"] = True
            new = None if seq is live else seq
            self._recorder.put(lambda encoding: what | encoding.submit(request, output_token_ids, new))
        return seq

    def cancel(self, key: bytes, reason: FinishReason, now: float) -> Sequence | None:
        """As the core's."""
        self._is_inside = True
        try:
            seq = super().cancel(key, reason, now)
        finally:
            self._is_inside = False
        if seq is not None:
            self._put("cancel", now, key=key.hex(), reason=reason)
        return seq

    def orphan(self, seq: Sequence, now: float) -> None:
        """As the core's."""
        super().orphan(seq, now)
        if self.sequences.get(seq.request.key) is seq:
            self._put("orphan", now, key=seq.request.key.hex())

    def forget(self, seq: Sequence) -> None:
        """As the core's."""
        if not self._is_inside and self.sequences.get(seq.request.key) is seq:
            self._put("forget", self._now, key=seq.request.key.hex())
        super().forget(seq)

    def expire(self, now: float) -> list[Sequence]:
        """As the core's."""
        self._is_inside = True
        try:
            ended = super().expire(now)
        finally:
            self._is_inside = False
        self._put("expire", now)
        return ended

    # --- executors ---------------------------------------------------------------------------------------

    def attach(self, executor_id: str, epoch: int, capacity: Capacity, now: float) -> list[Sequence]:
        """As the core's."""
        self._recorder.begin(capacity.block_size)
        ended = super().attach(executor_id, epoch, capacity, now)
        told = {"executor": executor_id, "epoch": epoch, "capacity": capacity_event(capacity)}
        self._put("attach", now, **told, over=_over(ended))
        self._see(executor_id)
        return ended

    def detach(self, executor_id: str, now: float, *, is_crash: bool = False) -> list[Sequence]:
        """As the core's."""
        ended = super().detach(executor_id, now, is_crash=is_crash)
        self._streams.pop(executor_id, None)
        self._put("detach", now, executor=executor_id, is_crash=is_crash, over=_over(ended))
        return ended

    def schedule(self, executor_id: str, now: float) -> BatchPlan | None:
        """As the core's."""
        self._look_at_streams()
        what: Event = {"e": "schedule", "t": now, "executor": executor_id}
        drafting = self.executors[executor_id].drafting
        if drafting is not None and drafting.waits:
            what["waits"] = True
        plan: BatchPlan | None = None
        try:
            plan = super().schedule(executor_id, now)
        except Exception as error:
            what["broken"] = type(error).__name__
            raise
        finally:
            self._see(executor_id)
            self._recorder.put(lambda _: what if plan is None else what | plan_event(plan))
        return plan

    def update(self, executor_id: str, result: StepResult, now: float) -> Outcome:
        """As the core's."""
        self._look_at_streams()  # an answer may be there before a plan is asked for
        unanswered = self.executors[executor_id].session.unanswered
        plan = unanswered[0] if unanswered else None
        num_ids = self._recorder.num_ids or 1
        filling = []
        if plan is not None:
            for seq, seq_id in zip(plan.rows, plan.seq_ids, strict=True):
                length, most = len(seq.token_ids), 1 + len(plan.draft_tokens.get(seq_id, NO_IDS))
                if length % num_ids + most >= num_ids and seq.seq_id == seq_id and not seq.is_padding:
                    filling.append((seq, seq_id, length))
        self._recorder.in_hand = [seq for seq, _, _ in filling]
        try:
            return super().update(executor_id, result, now)
        finally:
            filled = []
            for seq, seq_id, length in filling:
                # The last id of an ended sequence is never computed, so a block that it fills is never named.
                num_now = len(seq.token_ids) - (seq.state is State.FINISHED)
                if num_now // num_ids > length // num_ids:
                    filled.append(_Filled(seq, seq_id, length, num_now, num_ids))
            what = {"e": "update", "t": now, "executor": executor_id}
            self._recorder.put(lambda encoding: what | encoding.update(result, plan, filled))
            self._recorder.in_hand = []
            self._see(executor_id)

    # --- small things ------------------------------------------------------------------------------------

    def _put(self, name: str, now: float, **fields: object) -> None:
        self._recorder.put(lambda _: {"e": name, "t": now, **fields})

    def _look_at_streams(self) -> None:
        """Records that a stream broke or was opened again: an epoch says so only on the state itself."""
        for executor_id, state in self.executors.items():
            if (state.is_away, state.clock.began) != self._streams.get(executor_id):
                self._put("stream", state.clock.began, executor=executor_id, is_away=state.is_away)
                self._see(executor_id)

    def _see(self, executor_id: str) -> None:
        state = self.executors[executor_id]
        self._streams[executor_id] = state.is_away, state.clock.began


def _is_over(seq: Sequence) -> bool:
    """Whether it came with ids that end it: replay does not have these ids, and must be told."""
    return seq.finish is not None and seq.finish.reason is FinishReason.STOP


def _over(ended: list[Sequence]) -> list[str]:
    return [seq.request.key.hex() for seq in ended if _is_over(seq)]
