"""One executor's batch as a moving picture: rows are seats, columns are iterations.

Pure: from what each step did to cells that somebody may draw. It must not know proto types, colours, or
terminals; time comes in as an argument.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from chairlift.seats import Member, Seats, Step

RATE_SECONDS: Final = 2.0
_KEPT_COLUMNS: Final = 512


class Kind(Enum):
    """What somebody does in a step."""

    DECODE = "decode"
    PREFILL = "prefill"
    STILL = "sits still"
    PADDING = "padding"


class End(Enum):
    """How somebody's ride ended."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled or failed"


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a step told beside its members. Times in microseconds, of the newest step that was answered."""

    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    step_us: int = 0
    idle_us: int = 0
    queue: tuple[tuple[int, str, int], ...] = ()
    """Importance class, tenant and number of those that wait together."""
    num_accepted_tokens: int = 0
    """Guessed tokens that were right so far, beside those that `num_sampled` counts."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One iteration of one executor, as it is drawn."""

    step: Step
    chunks: frozenset[int] = frozenset()
    """Who computes a stretch of prompt, by seq_id."""
    num_sampled: int = 0
    ends: Mapping[int, End] = field(default_factory=dict)
    """How those that left since the frame before came to their end, by seq_id."""
    gauges: Gauges = field(default_factory=Gauges)


@dataclass(slots=True)
class Cell:
    """One seat in one step. `end` is told a step or two later."""

    rider: Member
    kind: Kind
    entered: bool
    end: End | None = None


Column = list[Cell | None]


class Lift:
    """What is to be seen of one executor."""

    def __init__(self) -> None:
        self.columns: deque[Column] = deque(maxlen=_KEPT_COLUMNS)
        """Oldest first; a seat that nobody has is None, and one that was not there yet is missing."""
        self.gauges = Gauges()
        self.step_id = 0
        self.news_at = 0.0
        self._seats = Seats(0)
        self._sampled: deque[tuple[float, int]] = deque()

    @property
    def seated(self) -> tuple[Member | None, ...]:
        """Who sits where."""
        return self._seats.seated

    @property
    def num_riding(self) -> int:
        """How many sit here."""
        return sum(member is not None and not member.padding for member in self.seated)

    @property
    def boarded(self) -> frozenset[str]:
        """Who got on in the newest step, by name."""
        newest = self.columns[-1] if self.columns else []
        return frozenset(cell.rider.name for cell in newest if cell and cell.entered)

    def take(self, frame: Frame, now: float) -> None:
        """Adds the column of a step that was told of at `now`, seconds."""
        is_fresh = frame.step.step_id <= self.step_id  # a fresh epoch: numbers of sequences begin anew
        if is_fresh:
            self._seats = Seats(0)
        accepted = frame.gauges.num_accepted_tokens
        known = self.gauges.num_accepted_tokens if self.step_id else accepted  # nothing is news at first
        num_accepted = accepted - (0 if is_fresh else known)
        self.step_id, self.gauges, self.news_at = frame.step.step_id, frame.gauges, now
        for seq_id, end in frame.ends.items():
            self._mark(seq_id, end)
        before = {member.seq_id for member in self.seated if member}
        self._seats.take(frame.step)
        moving = {member.seq_id for member in frame.step.members}
        column: Column = []
        for member in self.seated:
            if member is None:
                column.append(None)
                continue
            kind = Kind.DECODE
            if member.seq_id not in moving:
                kind = Kind.STILL
            elif member.padding:
                kind = Kind.PADDING
            elif member.seq_id in frame.chunks:
                kind = Kind.PREFILL
            column.append(Cell(member, kind, entered=member.seq_id not in before))
        self.columns.append(column)
        self._sampled.append((now, frame.num_sampled + num_accepted))

    def lose(self, names: Collection[str]) -> None:
        """Takes those out who have got on elsewhere: an executor that is gone tells of no leavers."""
        lost = [member for member in self.seated if member and member.name in names]
        if not lost:
            return
        for member in lost:
            self._mark(member.seq_id, End.PREEMPTED)
        rest = tuple(member for member in self.seated if member and member not in lost)
        self._seats.take(Step(self.step_id, rest, frozenset(member.seq_id for member in lost)))

    def tokens_per_second(self, now: float) -> float:
        """Over the last RATE_SECONDS."""
        while self._sampled and self._sampled[0][0] <= now - RATE_SECONDS:
            self._sampled.popleft()
        return sum(count for _, count in self._sampled) / RATE_SECONDS

    def _mark(self, seq_id: int, end: End) -> None:
        """Puts the mark where the rider last moved; columns in which it only still sat there become empty."""
        for seat, member in enumerate(self.seated):
            if member is None or member.seq_id != seq_id:
                continue
            for column in reversed(self.columns):
                cell = column[seat] if seat < len(column) else None
                if cell is None or cell.rider.seq_id != seq_id:
                    return
                if cell.kind is not Kind.STILL:
                    cell.end = end
                    return
                column[seat] = None
