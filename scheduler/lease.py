"""Decides who leads: the lease of schedulers that stand by for each other, as a state machine without I/O.

They share one lease file (`lease_file`). It names the leader and its term, and holds a beat that the leader
counts up; the leader's process keeps it locked.

    STANDING_BY ── look(record, is_free, now) ─► Claim ── claimed(…) ─► LEADING
    LEADING     ── beat(is_mine) ─► the record to write, or None: another one has taken the lease
    LEADING     ── fenced(term, now) ─► STANDING_BY
    LEADING     ── hand_over() ─► LEAVING ── seen(record) ─► whether another one leads

Rules:
1. A claim's term is above every term seen in the file or reported by an executor.
2. A lease is claimed when it is free, because its leader's process is gone or has given it up; or when its
   beat has stood still for `lease_seconds` by the clock of the scheduler that looks. Two clocks are never
   compared.
3. A leader whose file is another's, or that learns that another scheduler holds an executor, steps down. It
   does not claim again before another `lease_seconds` have passed: never in reply.
4. Nothing here stops a leader that was frozen and continues: the executors refuse its term.

Must not know: files, the clock, executors, what leading means.
"""

import enum
from dataclasses import dataclass

BEATS_A_LEASE = 5
LOOKS_A_LEASE = 20
MOST_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True, slots=True)
class Record:
    """What the lease file says. `beat` changes as long as the leader lives."""

    term: int
    holder: str
    beat: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Write this record and lead; `usurps` when the file is locked by a leader that does not beat."""

    record: Record
    usurps: bool


class Role(enum.Enum):
    """The present role of a scheduler that shares a lease."""

    STANDING_BY = "standing by"
    LEADING = "leading"
    LEAVING = "leaving"  # leads until another one does, and does not keep the lease


class Lease:
    """One scheduler's side of the lease."""

    def __init__(self, scheduler_id: str, lease_seconds: float) -> None:
        self.role = Role.STANDING_BY
        self.term = 0
        """The term at which it leads, or last led."""
        self.lease_seconds = lease_seconds
        self._scheduler_id = scheduler_id
        self._beat = 0
        self._highest_term = 0
        self._seen: Record | None = None
        self._seen_since: float | None = None
        self._not_before = float("-inf")

    @property
    def beat_seconds(self) -> float:
        """Time between two beats of the leader."""
        return self.lease_seconds / BEATS_A_LEASE

    @property
    def look_seconds(self) -> float:
        """Time between two looks of a standby: how soon it sees that a leader has ended."""
        return min(self.lease_seconds / LOOKS_A_LEASE, MOST_SECONDS_BETWEEN_LOOKS)

    def may_claim(self, now: float) -> bool:
        """Whether enough time has passed since it stepped down."""
        return now >= self._not_before

    def look(self, record: Record | None, now: float, *, is_free: bool) -> Claim | None:
        """A standby has read the file (None: it is new); returns a claim if it should lead."""
        assert self.role is Role.STANDING_BY
        if self._seen_since is None or record != self._seen:
            self._seen, self._seen_since = record, now
        if record is not None:
            self._highest_term = max(self._highest_term, record.term)
        if not self.may_claim(now):
            return None
        if not is_free and now < self._seen_since + self.lease_seconds:
            return None
        return Claim(Record(self._highest_term + 1, self._scheduler_id, self._beat + 1), usurps=not is_free)

    def claimed(self, claim: Claim) -> None:
        """The claim is in the file: it leads."""
        assert self.role is Role.STANDING_BY
        self.role = Role.LEADING
        self.term = self._highest_term = claim.record.term
        self._beat = claim.record.beat

    def beat(self, now: float, *, is_mine: bool) -> Record | None:
        """A beat is due; returns the record to write, or None: the file is another's, it leads no longer."""
        assert self.role is Role.LEADING
        if not is_mine:
            self._step_down(now)
            return None
        self._beat += 1
        return Record(self.term, self._scheduler_id, self._beat)

    def fenced(self, term: int, now: float) -> None:
        """An executor is held by another scheduler, at this term: it no longer leads."""
        self._highest_term = max(self._highest_term, term)
        if self.role is not Role.STANDING_BY:
            self._step_down(now)

    def hand_over(self) -> None:
        """It wants to leave: it leads on until another scheduler claims the lease."""
        if self.role is Role.LEADING:
            self.role = Role.LEAVING

    def seen(self, record: Record | None, now: float) -> bool:
        """A leaving scheduler has read the file; returns whether another one leads."""
        assert self.role is Role.LEAVING
        if record is None or record.term <= self.term:
            return False
        self._step_down(now)
        return True

    @property
    def has_seen(self) -> bool:
        """Whether it has ever read the file."""
        return self._highest_term > 0 or self._seen_since is not None

    @property
    def leader(self) -> str:
        """The other scheduler that leads, by the file as a standby last saw it; empty if it names none."""
        holder = "" if self._seen is None else self._seen.holder
        return "" if holder == self._scheduler_id else holder

    def _step_down(self, now: float) -> None:
        self.role = Role.STANDING_BY
        self._seen = self._seen_since = None
        self._not_before = now + self.lease_seconds
