"""The queue of waiting sequences, in order of service.

By importance class first (lower is served first), then in the policy's order, then by arrival. A class behind
the best one improves by one for every `aging_seconds` that its oldest member has waited, so that nothing
starves. That wins it one turn: once one of its members has entered before a more important sequence, or has
had the rest of its prompt computed first (`admitting`), it ages anew. So however many members have aged, a
class takes one seat and one prompt from the best class every (difference + 1) * `aging_seconds`.

    class 0 ─┬─ tenant a ─ heap of its sequences      the next one of a class is the head of the tenant whose
             └─ tenant b ─ heap of its sequences      turn it is: `fcfs`, `deadline`: the best head;
    class 5 ─── tenant a ─ …                          `fair`: the least served tenant's head

Sequences whose executor was lost or drained are in classes of their own, each before the one of its
importance, so that their recovery can be paced (`recovery`). So are those that only some executors can ever
compute: the others do not see them, however many there are.

All heaps delete lazily: entering and leaving cost O(log n), aborting while waiting O(1), and a stale entry is
removed when it reaches the top. So neither a step nor a cancel depends on the length of the queue (except
that `followers` goes once through those of an aborted sequence). Pure.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

from scheduler.sequence import Sequence, State
from scheduler.tenant_heaps import Key, TenantHeaps
from scheduler.tenants import Contest, Tenant

_PARKED = 0  # no heap entry has this number

_Name = tuple[int, bool, frozenset[str] | None]  # of a class: its first three fields
Line = tuple[_Name, Tenant]  # the sequences of one tenant in one class
Rank = tuple[int, bool, Key]  # within a line


class Policy(Enum):
    """Which sequence is served next within an importance class."""

    FCFS = "fcfs"  # first come, first served
    FAIR = "fair"  # the least served tenant (virtual token counter)
    DEADLINE = "deadline"  # least slack: what must start soonest to be done in time


class Hold(Enum):
    """What keeps a parked sequence from being served, other than waiting for its prefix to be computed."""

    SEARCH = "search"  # executors may die of it (`inquiry`)
    STRANDED = "stranded"  # no attached executor can ever compute it (`stranded`)


_NO_HOLDS: frozenset[Hold] = frozenset()


@dataclass(slots=True, eq=False)
class _Class:
    """Waiting sequences of one importance class: all or none recover, all for the same executors."""

    priority: int
    is_recovering: bool
    only_at: frozenset[str] | None  # executors that can ever compute them; None: all can
    by_turn: TenantHeaps  # in order of service
    by_age: TenantHeaps  # longest wait first
    num_standing: int = 0  # members that may be served; a class without any is forgotten

    @property
    def name(self) -> _Name:
        """Its key in the queue's dictionary."""
        return self.priority, self.is_recovering, self.only_at

    def is_seen_by(self, executor_id: str | None) -> bool:
        """Whether this executor can compute its sequences; None stands for any."""
        return self.only_at is None or executor_id is None or executor_id in self.only_at


def _by_key(_: Tenant, key: Key) -> Key:
    """Orders tenants by their heads."""
    return key


def _by_service_in(contest: Contest) -> Callable[[Tenant, Key], Key]:
    """Orders tenants by service, then by their heads."""
    return lambda tenant, key: (tenant.service_in(contest), key[0], *key[2:])


def _class_of(seq: Sequence) -> _Name:
    return seq.request.priority, seq.is_recovering, seq.only_at


class WaitingQueue:
    """Sequences in state WAITING. The caller moves their states and reports every change."""

    def __init__(
        self,
        policy: Policy = Policy.FCFS,
        aging_seconds: float | None = None,
        on_aside: Callable[[Tenant], None] = lambda _: None,
        on_hold: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        """`on_aside`: called when a tenant is set aside, and when it is recalled.

        `on_hold`: called when a sequence is put on hold.
        """
        self._policy = policy
        self._aging_seconds = aging_seconds
        self._on_aside = on_aside
        self._on_hold = on_hold
        self._classes: dict[_Name, _Class] = {}
        self._num_recovering_classes = 0
        self._ladder: list[int] = []  # the importance classes that somebody stands in, the best first
        self._on_rung: dict[int, list[_Class]] = {}  # the parts of each
        self._oldest: list[tuple[float, int, Sequence]] = []  # a heap of all, by how long they have waited
        self._turn_at: dict[int, float] = {}  # when each importance class last had a turn before a better one
        self._stands_in: dict[Sequence, _Class] = {}  # where those stand that are not parked
        self._entry_of: dict[Sequence, int] = {}  # the valid entry: a sequence may wait more than once
        self._next_entry = 0
        self._aside: dict[Tenant, Sequence] = {}  # tenants at a limit of their own, and what it stopped
        self._contests: dict[int, Contest] = {}  # by importance class: tenants that wait and are not aside
        self._held_back: set[Tenant] = set()  # tenants aside, and those recalled but not looked at since
        self.num_held_back = 0  # how many of their sequences wait
        self.parked: dict[Sequence, frozenset[Hold]] = {}  # those that are not served for now
        self.num_tokens = 0  # known tokens of all that wait; these do not change while waiting
        self.counts: dict[tuple[int, str], int] = {}  # how many wait, by importance class and tenant

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._entry_of)

    # --- coming and going --------------------------------------------------------------------------------

    def push(self, seq: Sequence) -> None:
        """Adds a waiting sequence."""
        assert seq.state is State.WAITING
        assert seq not in self._entry_of
        num_tokens = len(seq.token_ids)
        self.num_tokens += num_tokens
        seq.tenant.num_waiting += 1
        self.num_held_back += seq.tenant in self._held_back
        contest = self._contest(seq.request.priority)
        if seq.tenant not in self._aside:
            contest.enter(seq.tenant)
        group = (seq.request.priority, seq.tenant.name)
        self.counts[group] = self.counts.get(group, 0) + 1
        seq.tenant.num_waiting_tokens += num_tokens
        self._add_entry(seq)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence, wherever it is in the queue."""
        del self._entry_of[seq]
        self._withdraw(seq)
        self.parked.pop(seq, None)
        num_tokens = len(seq.token_ids)
        self.num_tokens -= num_tokens
        self.num_held_back -= seq.tenant in self._held_back
        seq.tenant.num_waiting -= 1
        if not seq.tenant.num_waiting:
            self._held_back.discard(seq.tenant)
        group = (seq.request.priority, seq.tenant.name)
        self.counts[group] -= 1
        if not self.counts[group]:
            del self.counts[group]
            self._contest(seq.request.priority).leave(seq.tenant)
        seq.tenant.num_waiting_tokens -= num_tokens
        self._let_pass(seq)

    def admit(self, seq: Sequence, now: float, *, at: str | None = None, passes: bool = False) -> None:
        """Removes a sequence that enters a batch, `at` this executor.

        If it passes a more important one that could have entered there, that is its class's turn. `passes`:
        it enters before the rest of a more important prompt in progress.
        """
        priority = seq.request.priority
        seq.importance = priority
        if passes or self._has_head_above(priority, at):
            self.take_turn(seq, self.importance(seq, now), now)
        self.remove(seq)

    def _has_head_above(self, priority: int, at: str | None) -> bool:
        """Whether somebody more important is served next in its class, and can be computed there."""
        better = itertools.takewhile(lambda rung: rung < priority, self._ladder)
        return any(
            of_class.is_seen_by(at) and of_class.by_turn.first() is not None
            for rung in better
            for of_class in self._on_rung[rung]
        )

    def take_turn(self, seq: Sequence, importance: float, now: float) -> None:
        """`seq` takes the turn that its class has won, until its prompt is computed."""
        seq.importance = importance
        self._turn_at[seq.request.priority] = now

    def park(self, seq: Sequence) -> None:
        """`seq` still waits, but is not served before `unpark`: another sequence or executor goes first."""
        if seq not in self.parked:
            self._entry_of[seq] = _PARKED
            self._withdraw(seq)
            self._let_pass(seq)
            self.parked[seq] = _NO_HOLDS

    def unpark(self, seq: Sequence) -> bool:
        """Puts `seq` back into its place, if it still waits, was parked, and nothing holds it."""
        if not self.is_parked_freely(seq):
            return False
        del self.parked[seq]
        self._add_entry(seq)
        return True

    def is_parked_freely(self, seq: Sequence) -> bool:
        """Whether `seq` is parked without a hold."""
        return self.parked.get(seq) is _NO_HOLDS

    def hold(self, seq: Sequence, why: Hold) -> None:
        """`seq` still waits, but is not served before `let_go` with the same reason. It follows no other."""
        self.park(seq)
        self.parked[seq] |= {why}
        self._on_hold(seq)

    def let_go(self, seq: Sequence, why: Hold) -> None:
        """Ends a hold of `seq`, if there was one: back into its place, unless something else holds it."""
        holds = self.parked.get(seq, _NO_HOLDS)
        if why in holds:
            self.parked[seq] = holds - {why} or _NO_HOLDS
            self.unpark(seq)

    def reorder(self, seq: Sequence) -> None:
        """Something that decides about the place of `seq`, which waits, has changed."""
        if seq not in self.parked:  # else it gets its new place when it is unparked
            self._add_entry(seq)

    def set_aside(self, seq: Sequence) -> None:
        """A limit of its own tenant stops `seq`, the tenant's next: the tenant is passed over until `recall`.

        Meanwhile it does not compete. It is recalled without a call when `seq` leaves, or when a sequence
        joins the queue before it.
        """
        if seq.tenant not in self._aside:
            self._aside[seq.tenant] = seq
            for contest in seq.tenant.lifted:
                contest.leave(seq.tenant)
            self._on_aside(seq.tenant)
        if seq.tenant not in self._held_back:
            self._held_back.add(seq.tenant)
            self.num_held_back += seq.tenant.num_waiting

    def is_held_back(self, tenant: Tenant) -> bool:
        """Whether `tenant` was at a limit of its own when its next sequence was last looked at."""
        return tenant in self._held_back

    def let_through(self, tenant: Tenant) -> None:
        """The tenant's next sequence was looked at, and no limit of its own stops it."""
        if tenant in self._held_back:
            self._held_back.remove(tenant)
            self.num_held_back -= tenant.num_waiting

    @property
    def aside(self) -> Collection[Tenant]:
        """Tenants that are passed over."""
        return self._aside.keys()

    def recall(self, tenant: Tenant) -> None:
        """`tenant` has been given something back: it takes part again."""
        if tenant in self._aside:
            del self._aside[tenant]
            # even if all that wait are parked, and so there is no class
            for priority, contest in self._contests.items():
                if (priority, tenant.name) in self.counts:
                    contest.enter(tenant)
            for of_class in self._classes.values():
                of_class.by_turn.recall(tenant)
                of_class.by_age.recall(tenant)
            self._on_aside(tenant)

    def _let_pass(self, seq: Sequence) -> None:
        """`seq` is not served for now: if it was what stopped its tenant, the tenant's others may be."""
        if self._aside.get(seq.tenant) is seq:
            self.recall(seq.tenant)

    def line_of(self, seq: Sequence) -> Line:
        """The line of its tenant in its class, which is served in the order of `rank_in_line`."""
        return _class_of(seq), seq.tenant

    def rank_in_line(self, seq: Sequence) -> Rank:
        """Order among one tenant's sequences, lowest first; neither aging nor `set_aside` counts."""
        return (seq.request.priority, not seq.is_recovering, self._key(seq))

    def _comes_before(self, one: Sequence, other: Sequence) -> bool:
        """Whether `one` is served before `other`, of the same tenant."""
        return self.rank_in_line(one) < self.rank_in_line(other)

    def service(self, seq: Sequence) -> float:
        """Service that the tenant of `seq` has received, as it counts in the class of `seq`."""
        return seq.tenant.service_in(self._contest(seq.request.priority))

    def _contest(self, priority: int) -> Contest:
        contest = self._contests.get(priority)
        if contest is None:
            contest = self._contests[priority] = Contest()
        return contest

    def _add_entry(self, seq: Sequence) -> None:
        self._next_entry += 1
        self._entry_of[seq] = self._next_entry
        self._withdraw(seq)
        name = _class_of(seq)
        of_class = self._classes.get(name)
        if of_class is None:
            is_fair = self._policy is Policy.FAIR
            rank = _by_service_in(self._contest(seq.request.priority)) if is_fair else _by_key
            by_turn = TenantHeaps(self._entry_of, self._aside, rank)
            by_age = TenantHeaps(self._entry_of, self._aside, _by_key)
            of_class = self._classes[name] = _Class(*name, by_turn, by_age)
            self._num_recovering_classes += of_class.is_recovering
            if of_class.priority not in self._on_rung:
                bisect.insort(self._ladder, of_class.priority)
            self._on_rung.setdefault(of_class.priority, []).append(of_class)
        self._stands_in[seq] = of_class
        of_class.num_standing += 1
        of_class.by_turn.push(self._key(seq), self._next_entry, seq, of_class.num_standing)
        of_class.by_age.push((seq.waiting_since,), self._next_entry, seq, of_class.num_standing)
        heapq.heappush(self._oldest, (seq.waiting_since, self._next_entry, seq))
        if len(self._oldest) > 2 * len(self._entry_of):
            self._oldest = [item for item in self._oldest if self._entry_of.get(item[2]) == item[1]]
            heapq.heapify(self._oldest)
        stopped = self._aside.get(seq.tenant)
        if stopped is not None and (seq is stopped or self._comes_before(seq, stopped)):
            self.recall(seq.tenant)

    def _withdraw(self, seq: Sequence) -> None:
        """`seq` does not stand where it stood. An empty class goes at once, and with it its stale entries."""
        of_class = self._stands_in.pop(seq, None)
        if of_class is None:
            return
        of_class.num_standing -= 1
        if of_class.num_standing:
            return
        del self._classes[of_class.name]
        self._num_recovering_classes -= of_class.is_recovering
        rung = self._on_rung[of_class.priority]
        rung.remove(of_class)
        if not rung:
            del self._on_rung[of_class.priority]
            self._ladder.remove(of_class.priority)

    def _key(self, seq: Sequence) -> Key:
        """Order within a tenant and class: sequences that ran before and lost their seat come first."""
        first = seq.latest_start if self._policy is Policy.DEADLINE else 0.0
        return (not seq.has_started, first, seq.request.arrival, seq.order)

    # --- which is next -----------------------------------------------------------------------------------

    def peek(self, now: float, *, at: str | None = None, skip_recovering: bool = False) -> Sequence | None:
        """The next sequence to be served, or None.

        `at`: only of those that this executor can compute. `skip_recovering`: only of those not recovering.
        """
        best: int | None = None
        heads: list[tuple[tuple[float, int, bool, Key], Sequence]] = []
        for priority in self._ladder:
            if best is not None and priority > best + self._most_improvement(now):
                break  # nobody from here on has waited for long enough
            for of_class in self._on_rung[priority]:
                if (skip_recovering and of_class.is_recovering) or not of_class.is_seen_by(at):
                    continue
                head = of_class.by_turn.first()
                if head is None:  # all its tenants are left out
                    continue
                best = priority if best is None else best
                aged = self._improvement(of_class, now) if priority > best else 0.0
                rank = (priority - aged, priority, not of_class.is_recovering, of_class.by_turn.best_rank)
                heads.append((rank, head))
        return min(heads, key=itemgetter(0))[1] if heads else None

    def importance(self, seq: Sequence, now: float) -> float:
        """Importance of `seq`, which waits, against better classes: its priority, less its class's aging."""
        of_class = self._classes.get(_class_of(seq))  # if there is none, no member of it is served for now
        return seq.request.priority - (0.0 if of_class is None else self._improvement(of_class, now))

    def aged_importance(self, seq: Sequence, now: float) -> float:
        """The same for a sequence that has a seat, and waits for the rest of its prompt to be computed."""
        priority = seq.request.priority
        return priority - self._improvement_since(seq.waiting_since, priority, now)

    @property
    def has_recovering(self) -> bool:
        """Whether any that may be served are recovering, tenants that are left out counted."""
        return self._num_recovering_classes > 0

    def _improvement(self, of_class: _Class, now: float) -> float:
        """By how many classes the wait of its oldest member improves this one, since its last turn."""
        oldest = of_class.by_age.first()  # without tenants that are at a limit of their own
        if oldest is None:
            return 0.0
        return self._improvement_since(oldest.waiting_since, of_class.priority, now)

    def _most_improvement(self, now: float) -> float:
        """No class is lifted by more than this."""
        if self._aging_seconds is None:
            return 0.0
        while self._entry_of.get(self._oldest[0][2]) != self._oldest[0][1]:
            heapq.heappop(self._oldest)
        return (now - self._oldest[0][0]) // self._aging_seconds

    def _improvement_since(self, waiting_since: float, priority: int, now: float) -> float:
        if self._aging_seconds is None:
            return 0.0
        since = max(waiting_since, self._turn_at.get(priority, -math.inf))
        return max(0.0, (now - since) // self._aging_seconds)
