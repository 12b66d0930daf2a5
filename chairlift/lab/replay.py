"""Replays a record to the core: it must make the same plans, or the first one that differs is named.

What clients sent and what executors answered comes from the record; what is decided comes from the core.
Token ids are synthetic, and equal as far as the recorded ones were (`scheduler.record_events`). Besides the
plans, what they cost and what became of each request is recorded, so that the same load can be run again
under other settings.

Must not know: clocks.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from chairlift.lab.records import Histogram
from scheduler.batching import Batching
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.drafting import Drafting
from scheduler.executor_session import SessionBrokenError
from scheduler.plan import BatchPlan, Capacity
from scheduler.record_events import (
    FORMAT,
    Event,
    capacity_of,
    limits_of,
    plan_digest,
    request_of,
    result_of,
    synthetic_stretches,
)
from scheduler.record_file import Chunk, RecordError, chunks
from scheduler.sequence import FinishReason, Request, Sequence
from scheduler.step_time import Line
from scheduler.token_ids import TokenIds

_CACHE_SECRET = b"replay"
_ANOTHER_ID = 0xFFFFFFFF  # no digest's: equal to no other id of its log


class UnreadableError(ValueError):
    """A record that is not whole, or not ours: a sentence with the place."""


class DifferentError(RuntimeError):
    """The core has decided otherwise than when it was recorded: a sentence with the place."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step did and took."""

    num_rows: int
    num_tokens: int
    num_context_tokens: int
    seconds: float  # from when the executor could begin to its result, the way there and back included


@dataclass(slots=True)
class Seen:
    """One request as it went. Times in seconds on the scheduler's clock."""

    request: Request
    submitted: float
    resumed: TokenIds  # output that it came with
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_output_tokens: int = 0  # beyond that
    reason: FinishReason | None = None  # None: it was still on its way at the end of the record


@dataclass(slots=True)
class Report:
    """What a replay saw."""

    header: Event
    num_events: int = 0
    num_plans: int = 0
    num_tokens: int = 0  # scheduled
    num_refused: int = 0
    began: float = 0.0
    ended: float = 0.0
    preemptions: int = 0
    displacements: int = 0
    num_lost: int = 0  # executors
    ended_early: str = ""  # why the recording ended before its scheduler did
    fleet: list[Capacity] = field(default_factory=list)  # when most executors were attached
    seen: list[Seen] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    gaps: Histogram = field(default_factory=Histogram)

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self.ended - self.began


def replay_file(path: Path, *, may_be_cut: bool = False) -> Report:
    """As `replay`, of a file; `may_be_cut`: as far as it is whole. Raises OSError, too."""
    with path.open("rb") as file:
        try:
            return replay(chunks(file, may_be_cut=may_be_cut))
        except RecordError as error:
            raise UnreadableError(str(error)) from error


def replay(told: Iterable[Chunk]) -> Report:
    """Tells all of it. Raises RecordError for what cannot be told, DifferentError where plans differ."""
    events = _events(told)
    place, head = next(events, ("", None))
    if head is None:
        raise RecordError("it holds nothing: its scheduler was killed before the first event was written")
    try:
        if head["format"] != FORMAT:
            raise RecordError(f"the record has format {head['format']}; this is read: {FORMAT}")
        teller = _Teller(head)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{place}: the header cannot be read: {error!r}") from error
    for place, event in events:
        try:
            teller.tell(event)
        except DifferentError as error:
            raise DifferentError(f"{place}: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise RecordError(f"{place}: the event cannot be told: {error!r}") from error
    counters = teller.core.counters
    teller.report.preemptions, teller.report.displacements = counters.preemptions, counters.displacements
    return teller.report


def _events(told: Iterable[Chunk]) -> Iterator[tuple[str, Event]]:
    for chunk in told:
        for number, text in enumerate(chunk.lines.splitlines(), start=1):
            place = f"{chunk.place}, line {number}"
            try:
                event = json.loads(text)
            except ValueError as error:
                raise RecordError(f"{place}: {error}") from error
            if not isinstance(event, dict):
                raise RecordError(f"{place}: an object is wanted")
            yield place, event


class _Recorded(Drafting):
    """What was guessed for one plan: guesses are made of ids, which a replay does not have."""

    __slots__ = ("_lengths",)

    def __init__(self, event: Event) -> None:
        super().__init__(0)
        self.waits = event.get("waits", False)
        self._lengths = {int(seq_id): length for seq_id, length in event.get("draft_tokens", {}).items()}

    def learn(self, *_: object) -> None:
        """Nothing."""

    def guess(self, seq: Sequence, num_tokens: int, line: Line | None) -> TokenIds:
        """As many ids as there were."""
        del num_tokens, line
        return array("I", bytes(4 * self._lengths.get(seq.seq_id, 0)))


class _Teller:
    """The core that is told, and what it is seen to do."""

    def __init__(self, head: Event) -> None:
        self.core = SchedulerCore(
            limits_of(head), Batching(head["batching"]), padding_sampling=b"", cache_secret=_CACHE_SECRET
        )
        self.report = Report(head)
        self._num_ids = int(head["stretch"])
        self._seen: dict[Sequence, Seen] = {}
        self._tell: dict[str, Callable[[Event, float], None]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "orphan": self._orphan,
            "forget": self._forget,
            "expire": self._expire,
            "attach": self._attach,
            "detach": self._detach,
            "stream": self._stream,
            "schedule": self._schedule,
            "update": self._update,
        }

    def tell(self, event: Event) -> None:
        """One call."""
        report = self.report
        if event["e"] == "ended":
            report.ended_early = str(event["reason"])
            return
        now = float(event["t"])
        if not report.num_events:
            report.began = report.ended = now
        report.num_events += 1
        report.ended = max(report.ended, now)
        self._tell[event["e"]](event, now)

    # --- from clients ------------------------------------------------------------------------------------

    def _submit(self, event: Event, now: float) -> None:
        request, output = request_of(event, self._num_ids)
        live = self.core.sequences.get(request.key)
        is_refused = event.get("refused", False)
        if live is not None:
            output = self._output_beside(live, output, goes_on=event.get("goes_on", False))
            if event.get("is_over"):
                request = replace(request, stop_token_ids=frozenset(output[-1:]))
        try:
            seq = self.core.submit(request, output, now=now)
        except RefusedError as error:
            if not is_refused:
                raise DifferentError(f"{request.request_id!r} was taken in; now: {error}") from error
            self.report.num_refused += 1
            return
        if is_refused or (seq is live) != event.get("goes_on", False):
            was = "refused" if is_refused else "taken up again" if seq is not live else "begun anew"
            raise DifferentError(f"{request.request_id!r} was {was}, and is not now")
        if seq is not live:
            self._seen[seq] = Seen(request, now, output[:])
            self.report.seen.append(self._seen[seq])
            self._end([seq] if seq.finish is not None else [], now)

    def _output_beside(self, live: Sequence, output: TokenIds, *, goes_on: bool) -> TokenIds:
        """What the reader of `live` has: a beginning of its output, or something else."""
        if goes_on:
            return live.output_token_ids()[: len(output)]
        if output and (live.num_prompt_tokens + len(output)) % self._num_ids:
            output[-1] = _ANOTHER_ID  # the ids of a stretch that is not full are not known
        return output

    def _cancel(self, event: Event, now: float) -> None:
        seq = self.core.cancel(bytes.fromhex(event["key"]), FinishReason(event["reason"]), now)
        if seq is None:
            raise DifferentError(f"nothing lives under the key {event['key']} that was cancelled")
        self._end([seq], now)

    def _orphan(self, event: Event, now: float) -> None:
        self.core.orphan(self._live(event), now)

    def _forget(self, event: Event, now: float) -> None:
        del now
        seq = self._live(event)
        if seq.finish is None:
            raise DifferentError(f"{seq.request.request_id!r} had ended, and goes on")
        self.core.forget(seq)

    def _live(self, event: Event) -> Sequence:
        seq = self.core.sequences.get(bytes.fromhex(event["key"]))
        if seq is None:
            raise DifferentError(f"nothing lives under the key {event['key']}")
        return seq

    def _expire(self, event: Event, now: float) -> None:
        del event
        self._end(self.core.expire(now), now)

    # --- executors ---------------------------------------------------------------------------------------

    def _attach(self, event: Event, now: float) -> None:
        capacity = capacity_of(event["capacity"])
        self._mark_over(event)
        self._end(self.core.attach(event["executor"], event["epoch"], capacity, now), now)
        if len(self.core.executors) >= len(self.report.fleet):
            self.report.fleet = [state.capacity for state in self.core.executors.values()]

    def _detach(self, event: Event, now: float) -> None:
        self.report.num_lost += 1
        self._mark_over(event)
        self._end(self.core.detach(event["executor"], now, is_crash=event["is_crash"]), now)

    def _mark_over(self, event: Event) -> None:
        """These were found to have ended already, by ids that are not known here."""
        for key in event["over"]:
            seq = self._live({"key": key})
            seq.request = replace(seq.request, stop_token_ids=frozenset(seq.token_ids[-1:]))

    def _stream(self, event: Event, now: float) -> None:
        state = self.core.executors[event["executor"]]
        state.is_away = event["is_away"]
        state.clock.resumed(now)

    def _schedule(self, event: Event, now: float) -> None:
        executor_id = event["executor"]
        plan: BatchPlan | None = None
        broken = None
        state = self.core.executors[executor_id]
        if state.drafting is not None:
            state.drafting = _Recorded(event)
        try:
            plan = self.core.schedule(executor_id, now)
        except RuntimeError as error:
            broken = type(error).__name__
        if broken != event.get("broken"):
            raise DifferentError(
                f"{executor_id} had {event.get('broken') or 'no fault'}, now {broken or 'none'}"
            )
        wanted, got = event.get("plan"), None if plan is None else plan_digest(plan)
        if wanted != got:
            was = f"plan {event['step']} was {wanted}" if wanted else "no plan was made"
            raise DifferentError(f"for {executor_id} {was}, now it is {_told(plan)}")
        if plan is not None:
            self.report.num_plans += 1
            self.report.num_tokens += sum(plan.num_tokens)

    def _update(self, event: Event, now: float) -> None:
        executor_id = event["executor"]
        state = self.core.executors[executor_id]
        plan = state.session.unanswered[0] if state.session.unanswered else None
        result = result_of(event, plan)
        for seq_id, digests in event.get("full", {}).items():
            seq, row = state.running[int(seq_id)], result.seq_ids.index(int(seq_id))
            ids = synthetic_stretches(bytes.fromhex(digests), self._num_ids)
            num_known = len(seq.token_ids) % self._num_ids  # of the first stretch
            seq.token_ids[len(seq.token_ids) - num_known :] = ids[:num_known]
            at = sum(result.num_sampled[:row])
            result.token_ids[at : at + len(ids) - num_known] = ids[num_known:].tolist()
        seconds = now - state.clock.began
        try:
            outcome = self.core.update(executor_id, result, now)
        except SessionBrokenError:
            return  # as it was: the next event is the executor's loss
        if plan is not None and plan.rows and plan.step_id == result.step_id:
            num_tokens = sum(plan.num_tokens)
            context = plan.positions_sum + num_tokens
            self.report.costs.append(Cost(len(plan.rows), num_tokens, context, seconds))
        for seq in outcome.progressed:
            self._note(seq, now)
        self._end(outcome.ended, now)

    # --- what is seen ------------------------------------------------------------------------------------

    def _note(self, seq: Sequence, now: float) -> None:
        seen = self._seen.get(seq)
        count = seq.num_output_tokens - seq.num_resumed_tokens
        if seen is None or count == seen.num_output_tokens:  # padding, or log-probabilities of a prompt
            return
        seen.num_output_tokens = count
        if seen.first_token is None:
            seen.first_token = now
        elif seen.last_token is not None:
            self.report.gaps.add(now - seen.last_token)
        seen.last_token = now

    def _end(self, ended: list[Sequence], now: float) -> None:
        for seq in ended:
            seen = self._seen.pop(seq, None)
            if seen is not None:
                seen.ended = now
                seen.reason = None if seq.finish is None else seq.finish.reason


def _told(plan: BatchPlan | None) -> str:
    if plan is None:
        return "none"
    return (
        f"{plan_digest(plan)}: step {plan.step_id} with {len(plan.rows)} rows, {sum(plan.num_tokens)} tokens "
        f"and {len(plan.admitted)} admitted"
    )
