"""What each iteration did, as frames for those who look: only what has changed since the frame before.

At 256 seats a step summary names every member; a frame names who got on and off, who is in prefill and who
sat still. A looker who missed frames, or has just come, is given a whole one. Pure; it must not know proto
types, sockets, or pages.
"""

from dataclasses import dataclass, field
from typing import Any, Final

# What a frame is made of: plain values, ready for JSON.
Frame = dict[str, Any]

PREEMPTED: Final = "PREEMPTED"


@dataclass(frozen=True, slots=True)
class Rider:
    """One sequence's part in a step."""

    seq_id: int
    request_id: str
    index: int
    num_tokens: int
    prefill: bool
    padding: bool
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Leaver:
    """A sequence that has left since the step before; `reason` is a finish reason's name or PREEMPTED."""

    seq_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of one executor, in local words."""

    executor_id: str
    step_id: int
    time_seconds: float
    riders: tuple[Rider, ...]
    leavers: tuple[Leaver, ...]
    num_dropped: int
    # Everything else that is shown as it is.
    gauges: Frame = field(default_factory=dict)


class Ride:
    """One executor's batch as lookers know it."""

    def __init__(self) -> None:
        self._seated: dict[int, Rider] = {}
        self._step_id = 0
        self._newest: Step | None = None

    def frame(self, step: Step) -> Frame:
        """What `step` changes; a whole frame when summaries were dropped or a fresh epoch has begun."""
        whole = step.num_dropped > 0 or step.step_id <= self._step_id
        if whole:
            self._seated.clear()
        self._step_id, self._newest = step.step_id, step
        left = [[one.seq_id, one.reason] for one in step.leavers if self._seated.pop(one.seq_id, None)]
        entered = [rider for rider in step.riders if rider.seq_id not in self._seated]
        self._seated.update((rider.seq_id, rider) for rider in entered)
        if whole:
            return self.whole()
        frame = self._head(step)
        if left:
            frame["left"] = left
        if entered:
            frame["entered"] = [_name(rider) for rider in entered]
        return frame

    def whole(self) -> Frame:
        """The newest step for somebody who knows nothing before it; only after a first `frame`."""
        assert self._newest is not None, "there is no step to tell of"
        frame = self._head(self._newest)
        frame["seated"] = [_name(rider) for rider in self._seated.values()]
        return frame

    def _head(self, step: Step) -> Frame:
        frame: Frame = {
            "executor": step.executor_id,
            "step": step.step_id,
            "time": round(step.time_seconds, 4),
            **step.gauges,
        }
        prefill = [[rider.seq_id, rider.num_tokens] for rider in step.riders if rider.prefill]
        if prefill:
            frame["prefill"] = prefill
        last_chunk = [
            [rider.seq_id, rider.num_tokens]
            for rider in step.riders
            if rider.num_tokens > 1 and not rider.prefill
        ]
        if last_chunk:  # it computes a stretch of prompt and chooses a token as well
            frame["last_chunk"] = last_chunk
        if len(step.riders) != len(self._seated):
            moved = {rider.seq_id for rider in step.riders}
            frame["still"] = [seq_id for seq_id in self._seated if seq_id not in moved]
        return frame


def _name(rider: Rider) -> list[int | str]:
    """Who sits there: [seq_id, request id, choice], then 1 when the row is padding, and the tenant if any."""
    name: list[int | str] = [rider.seq_id, rider.request_id, rider.index]
    if rider.tenant:
        return [*name, int(rider.padding), rider.tenant]
    return [*name, 1] if rider.padding else name
