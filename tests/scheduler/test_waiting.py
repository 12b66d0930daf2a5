import math
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.sequence import Event, Sequence
from scheduler.tenant_heaps import TenantHeaps
from scheduler.tenants import Tenant, TenantLimits
from scheduler.waiting import Hold, Policy, WaitingQueue
from tests.scheduler.sequences import waiting

PRIORITIES = [-1, 0, 1]
ONLY_AT = st.sampled_from([None, None, frozenset("x"), frozenset("xy")])
AT = st.sampled_from([None, "x", "y"])
TENANTS = [Tenant(name, TenantLimits()) for name in "abc"]


def is_seen(seq: Sequence, at: str | None) -> bool:
    return at is None or seq.only_at is None or at in seq.only_at


class WaitingMachine(RuleBasedStateMachine):
    """Against a list that is searched each time it is asked."""

    policy = Policy.FCFS
    aging: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[Tenant, int] = {}
        self.held: list[Sequence] = []  # as told, and not yet looked at
        self.queue = WaitingQueue(self.policy, self.aging, self.on_aside, self.held.append)
        self.tenants = [Tenant(name, TenantLimits()) for name in "abc"]
        self.model: list[Sequence] = []
        self.parked: dict[Sequence, set[Hold]] = {}
        self.away: list[Sequence] = []
        self.aside: dict[Tenant, Sequence] = {}  # whom the limit of its tenant stopped
        self.held_back: set[Tenant] = set()
        self.count = 0
        self.now = 0.0
        self.turn_at: dict[int, float] = {}  # by importance class, while any of it waits
        self.competing: dict[int, set[Tenant]] = {priority: set() for priority in PRIORITIES}
        self.last: dict[int, Tenant] = {}  # who ceased to compete last
        self.lifted: dict[tuple[Tenant, int], float] = {}

    @rule(
        priority=st.sampled_from(PRIORITIES),
        arrival=st.integers(0, 4),
        prompt_len=st.integers(1, 5),
        tenant=st.integers(0, 2),
        latest_start=st.sampled_from([math.inf, 1.0, 2.0, 3.0]),
        only_at=ONLY_AT,
    )
    def push(
        self,
        priority: int,
        arrival: int,
        prompt_len: int,
        tenant: int,
        latest_start: float,
        only_at: frozenset[str] | None,
    ) -> None:
        self.count += 1
        fields = {"priority": priority, "arrival": self.now + arrival, "prompt_len": prompt_len}
        seq = waiting(f"r{self.count}", self.count, **fields)
        seq.tenant = self.tenants[tenant]
        seq.latest_start = latest_start
        seq.only_at = only_at
        self.push_also_to_model(seq)

    def push_also_to_model(self, seq: Sequence) -> None:
        self.queue.push(seq)
        self.model.append(seq)
        self.has_new_place(seq)

    def has_new_place(self, seq: Sequence) -> None:
        if seq in self.parked or seq.tenant not in self.aside:
            return
        stopped = self.aside[seq.tenant]
        ranks = [(item.request.priority, *self.key(item)) for item in (seq, stopped)]
        if seq is stopped or ranks[0] < ranks[1]:
            del self.aside[seq.tenant]

    def goes(self, seq: Sequence) -> None:
        """It is not served any more, or not for now."""
        if self.aside.get(seq.tenant) is seq:
            del self.aside[seq.tenant]

    def on_aside(self, tenant: Tenant) -> None:
        self.told[tenant] = self.told.get(tenant, 0) + 1

    @rule(at=AT)
    def admit(self, at: str | None) -> None:
        seq = self.queue.peek(self.now, at=at)
        if seq is None:
            return
        self.queue.admit(seq, self.now, at=at)
        self.model.remove(seq)
        priority = seq.request.priority
        if any(
            other.request.priority < priority
            for other in self.model
            if other not in self.parked and other.tenant not in self.aside and is_seen(other, at)
        ):
            self.turn_at[priority] = self.now
        seq.move(Event.ADMIT)
        seq.has_started = True
        seq.tenant.num_input_tokens += len(seq.token_ids)
        self.away.append(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """Preempted: its key has changed, its old entry may still lie in a heap."""
        seq = data.draw(st.sampled_from(self.away))
        self.away.remove(seq)
        seq.token_ids.append(9)
        seq.move(Event.PREEMPT)
        seq.waiting_since = self.now
        self.push_also_to_model(seq)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), latest_start=st.sampled_from([math.inf, 1.0, 2.0, 3.0]))
    def reorder(self, data: st.DataObject, latest_start: float) -> None:
        seq = data.draw(st.sampled_from(self.model))
        seq.latest_start = latest_start
        self.queue.reorder(seq)
        self.has_new_place(seq)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.model))
        self.queue.remove(seq)
        self.model.remove(seq)
        self.goes(seq)
        if seq in self.parked:
            del self.parked[seq]
        seq.move(Event.ABORT)

    @precondition(lambda self: len(self.model) > len(self.parked))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.model if seq not in self.parked]))
        self.queue.park(seq)
        self.parked[seq] = set()
        self.goes(seq)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(list(self.parked)))
        assert self.queue.is_parked_freely(seq) == (not self.parked[seq])
        assert self.queue.unpark(seq) == (not self.parked[seq])
        if not self.parked[seq]:
            del self.parked[seq]
            assert not self.queue.unpark(seq)
            self.has_new_place(seq)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), why=st.sampled_from(Hold))
    def hold(self, data: st.DataObject, why: Hold) -> None:
        seq = data.draw(st.sampled_from(self.model))
        self.queue.hold(seq, why)
        assert self.held.pop() is seq
        if seq not in self.parked:
            self.parked[seq] = set()
            self.goes(seq)
        self.parked[seq].add(why)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), why=st.sampled_from(Hold))
    def let_go(self, data: st.DataObject, why: Hold) -> None:
        """Whether this holds it, something else does too, or nothing at all."""
        seq = data.draw(st.sampled_from([*self.parked, *self.model]))
        self.queue.let_go(seq, why)
        holds = self.parked.get(seq, set())
        if holds == {why}:
            del self.parked[seq]
            self.has_new_place(seq)
        holds.discard(why)

    @precondition(lambda self: self.queue.peek(self.now) is not None)
    @rule()
    def set_aside(self) -> None:
        seq = self.queue.peek(self.now)
        assert seq is not None
        self.queue.set_aside(seq)
        self.queue.set_aside(seq)
        self.aside[seq.tenant] = seq
        self.held_back.add(seq.tenant)

    @rule(tenant=st.integers(0, 2))
    def let_through(self, tenant: int) -> None:
        self.queue.recall(self.tenants[tenant])
        self.queue.let_through(self.tenants[tenant])
        self.aside.pop(self.tenants[tenant], None)
        self.held_back.discard(self.tenants[tenant])

    @rule(tenant=st.integers(0, 2))
    def recall(self, tenant: int) -> None:
        self.queue.recall(self.tenants[tenant])
        self.aside.pop(self.tenants[tenant], None)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), only_at=ONLY_AT)
    def keep_for(self, data: st.DataObject, only_at: frozenset[str] | None) -> None:
        seq = data.draw(st.sampled_from(self.model))
        seq.only_at = only_at
        self.queue.reorder(seq)
        self.has_new_place(seq)

    @rule(tenant=st.integers(0, 2), tokens=st.integers(1, 9))
    def serve(self, tenant: int, tokens: int) -> None:
        self.tenants[tenant].num_output_tokens += tokens

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def clock(self, seconds: float) -> None:
        self.now += seconds

    def service(self, tenant: Tenant, priority: int) -> float:
        return tenant.service + self.lifted.get((tenant, priority), 0.0)

    def settle(self) -> None:
        """Who began to compete is lifted to the least served of those who did before."""
        for priority, competing in self.competing.items():
            wait = {seq.tenant for seq in self.model if seq.request.priority == priority}
            for tenant in competing - wait | competing & set(self.aside):
                competing.remove(tenant)
                self.last[priority] = tenant
            for tenant in wait - set(self.aside) - competing:
                others = competing or ({self.last[priority]} if priority in self.last else ())
                floor = min((self.service(other, priority) for other in others), default=0.0)
                service = self.service(tenant, priority)
                if service < floor or (tenant, priority) not in self.lifted:
                    self.lifted[tenant, priority] = floor - tenant.service
                competing.add(tenant)

    def key(self, seq: Sequence) -> tuple[object, ...]:
        first = seq.latest_start if self.policy is Policy.DEADLINE else 0.0
        return (not seq.has_started, first, seq.request.arrival, seq.order)

    def expected(self, at: str | None) -> Sequence | None:
        heads: list[tuple[int, float, tuple[object, ...], Sequence]] = []
        for name in {(seq.request.priority, seq.only_at) for seq in self.model if is_seen(seq, at)}:
            priority = name[0]
            of_class = [seq for seq in self.model if (seq.request.priority, seq.only_at) == name]
            can = [seq for seq in of_class if seq not in self.parked and seq.tenant not in self.aside]
            best = []
            for tenant in self.tenants:
                head = min((seq for seq in can if seq.tenant is tenant), key=self.key, default=None)
                if head is not None:
                    key = self.key(head)
                    rank = (
                        (self.service(tenant, priority), key[0], *key[2:])
                        if self.policy is Policy.FAIR
                        else key
                    )
                    best.append((rank, head))
            if best:
                since = max(min(seq.waiting_since for seq in can), self.turn_at.get(priority, -math.inf))
                aged = max(0.0, (self.now - since) // self.aging) if self.aging else 0.0
                heads.append((priority, aged, *min(best, key=lambda item: item[0])))
        if not heads:
            return None
        best_class = min(priority for priority, *_ in heads)
        ranked = [
            ((priority - (aged if priority > best_class else 0.0), priority, rank), head)
            for priority, aged, rank, head in heads
        ]
        return min(ranked, key=lambda item: item[0])[1]

    @invariant()
    def agrees(self) -> None:
        self.settle()
        assert len(self.queue) == len(self.model)
        assert set(self.queue) == set(self.model)
        for at in (None, "x", "y"):
            assert self.queue.peek(self.now, at=at) is self.expected(at)
        assert self.queue.num_tokens == sum(len(seq.token_ids) for seq in self.model)
        assert set(self.queue.aside) == set(self.aside)
        self.held_back &= {seq.tenant for seq in self.model}
        assert {tenant for tenant in self.tenants if self.queue.is_held_back(tenant)} == self.held_back
        assert self.queue.num_held_back == sum(seq.tenant in self.held_back for seq in self.model)
        for tenant in self.tenants:
            assert self.told.get(tenant, 0) % 2 == (tenant in self.aside), "told of each change, and once"
            mine = [seq for seq in self.model if seq.tenant is tenant]
            assert tenant.num_waiting == len(mine)
            assert tenant.num_waiting_tokens == sum(len(seq.token_ids) for seq in mine)


class FairMachine(WaitingMachine):
    policy = Policy.FAIR


class DeadlineMachine(WaitingMachine):
    policy = Policy.DEADLINE


class AgingMachine(WaitingMachine):
    aging = 2.0


_settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestFcfs = WaitingMachine.TestCase
TestFair = FairMachine.TestCase
TestDeadline = DeadlineMachine.TestCase
TestAging = AgingMachine.TestCase
TestFcfs.settings = TestFair.settings = TestDeadline.settings = TestAging.settings = _settings


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("keep", [0, 10])
def test_stale_entries_never_outnumber_the_living_by_much(policy: Policy, keep: int) -> None:
    queue = WaitingQueue(policy, 10.0)
    kept = [waiting(f"k{i}", i, tenant=TENANTS[i % 3]) for i in range(keep)]
    for seq in kept:
        queue.push(seq)
    for i in range(5000):
        seq = waiting(f"r{i}", 100 + i, tenant=TENANTS[i % 3])
        queue.push(seq)
        queue.remove(seq)
        for of_class in queue._classes.values():
            for heaps in (of_class.by_turn, of_class.by_age):
                assert len(heaps._offers) <= 64 + 2 * 3
                assert sum(len(heap) for heap in heaps._heaps.values()) <= 64 + 2 * (len(queue) + 1)
    assert queue.peek(0.0) is (kept[0] if keep else None)
    assert len(queue) == keep


@pytest.mark.parametrize("policy", Policy)
def test_tenants_that_have_gone_are_forgotten_while_others_wait(policy: Policy) -> None:
    queue = WaitingQueue(policy, 10.0)
    stays = waiting("stays", 0)
    queue.push(stays)
    for order in range(1, 2000):
        seq = waiting(f"r{order}", order, tenant=Tenant(str(order), TenantLimits()))
        queue.push(seq)
        queue.remove(seq)
    assert queue.peek(0.0) is stays
    of_class = next(iter(queue._classes.values()))
    for heaps in (of_class.by_turn, of_class.by_age):
        assert max(len(heaps._heaps), len(heaps._newest_offer), len(heaps._offers)) < 300


def test_a_tenant_at_its_limit_may_be_recalled_when_all_it_had_waiting_was_given_up() -> None:
    queue = WaitingQueue()
    tenant, other = TENANTS[:2]
    given_up = [waiting(f"r{i}", i, tenant=tenant) for i in range(100)]
    for seq in given_up:
        queue.push(seq)
    queue.set_aside(given_up[0])
    for seq in given_up:
        queue.remove(seq)
    stays = waiting("stays", 1000, tenant=other)
    queue.push(stays)
    queue.recall(tenant)
    assert queue.peek(0.0) is stays
    again = waiting("again", 100, tenant=tenant)
    queue.push(again)
    queue.remove(stays)
    assert queue.peek(0.0) is again


def test_what_waits_already_is_not_pushed_again() -> None:
    queue = WaitingQueue()
    seq = waiting()
    queue.push(seq)
    with pytest.raises(AssertionError):
        queue.push(seq)


def next_ones(queue: WaitingQueue, count: int, *, every: float, start: float) -> list[int]:
    """The classes of those who enter, one each `every` seconds."""
    entered = []
    for i in range(count):
        seq = queue.peek(start + i * every)
        assert seq is not None
        queue.admit(seq, start + i * every)
        seq.move(Event.ADMIT)
        entered.append(seq.request.priority)
    return entered


def test_an_aged_class_wins_one_turn_and_not_the_lead() -> None:
    """However long it has waited: A has waited for an hour, and B keeps coming."""
    queue = WaitingQueue(Policy.FCFS, aging_seconds=10.0)
    for i in range(100):
        queue.push(waiting(f"A{i}", i, priority=2, arrival=0.0))
        queue.push(waiting(f"B{i}", 200 + i, priority=0, arrival=3600.0))
    entered = next_ones(queue, 90, every=1.0, start=3600.0)
    assert [i for i, priority in enumerate(entered) if priority == 2] == [0, 30, 60], "(2 + 1) * 10 seconds"


def test_a_class_of_whom_all_are_left_out_for_a_while_has_had_its_turn_all_the_same() -> None:
    queue = WaitingQueue(Policy.FCFS, aging_seconds=10.0)
    old = [waiting(f"old{i}", i, priority=2, arrival=0.0) for i in range(2)]
    young = [waiting(f"young{i}", 10 + i, priority=0, arrival=3600.0) for i in range(2)]
    for seq in old + young:
        queue.push(seq)
    assert next_ones(queue, 1, every=1.0, start=3600.0) == [2]
    queue.park(old[1])
    assert queue.peek(3601.0) is young[0]
    queue.unpark(old[1])
    assert queue.peek(3601.0) is young[0]


def test_nothing_starves_however_long_the_best_class_has_waited_itself() -> None:
    queue = WaitingQueue(Policy.FCFS, aging_seconds=10.0)
    queue.push(waiting("worst", 1, priority=5, arrival=1000.0))
    for i in range(100):
        queue.push(waiting(f"best{i}", 10 + i, priority=0, arrival=0.0))
    assert next_ones(queue, 61, every=1.0, start=1000.0)[60] == 5


@pytest.mark.parametrize("count", [1, 50])
def test_what_is_set_aside_does_not_age_its_class(count: int) -> None:
    queue = WaitingQueue(Policy.FCFS, aging_seconds=10.0)
    at_limit, other = (Tenant(name, TenantLimits()) for name in "ab")
    for i in range(count):
        queue.push(waiting(f"old{i}", i, tenant=at_limit, priority=1, arrival=0.0))
    young = waiting("young", 100, tenant=other, priority=1, arrival=1000.0)
    best = waiting("best", 101, tenant=other, priority=0, arrival=1000.0)
    queue.push(young)
    queue.push(best)
    head = queue.peek(1001.0)
    assert head is not None
    queue.set_aside(head)
    assert queue.peek(1001.0) is best
    queue.recall(at_limit)
    head = queue.peek(1001.0)
    assert head is not None
    assert head.tenant is at_limit


def test_under_fair_one_that_lost_its_place_waits_for_its_tenants_turn() -> None:
    queue = WaitingQueue(Policy.FAIR)
    served, other = (Tenant(name, TenantLimits()) for name in "ab")
    back = waiting("back", 1, tenant=served)
    back.has_started = True
    for seq in (waiting("own", 2, tenant=served), waiting("new", 3, tenant=other), back):
        queue.push(seq)
    served.num_output_tokens = 100
    names = []
    while (seq := queue.peek(0.0)) is not None:  # type: ignore[assignment]
        queue.admit(seq, 0.0)
        names.append(seq.request.request_id)
    assert names == ["new", "back", "own"]


def test_whoever_is_recalled_competes_also_where_all_who_wait_are_parked() -> None:
    queue = WaitingQueue(Policy.FAIR)
    held, other = (Tenant(name, TenantLimits()) for name in "ab")
    stopped, parked = waiting("stopped", 1, tenant=held), waiting("parked", 2, tenant=held, priority=1)
    theirs = waiting("theirs", 3, tenant=other, priority=1)
    for seq in (stopped, parked, theirs):
        queue.push(seq)
    for seq in (parked, theirs):
        queue.park(seq)
    assert queue.peek(0.0) is stopped
    queue.set_aside(stopped)
    other.num_output_tokens = 100
    queue.recall(held)
    queue.unpark(parked)
    assert queue.service(parked) == queue.service(theirs) == 200


def test_a_look_at_the_queue_is_at_those_classes_alone_that_may_have_aged_past_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = WaitingQueue(aging_seconds=10.0)
    for priority in range(1000):
        queue.push(waiting(f"p{priority}", priority, priority=priority))
    looks = 0
    first_of = TenantHeaps.first

    def counted(heaps: TenantHeaps) -> Sequence | None:
        nonlocal looks
        looks += 1
        return first_of(heaps)

    monkeypatch.setattr(TenantHeaps, "first", counted)
    first = queue.peek(5.0)
    assert first is not None
    assert first.request.priority == 0
    assert looks <= 2
    looks = 0
    queue.admit(first, 5.0)
    assert looks == 0, "nobody is more important"
    aged = queue.peek(95.0)  # each has waited for nine turns of aging: so far down one must look
    assert aged is not None
    assert aged.request.priority == 2
    assert looks <= 22, "by turn and by age"


def test_nothing_is_kept_of_those_that_were_given_up_behind_a_better_one() -> None:
    """The queue need not look at their classes before the better one has gone, which may be never."""
    queue = WaitingQueue(aging_seconds=10.0)
    queue.push(waiting("head", 1, priority=-1))
    kept = []
    for number in range(500):
        seq = waiting(f"g{number}", 2 + number, priority=number % 50)
        queue.push(seq)
        queue.peek(1.0)
        queue.remove(seq)
        kept.append(weakref.ref(seq.token_ids))
        del seq
    assert sum(reference() is not None for reference in kept) <= 2
    assert len(queue._classes) == 1
