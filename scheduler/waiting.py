"""The waiting sequences, in order of service.

Importance class first (lower is served first), then the policy's order, then arrival. A class behind the best
one improves by one for every `aging_seconds` that its oldest member has waited, so that nothing starves. What
it wins by that is one turn: when one of its members has entered before somebody more important, it begins
anew. So however many are aged, a class takes one seat in (difference + 1) * `aging_seconds` from the best.

    class 0 ─┬─ tenant a ─ heap of its sequences      the next one of a class is the head of the tenant whose
             └─ tenant b ─ heap of its sequences      turn it is: `fcfs`, `deadline`: the best head;
    class 5 ─── tenant a ─ …                          `fair`: the least served tenant's head

Those whose executor was lost or drained stand in classes of their own, each before the one of its importance:
so their recovery can be paced (`recovery`).

All heaps delete lazily: entering and leaving cost O(log n), giving up while waiting O(1), and the stale entry
is swept out when it comes up. So neither a step nor a cancel depends on how many wait. Pure.
"""

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from scheduler.sequence import Sequence, State
from scheduler.tenants import Tenant

_PARKED = 0  # no entry of a heap has this number
_SLACK = 64  # stale entries that are not worth sweeping

Key = tuple[bool, float, float, int]
Rank = tuple[float, float, float, int]


class Policy(Enum):
    """Who is served next within an importance class."""

    FCFS = "fcfs"  # first come, first served
    FAIR = "fair"  # the tenant that was served least (virtual token counter)
    DEADLINE = "deadline"  # least slack: what must start soonest to be done in time


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one importance class."""

    priority: int
    is_recovering: bool
    heaps: dict[Tenant, list[tuple[Key, int, Sequence]]] = field(default_factory=dict)
    ready: list[tuple[Rank, int, Tenant]] = field(default_factory=list)
    ready_entry: dict[Tenant, int] = field(default_factory=dict)  # the one entry of `ready` that counts
    ages: dict[Tenant, list[tuple[float, int, Sequence]]] = field(
        default_factory=dict
    )  # by how long they wait
    oldest: list[tuple[float, int, Tenant]] = field(default_factory=list)  # tenants, by their oldest member
    oldest_entry: dict[Tenant, int] = field(default_factory=dict)  # the one entry of `oldest` that counts
    num_entries: int = 0  # of the heaps, stale ones included, at most
    num_parked: int = 0  # members that are not served for now: while there are any, its turn is remembered
    turn_at: float = -math.inf  # when one of it last entered before somebody more important


def _class_of(seq: Sequence) -> tuple[int, bool]:
    return seq.request.priority, seq.is_recovering


class WaitingQueue:
    """Sequences in state WAITING. The caller moves states and tells of every change."""

    def __init__(self, policy: Policy = Policy.FCFS, aging_seconds: float | None = None) -> None:
        self._policy = policy
        self._aging_seconds = aging_seconds
        self._classes: dict[tuple[int, bool], _Class] = {}
        self._entry_of: dict[Sequence, int] = {}  # the entry that counts: one may wait more than once
        self._next_entry = 0
        self._aside: dict[Tenant, None] = {}  # tenants at a limit of their own
        self.parked: dict[Sequence, None] = {}  # those that are not served before `unpark`
        self.num_tokens = 0  # of all that wait: what is known of them stays as it is until they enter
        self.counts: dict[tuple[int, str], int] = {}  # who waits, by importance class and tenant

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._entry_of)

    # --- coming and going --------------------------------------------------------------------------------

    def push(self, seq: Sequence) -> None:
        """Adds a sequence that waits."""
        assert seq.state is State.WAITING
        assert seq not in self._entry_of
        num_tokens = len(seq.token_ids)
        self.num_tokens += num_tokens
        seq.tenant.num_waiting += 1
        group = (seq.request.priority, seq.tenant.name)
        self.counts[group] = self.counts.get(group, 0) + 1
        seq.tenant.num_waiting_tokens += num_tokens
        self._add_entry(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        del self._entry_of[seq]
        if seq in self.parked:
            self._drop_parked(seq)
        num_tokens = len(seq.token_ids)
        self.num_tokens -= num_tokens
        seq.tenant.num_waiting -= 1
        group = (seq.request.priority, seq.tenant.name)
        self.counts[group] -= 1
        if not self.counts[group]:
            del self.counts[group]
        seq.tenant.num_waiting_tokens -= num_tokens

    def admit(self, seq: Sequence, now: float) -> None:
        """Takes out one that enters a batch. Passing somebody more important is its class's turn."""
        self.remove(seq)
        priority = seq.request.priority
        classes = list(self._classes.values())
        if any(better.priority < priority and self._head(better) is not None for better in classes):
            for of_class in classes:
                if of_class.priority == priority:
                    of_class.turn_at = now

    def park(self, seq: Sequence) -> None:
        """`seq` still waits, but is not served before `unpark`."""
        if seq not in self.parked:
            self._entry_of[seq] = _PARKED
            self.parked[seq] = None
            self._classes[_class_of(seq)].num_parked += 1

    def unpark(self, seq: Sequence) -> bool:
        """Back into its place, if it still waits and was parked."""
        if self._entry_of.get(seq) != _PARKED:
            return False
        self._drop_parked(seq)
        self._add_entry(seq)
        return True

    def _drop_parked(self, seq: Sequence) -> None:
        del self.parked[seq]
        self._classes[_class_of(seq)].num_parked -= 1

    def set_aside(self, tenant: Tenant) -> None:
        """`tenant` is at a limit of its own: it is passed over until `recall`."""
        self._aside[tenant] = None

    @property
    def aside(self) -> Collection[Tenant]:
        """Tenants that are passed over."""
        return self._aside.keys()

    def recall(self, tenant: Tenant) -> None:
        """Something of `tenant` was given back: it takes part again."""
        if tenant in self._aside:
            del self._aside[tenant]
            for of_class in self._classes.values():
                if tenant in of_class.heaps:
                    self._offer(of_class, tenant)
                if of_class.ages.get(tenant):
                    self._offer_age(of_class, tenant)

    def _add_entry(self, seq: Sequence) -> None:
        self._next_entry += 1
        self._entry_of[seq] = self._next_entry
        name = _class_of(seq)
        of_class = self._classes.get(name)
        if of_class is None:
            of_class = self._classes[name] = _Class(*name)
        heap = of_class.heaps.setdefault(seq.tenant, [])
        heapq.heappush(heap, (self._key(seq), self._next_entry, seq))
        ages = of_class.ages.setdefault(seq.tenant, [])
        heapq.heappush(ages, (seq.waiting_since, self._next_entry, seq))
        of_class.num_entries += 1
        if ages[0][2] is seq:
            self._offer_age(of_class, seq.tenant)
        if heap[0][2] is seq:
            self._offer(of_class, seq.tenant)
        if of_class.num_entries > _SLACK + 2 * len(self._entry_of):
            self._sweep(of_class)

    def _key(self, seq: Sequence) -> Key:
        """Order within tenant and class: those that ran before and lost their place come first."""
        first = seq.latest_start if self._policy is Policy.DEADLINE else 0.0
        return (not seq.has_started, first, seq.request.arrival, seq.order)

    # --- who is next -------------------------------------------------------------------------------------

    def peek(self, now: float, *, skip_recovering: bool = False) -> Sequence | None:
        """Who is served next, or None; `skip_recovering`: among those that did not lose their executor."""
        heads = [
            (of_class, head)
            for of_class in list(self._classes.values())
            if not (skip_recovering and of_class.is_recovering) and (head := self._head(of_class)) is not None
        ]
        if not heads:
            return None
        best = min(of_class.priority for of_class, _ in heads)

        def rank(item: tuple[_Class, Sequence]) -> tuple[float, int, bool]:
            of_class = item[0]
            aged = self._improvement(of_class, now) if of_class.priority > best else 0.0
            return (of_class.priority - aged, of_class.priority, not of_class.is_recovering)

        return min(heads, key=rank)[1] if len(heads) > 1 else heads[0][1]

    def _improvement(self, of_class: _Class, now: float) -> float:
        """By how many classes its oldest member's wait lifts this one, since it last had its turn."""
        if self._aging_seconds is None:
            return 0.0
        since = max(self._oldest(of_class), of_class.turn_at)
        return max(0.0, (now - since) // self._aging_seconds)

    def _oldest(self, of_class: _Class) -> float:
        """Since when the oldest of a class waits, those left out whose tenant is at a limit of its own."""
        oldest = of_class.oldest
        while oldest:
            since, entry, tenant = oldest[0]
            if of_class.oldest_entry.get(tenant) != entry or tenant in self._aside:
                heapq.heappop(oldest)
                continue
            ages = of_class.ages[tenant]
            while ages and self._entry_of.get(ages[0][2]) != ages[0][1]:
                heapq.heappop(ages)
            if not ages:
                heapq.heappop(oldest)
                del of_class.ages[tenant], of_class.oldest_entry[tenant]
            elif ages[0][0] != since:
                heapq.heappop(oldest)
                self._offer_age(of_class, tenant)
            else:
                return since
        return math.inf

    def _offer_age(self, of_class: _Class, tenant: Tenant) -> None:
        self._next_entry += 1
        of_class.oldest_entry[tenant] = self._next_entry
        heapq.heappush(of_class.oldest, (of_class.ages[tenant][0][0], self._next_entry, tenant))
        if len(of_class.oldest) > _SLACK + 2 * len(of_class.ages):
            entries = of_class.oldest_entry
            of_class.oldest[:] = [item for item in of_class.oldest if entries.get(item[2]) == item[1]]
            heapq.heapify(of_class.oldest)

    def _head(self, of_class: _Class) -> Sequence | None:
        """The next of one class. Ranks get worse as tenants are served, so a stale top is pushed down."""
        ready = of_class.ready
        while ready:
            rank, entry, tenant = ready[0]
            if of_class.ready_entry.get(tenant) != entry or tenant in self._aside:
                heapq.heappop(ready)
                continue
            heap = of_class.heaps[tenant]
            while heap and self._entry_of.get(heap[0][2]) != heap[0][1]:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(ready)
                del of_class.heaps[tenant], of_class.ready_entry[tenant]
                continue
            if self._rank(tenant, heap) != rank:
                heapq.heappop(ready)
                self._offer(of_class, tenant)
                continue
            return heap[0][2]
        if not of_class.heaps and not of_class.num_parked:
            del self._classes[of_class.priority, of_class.is_recovering]
        return None

    def _rank(self, tenant: Tenant, heap: list[tuple[Key, int, Sequence]]) -> Rank:
        """Order among tenants of one class, by their heads. Under `fair`, service counts before all."""
        key = heap[0][0]
        return (tenant.service, key[0], *key[2:]) if self._policy is Policy.FAIR else key

    def _offer(self, of_class: _Class, tenant: Tenant) -> None:
        rank = self._rank(tenant, of_class.heaps[tenant])
        self._next_entry += 1
        of_class.ready_entry[tenant] = self._next_entry
        heapq.heappush(of_class.ready, (rank, self._next_entry, tenant))
        if len(of_class.ready) > _SLACK + 2 * len(of_class.heaps):
            entries = of_class.ready_entry
            of_class.ready[:] = [item for item in of_class.ready if entries.get(item[2]) == item[1]]
            heapq.heapify(of_class.ready)

    def _sweep(self, of_class: _Class) -> None:
        """Drops stale entries, and tenants of whom nobody waits."""
        for tenant, heap in list(of_class.heaps.items()):
            heap[:] = [item for item in heap if self._entry_of.get(item[2]) == item[1]]
            heapq.heapify(heap)
            if not heap:
                del of_class.heaps[tenant], of_class.ready_entry[tenant]
        for tenant, ages in list(of_class.ages.items()):
            ages[:] = [item for item in ages if self._entry_of.get(item[2]) == item[1]]
            heapq.heapify(ages)
            if not ages:
                del of_class.ages[tenant], of_class.oldest_entry[tenant]
        of_class.num_entries = sum(map(len, of_class.heaps.values()))
