"""Where the time of one request went.

While it runs, a sequence only notes changes. While it waits, the reason is the same for all that wait: what
keeps the next one from entering. So the core has one clock per reason, and a waiting sequence reads them when
its wait begins and ends: the cost of a step does not depend on how many wait. A tenant at a limit of its own
is passed over as a whole, and one clock keeps that time for all its sequences.

The durations of a sequence's entries add up to the time since it arrived. Pure: time is an argument.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

_ROUNDING = 1e-9  # seconds
MAX_KEPT = 1024  # requests whose time lines are kept after their end


class Reason(Enum):
    """What a stretch of time was spent on."""

    QUEUED_FOR_SEAT = "queued_for_seat"
    QUEUED_FOR_BLOCKS = "queued_for_blocks"
    QUEUED_FOR_TOKENS = "queued_for_tokens"  # the step's token budget was used up
    QUEUED_FOR_EXECUTOR = "queued_for_executor"  # there was none, or none took newcomers
    QUEUED_FOR_STEP = "queued_for_step"  # it only waited for the step in flight to end
    QUEUED_FOR_PREFIX = "queued_for_prefix"  # another request was computing its prefix
    QUEUED_FOR_TENANT = "queued_for_tenant"  # its tenant was at a limit of its own
    PREFILL = "prefill"
    DECODE = "decode"


SHARED = (
    Reason.QUEUED_FOR_SEAT,
    Reason.QUEUED_FOR_BLOCKS,
    Reason.QUEUED_FOR_TOKENS,
    Reason.QUEUED_FOR_EXECUTOR,
    Reason.QUEUED_FOR_STEP,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A stretch of one sequence's life; times in seconds since it arrived."""

    start: float
    duration: float
    reason: Reason
    step_id: int
    detail: str = ""


class ReasonClocks:
    """For how long each shared reason has kept the next sequence from entering."""

    __slots__ = ("_reason", "_since", "_totals")

    def __init__(self) -> None:
        self._totals = dict.fromkeys(SHARED, 0.0)
        self._reason = Reason.QUEUED_FOR_EXECUTOR
        self._since = 0.0

    def set(self, reason: Reason, now: float) -> None:
        """From now on this is the reason."""
        if reason is not self._reason:
            self._totals[self._reason] += max(0.0, now - self._since)
            self._reason, self._since = reason, now

    @property
    def reason(self) -> Reason:
        """What keeps the next sequence from entering now."""
        return self._reason

    def readings(self, now: float) -> tuple[float, ...]:
        """All clocks, in the order of SHARED."""
        return tuple(
            total + (max(0.0, now - self._since) if reason is self._reason else 0.0)
            for reason, total in self._totals.items()
        )


class AsideClock:
    """How long one tenant has been passed over, and how far the shared clocks ran in that time.

    For its sequences these stood still: they waited only for their tenant's limit.
    """

    __slots__ = ("_began", "_missed", "whose")

    def __init__(self, whose: str = "") -> None:
        self.whose = whose
        self._began: tuple[float, ...] | None = None  # shared clocks at the start; None: takes part
        self._missed = (0.0,) * len(SHARED)  # by the shared clocks, while the tenant was passed over

    def turn(self, now: float, clocks: ReasonClocks) -> None:
        """The tenant is passed over from now on, or takes part again."""
        if self._began is None:
            self._began = clocks.readings(now)
        else:
            self._missed = self._missed_until(clocks.readings(now))
            self._began = None

    def readings(self, now: float, clocks: ReasonClocks) -> tuple[float, ...]:
        """The shared clocks as its sequences see them, in the order of SHARED, and its own."""
        shared = clocks.readings(now)
        missed = self._missed_until(shared)
        return (*(one - other for one, other in zip(shared, missed, strict=True)), sum(missed))

    def _missed_until(self, readings: tuple[float, ...]) -> tuple[float, ...]:
        if self._began is None:
            return self._missed
        stretches = zip(self._missed, readings, self._began, strict=True)
        return tuple(missed + end - start for missed, end, start in stretches)


class TimeLine:
    """One sequence's entries so far, and the stretch that is open."""

    __slots__ = ("_arrival", "_aside", "_detail", "_readings", "_reason", "_since", "_step_id", "entries")

    def __init__(
        self, arrival: float, now: float, clocks: ReasonClocks, aside: AsideClock | None = None
    ) -> None:
        """`aside`: the clock of its tenant."""
        self.entries: list[Entry] = []
        self._arrival = arrival
        self._aside = aside or AsideClock()
        self._since = arrival
        self._reason: Reason | None = None
        self._readings = self._aside.readings(now, clocks)
        self._step_id = 0
        self._detail = "" if now <= arrival else f"{now - arrival:.3f} s of it at earlier schedulers"

    def wait(
        self, now: float, clocks: ReasonClocks, *, step_id: int, detail: str, own: Reason | None = None
    ) -> None:
        """It waits from now on: for a reason of its `own`, or for the shared one."""
        self.close(now, clocks)
        self._readings = self._aside.readings(now, clocks)
        self._reason, self._step_id, self._detail = own, step_id, detail

    def run(
        self, reason: Reason, now: float, clocks: ReasonClocks, *, step_id: int, detail: str = ""
    ) -> None:
        """It is in a batch from now on."""
        self.close(now, clocks)
        self._reason, self._step_id, self._detail = reason, step_id, detail

    def close(self, now: float, clocks: ReasonClocks) -> None:
        """Ends the open stretch."""
        span = now - self._since
        if span <= 0:
            return
        if self._reason is not None:
            self._add(self._since, span, self._reason)
        else:
            self._close_wait(span, self._aside.readings(now, clocks))
        self._since = now

    def _close_wait(self, span: float, readings: tuple[float, ...]) -> None:
        """Divides a wait among the reasons whose clocks ran; what none of them saw was waited elsewhere."""
        reasons = (*SHARED, Reason.QUEUED_FOR_TENANT)
        shares = [
            (reason, end - start)
            for reason, end, start in zip(reasons, readings, self._readings, strict=True)
        ]
        start = self._since
        unseen = span - sum(share for _, share in shares)
        if unseen > _ROUNDING:
            self._add(start, unseen, Reason.QUEUED_FOR_EXECUTOR)
            start += unseen
        for reason, share in shares:
            if share > _ROUNDING:
                self._add(start, share, reason)
                start += share

    def _add(self, start: float, duration: float, reason: Reason) -> None:
        detail = self._aside.whose if reason is Reason.QUEUED_FOR_TENANT else self._detail
        self.entries.append(Entry(start - self._arrival, duration, reason, self._step_id, detail))

    def so_far(self, now: float, clocks: ReasonClocks) -> list[Entry]:
        """All entries, including the open stretch, which stays open."""
        copy = TimeLine.__new__(TimeLine)
        for name in self.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.entries = list(self.entries)
        copy.close(now, clocks)
        return copy.entries


class TimeLines:
    """Time lines of the requests that ended last, by tenant, request id and choice."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], dict[int, list[Entry]]] = OrderedDict()

    def keep(self, tenant: str, request_id: str, sample_index: int, entries: list[Entry]) -> None:
        """Keeps the line of a choice that has ended."""
        name = (tenant, request_id)
        self._kept.setdefault(name, {})[sample_index] = entries
        self._kept.move_to_end(name)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def of(self, tenant: str, request_id: str) -> dict[int, list[Entry]]:
        """The lines kept for this tenant's request id, by choice; empty when there are none."""
        return dict(self._kept.get((tenant, request_id), {}))
