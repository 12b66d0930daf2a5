"""Who holds the executor, and what becomes of each plan: exactly-once as a state machine without I/O.

Events come in (`open`, `attach`, `receive`, `complete`, `detach`); what is to be done comes out. The rules
(docs/protocol.md, "Execute"):

1. Each step runs at most once in an epoch; plans run in the order of their step ids, without a gap.
2. The result of a step is kept until a plan acknowledges it. A plan that arrives again is answered with the
   kept result, or as soon as its first execution ends. It must be the same plan.
3. A plan counts as unanswered until `acked_step_id` says that its result was applied. At most `max_window`
   may be.
4. The newest stream of an epoch wins, as soon as it brings a plan. A superseded stream gets nothing more.
5. A scheduler that lost the executor to another one is told so, and to whom: it must step down. One whose
   epoch is merely over opens again.

Must not know: protos, gRPC, tensors, what a plan says beyond its three numbers, clocks. An epoch's number is
random, so it comes in from outside.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from executor.plan import BatchPlan

R = TypeVar("R")

_REMEMBERED_EPOCHS: Final = 64
"""Ended epochs whose holder is still known, to tell a fenced scheduler from a forgotten one."""


class Held(Exception):  # noqa: N818 - a fact about the executor, not a failure of it
    """Another scheduler holds the executor; whoever is told so must step down."""

    def __init__(self, scheduler_id: str, term: int) -> None:
        self.scheduler_id = scheduler_id
        self.term = term
        super().__init__(f"the executor is held by scheduler {scheduler_id} at term {term}")


class NotOpen(Exception):  # noqa: N818
    """The plan's epoch is not, or no longer, open: open again and recompute."""


class Superseded(Exception):  # noqa: N818
    """A newer stream of the same epoch has taken over."""


class Broken(Exception):  # noqa: N818
    """The plan cannot follow from what came before. The epoch is over."""


@dataclass(frozen=True, slots=True)
class Run:
    """Execute this plan, after all that were to run before it."""

    plan: BatchPlan


@dataclass(frozen=True, slots=True)
class Answer(Generic[R]):
    """The plan ran before: send this result."""

    result: R


@dataclass(frozen=True, slots=True)
class Pending:
    """The plan is waiting or running: its result goes to this stream, too, when it ends."""


@dataclass(slots=True)
class _Step(Generic[R]):
    """One plan that no later plan has acknowledged."""

    plan: BatchPlan
    waiting: list[int]
    """Streams that get the result when it comes, one entry for each time they asked."""
    result: R | None = None


@dataclass(slots=True)
class _Epoch(Generic[R]):
    """One scheduler's hold on the executor's state."""

    number: int
    streams: set[int] = field(default_factory=set)
    current_stream: int | None = None
    last_step_id: int = 0
    completed_step_id: int = 0
    acked_step_id: int = 0
    steps: dict[int, _Step[R]] = field(default_factory=dict)


class Session(Generic[R]):
    """The executor's side of the step protocol. R is the type of a result."""

    __slots__ = (
        "_epoch",
        "_holder",
        "_max_window",
        "_next_stream",
        "_past_holders",
        "_term",
        "_why_not_open",
    )

    def __init__(self, max_window: int) -> None:
        self._max_window = max_window
        self._holder: str | None = None
        self._term = 0
        self._epoch: _Epoch[R] | None = None
        self._why_not_open = "no scheduler has opened the executor since it started"
        self._past_holders: OrderedDict[int, str] = OrderedDict()
        self._next_stream = 1

    @property
    def epoch(self) -> int | None:
        """The epoch that is open."""
        return None if self._epoch is None else self._epoch.number

    @property
    def current_stream(self) -> int | None:
        """The stream that brought the newest plans."""
        return None if self._epoch is None else self._epoch.current_stream

    @property
    def is_connected(self) -> bool:
        """Whether the holder has a stream."""
        return self._epoch is not None and bool(self._epoch.streams)

    @property
    def num_running(self) -> int:
        """Plans received whose results are not in."""
        return 0 if self._epoch is None else self._epoch.last_step_id - self._epoch.completed_step_id

    @property
    def num_kept(self) -> int:
        """Plans that no later plan has acknowledged; never more than the window."""
        return 0 if self._epoch is None else len(self._epoch.steps)

    def open(self, scheduler_id: str, term: int, epoch: int) -> int:
        """Give the executor to a scheduler and begin the epoch `epoch`, a fresh random number above 0.

        All streams of the epoch before are over. Returns the term granted.

        Raises:
            Held: `term` is below the holder's; or it is 0 (the holder's + 1) while another scheduler's stream
                lives; or it is the holder's own and comes from another scheduler: no term is given twice.
        """
        if self._holder is not None and self._holder != scheduler_id:
            refused = self.is_connected if term == 0 else term <= self._term
        else:
            refused = 0 < term < self._term
        if refused:
            raise Held(self._holder or "", self._term)
        self._retire_epoch()
        self._holder = scheduler_id
        self._term = term or self._term + 1
        self._epoch = _Epoch(epoch)
        return self._term

    def attach(self) -> int:
        """A new stream, as a number. The older one of the epoch stays until this one brings a plan."""
        stream = self._next_stream
        self._next_stream += 1
        if self._epoch is not None:
            self._epoch.streams.add(stream)
        return stream

    def detach(self, stream: int) -> None:
        """The stream has ended. What it was owed is kept for the one that comes next."""
        if self._epoch is None:
            return
        self._epoch.streams.discard(stream)
        if self._epoch.current_stream == stream:
            self._epoch.current_stream = None

    def receive(self, stream: int, plan: BatchPlan) -> Run | Answer[R] | Pending:
        """A plan came in on a stream.

        Raises:
            Held: the plan's epoch belonged to a scheduler that holds the executor no longer.
            NotOpen: the plan's epoch is not open.
            Superseded: a newer stream has taken over.
            Broken: the plan does not follow from those before. The epoch is over.
        """
        epoch = self._epoch
        if epoch is None or epoch.number != plan.epoch:
            raise self.refusal(plan.epoch)
        if stream not in epoch.streams:
            raise Superseded("a newer stream of this epoch has taken over")
        if stream != epoch.current_stream:
            epoch.current_stream = stream
            epoch.streams = {other for other in epoch.streams if other >= stream}
        if (step := epoch.steps.get(plan.step_id)) is not None:
            if step.plan != plan:
                raise self._broken(f"step {plan.step_id} came again and differs from the first time")
            if step.result is not None:
                return Answer(step.result)
            step.waiting.append(stream)
            return Pending()
        self._check_follows(epoch, plan)
        epoch.last_step_id = plan.step_id
        epoch.acked_step_id = plan.acked_step_id
        for step_id in [s for s in epoch.steps if s <= plan.acked_step_id]:
            del epoch.steps[step_id]
        epoch.steps[plan.step_id] = _Step(plan, [stream])
        return Run(plan)

    def complete(self, epoch: int, step_id: int, result: R) -> tuple[int, ...]:
        """The result of a step is in. Returns the streams to send it to, once for each time they asked.

        A result of an epoch that is over goes to nobody.
        """
        if self._epoch is None or self._epoch.number != epoch:
            return ()
        step = self._epoch.steps[step_id]
        assert step.result is None and step_id == self._epoch.completed_step_id + 1  # noqa: PT018 - rule 1 in one line
        step.result = result
        self._epoch.completed_step_id = step_id
        waiting, step.waiting = step.waiting, []
        return tuple(stream for stream in waiting if stream == self._epoch.current_stream)

    def fail(self, epoch: int, sentence: str) -> None:
        """End an epoch because plan and executor disagree. An epoch that is over already stays so."""
        if self._epoch is not None and self._epoch.number == epoch:
            self._close(sentence)

    def refusal(self, epoch: int) -> Held | NotOpen:
        """What to tell a scheduler whose plans or streams belong to `epoch`, which is not open."""
        past_holder = self._past_holders.get(epoch)
        if past_holder is not None and self._holder is not None and past_holder != self._holder:
            return Held(self._holder, self._term)
        if self._epoch is None:
            return NotOpen(f"the executor is not open: {self._why_not_open}")
        return NotOpen(f"epoch {epoch} is not the one that is open")

    def _close(self, why: str) -> None:
        self._why_not_open = why
        self._retire_epoch()

    def _retire_epoch(self) -> None:
        if self._epoch is None:
            return
        assert self._holder is not None, "an epoch has a holder"
        self._past_holders[self._epoch.number] = self._holder
        if len(self._past_holders) > _REMEMBERED_EPOCHS:
            self._past_holders.popitem(last=False)
        self._epoch = None

    def _broken(self, sentence: str) -> Broken:
        self._close(sentence)
        return Broken(sentence)

    def _check_follows(self, epoch: _Epoch[R], plan: BatchPlan) -> None:
        step_id, acked = plan.step_id, plan.acked_step_id
        if step_id != epoch.last_step_id + 1:
            raise self._broken(f"step {step_id} came after step {epoch.last_step_id}; steps come one by one")
        if acked < epoch.acked_step_id:
            raise self._broken(
                f"step {step_id} acknowledges step {acked} after step {epoch.acked_step_id} was acknowledged"
            )
        if acked > epoch.completed_step_id:
            raise self._broken(f"step {step_id} acknowledges step {acked}, which has no result yet")
        if step_id - acked > self._max_window:
            raise self._broken(
                f"step {step_id} makes {step_id - acked} plans unanswered; the window is {self._max_window}"
            )
