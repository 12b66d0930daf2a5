"""What an executor's steps changed, as frames for the live page; newcomers also get who sits where.

A frame tells several steps: of most of them only that they happened. A looker who missed frames, or has just
come, is given a whole one. Pure; it must not know proto types, sockets, or pages.
"""

from dataclasses import dataclass, field
from typing import Any, Final

# What a frame is made of: plain values, ready for JSON.
Frame = dict[str, Any]

PREEMPTED: Final = "PREEMPTED"


@dataclass(frozen=True, slots=True)
class Rider:
    """One sequence that sits in a batch."""

    seq_id: int
    request_id: str
    index: int
    padding: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration against the one before, and how many like it came right after."""

    step_id: int
    num_alike: int = 0
    # Who left: seq_id, and a finish reason's name or PREEMPTED.
    left: tuple[tuple[int, str], ...] = ()
    entered: tuple[Rider, ...] = ()
    # Who computes a stretch of prompt: seq_id, tokens. The last chunk chooses a token as well.
    prefill: tuple[tuple[int, int], ...] = ()
    last_chunk: tuple[tuple[int, int], ...] = ()
    still: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """Some iterations of one executor."""

    executor_id: str
    step_id: int  # of the newest
    time_seconds: float
    # Who sat there before `steps`, when all that was known is to be forgotten; otherwise None.
    seated: tuple[Rider, ...] | None
    steps: tuple[Step, ...]
    # How the executor stands after the newest; shown as it is.
    gauges: Frame = field(default_factory=dict)


class Ride:
    """One executor's batch as lookers know it."""

    def __init__(self) -> None:
        self._seated: dict[int, Rider] = {}
        self._newest: Changes | None = None

    def frame(self, changes: Changes) -> Frame:
        """What `changes` tell."""
        self._newest = changes
        frame = _head(changes)
        if changes.seated is not None:
            self._seated = {rider.seq_id: rider for rider in changes.seated}
            frame["seated"] = [_name(rider) for rider in changes.seated]
        for step in changes.steps:
            for seq_id, _ in step.left:
                self._seated.pop(seq_id, None)
            self._seated.update((rider.seq_id, rider) for rider in step.entered)
        frame["steps"] = [_told(step) for step in changes.steps]
        return frame

    def whole(self) -> Frame:
        """Who sits there now, for somebody who knows nothing; only after a first `frame`."""
        assert self._newest is not None, "there is no step to tell of"
        return {
            **_head(self._newest),
            "seated": [_name(rider) for rider in self._seated.values()],
            "steps": [],
        }


def _head(changes: Changes) -> Frame:
    return {
        "executor": changes.executor_id,
        "step": changes.step_id,
        "time": round(changes.time_seconds, 4),
        **changes.gauges,
    }


def _told(step: Step) -> Frame:
    told: Frame = {"step": step.step_id}
    if step.num_alike:
        told["alike"] = step.num_alike
    if step.entered:
        told["entered"] = [_name(rider) for rider in step.entered]
    for name in ("left", "prefill", "last_chunk", "still"):
        if value := getattr(step, name):
            told[name] = value
    return told


def _name(rider: Rider) -> list[int | str]:
    """Who sits there: [seq_id, request id, choice], then 1 when the row is padding, and the tenant if any."""
    name: list[int | str] = [rider.seq_id, rider.request_id, rider.index]
    if rider.tenant:
        return [*name, int(rider.padding), rider.tenant]
    return [*name, 1] if rider.padding else name
