"""What waits for an executor that is not there, and for how long.

Everybody does while none is attached. While some are, those do that none of them can ever compute: too long
for each, or in need of an ability that it lacks. The one that could may come back; in the queue they are
parked meanwhile, so that they hold nobody back. Nobody waits so for more than `recovery_timeout_seconds`.

Pure: changes nothing of the core but the queue's marks, and what time lines say of a wait.
"""

from typing import TYPE_CHECKING

from scheduler import followers
from scheduler.explain import Reason
from scheduler.sequence import Sequence

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore


class Stranded:
    """Who waits so, and since when."""

    __slots__ = ("_alone_since", "_since")

    def __init__(self) -> None:
        # When the last executor was lost, or when somebody came before there was one.
        self._alone_since: float | None = None
        self._since: dict[Sequence, float] = {}  # in the order of those times

    def holds(self, seq: Sequence) -> bool:
        """Whether no attached executor can ever compute `seq`."""
        return seq in self._since

    def executor_came(self, core: "SchedulerCore", now: float) -> None:
        """One was attached. Who has waited for any goes on waiting for one that can, from then on."""
        since = now if self._alone_since is None else self._alone_since
        self._alone_since = None
        self._look_at_all(core, now, since)

    def executor_went(self, core: "SchedulerCore", now: float) -> None:
        """One was detached."""
        if core.executors:
            self._look_at_all(core, now, now)
        else:
            self._alone_since = now

    def began_to_wait(
        self, core: "SchedulerCore", seq: Sequence, now: float, since: float | None = None
    ) -> None:
        """`seq` is in the queue, and has waited for an executor since then, if not from now on."""
        if not core.executors and self._alone_since is None:
            self._alone_since = now
        if core.executors and not any(state.suits(seq) for state in core.executors.values()):
            self._since[seq] = now if since is None else since
            core.waiting.park(seq)
            followers.hand_on(core, seq)
            core.inquiry.cannot_try(core, seq)
            _tell(core, seq, now, "no executor that is here can ever compute it", Reason.QUEUED_FOR_EXECUTOR)

    def waits_no_more(self, seq: Sequence) -> None:
        """`seq` is over."""
        self._since.pop(seq, None)

    def _look_at_all(self, core: "SchedulerCore", now: float, since: float) -> None:
        for seq in list(core.waiting):
            if seq not in self._since:
                self.began_to_wait(core, seq, now, since)
            elif any(state.suits(seq) for state in core.executors.values()):
                del self._since[seq]
                core.unpark(seq)
                _tell(core, seq, now, "an executor came that can compute it", None)

    def next_time(self, core: "SchedulerCore") -> float | None:
        """When `overdue` has somebody next, as things are."""
        since = [next(iter(self._since.values()))] if self._since else []
        if self._alone_since is not None and core.waiting:
            since.append(self._alone_since)
        return min(since) + core.limits.recovery_timeout_seconds if since else None

    def overdue(self, core: "SchedulerCore", now: float) -> list[tuple[Sequence, str]]:
        """Who has waited so for too long, with a sentence for its client."""
        next_time = self.next_time(core)
        if next_time is None or now < next_time:
            return []
        seconds = core.limits.recovery_timeout_seconds
        if self._alone_since is not None and now >= self._alone_since + seconds:
            lacks = [(seq, "no executor came back") for seq in core.waiting]
        else:
            overdue = [seq for seq, since in self._since.items() if now >= since + seconds]
            lacks = [(seq, _lack(core, seq)) for seq in overdue]
        return [
            (seq, f"the request could not go on: {lack} within {seconds:g} seconds; try again")
            for seq, lack in lacks
        ]


def _tell(core: "SchedulerCore", seq: Sequence, now: float, detail: str, own: Reason | None) -> None:
    if seq.time_line is not None:
        seq.time_line.wait(now, core.clocks, step_id=0, detail=detail, own=own)


def _lack(core: "SchedulerCore", seq: Sequence) -> str:
    """What did not come."""
    if not core.executors:
        return "no executor came back"
    needs = f" with the abilities {sorted(seq.request.needs)}" if seq.request.needs else ""
    return f"no executor{needs} came back that holds {seq.max_len} tokens, prompt and max_tokens together"
