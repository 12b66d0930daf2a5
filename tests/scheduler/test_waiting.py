import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.sequence import Event, Sequence
from scheduler.tenants import Tenant, TenantLimits
from scheduler.waiting import Policy, WaitingQueue
from tests.scheduler.sequences import waiting

TENANTS = [Tenant(name, TenantLimits()) for name in "abc"]


class WaitingMachine(RuleBasedStateMachine):
    """Against a list that is searched each time it is asked."""

    policy = Policy.FCFS
    aging: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(self.policy, self.aging)
        self.tenants = [Tenant(name, TenantLimits()) for name in "abc"]
        self.model: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.away: list[Sequence] = []
        self.aside: set[Tenant] = set()
        self.count = 0
        self.now = 0.0

    @rule(
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 4),
        prompt_len=st.integers(1, 5),
        tenant=st.integers(0, 2),
        latest_start=st.sampled_from([math.inf, 1.0, 2.0, 3.0]),
    )
    def push(self, priority: int, arrival: int, prompt_len: int, tenant: int, latest_start: float) -> None:
        self.count += 1
        fields = {"priority": priority, "arrival": self.now + arrival, "prompt_len": prompt_len}
        seq = waiting(f"r{self.count}", self.count, **fields)
        seq.tenant = self.tenants[tenant]
        seq.latest_start = latest_start
        self.queue.push(seq)
        self.model.append(seq)

    @rule()
    def admit(self) -> None:
        seq = self.queue.peek(self.now)
        if seq is None:
            return
        self.queue.remove(seq)
        self.model.remove(seq)
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
        self.queue.push(seq)
        self.model.append(seq)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.model))
        self.queue.remove(seq)
        self.model.remove(seq)
        if seq in self.parked:
            self.parked.remove(seq)
        seq.move(Event.ABORT)

    @precondition(lambda self: self.queue.peek(self.now) is not None)
    @rule()
    def park(self) -> None:
        seq = self.queue.peek(self.now)
        assert seq is not None
        self.queue.park(seq)
        self.parked.append(seq)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.parked))
        self.parked.remove(seq)
        assert self.queue.unpark(seq)
        assert not self.queue.unpark(seq)

    @rule(tenant=st.integers(0, 2))
    def set_aside(self, tenant: int) -> None:
        self.queue.set_aside(self.tenants[tenant])
        self.aside.add(self.tenants[tenant])

    @rule(tenant=st.integers(0, 2))
    def recall(self, tenant: int) -> None:
        self.queue.recall(self.tenants[tenant])
        self.aside.discard(self.tenants[tenant])

    @rule(tenant=st.integers(0, 2), tokens=st.integers(1, 9))
    def serve(self, tenant: int, tokens: int) -> None:
        self.tenants[tenant].num_output_tokens += tokens

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def clock(self, seconds: float) -> None:
        self.now += seconds

    def key(self, seq: Sequence) -> tuple[object, ...]:
        first = seq.latest_start if self.policy is Policy.DEADLINE else 0.0
        return (not seq.has_started, first, seq.request.arrival, seq.order)

    def expected(self) -> Sequence | None:
        heads: list[tuple[tuple[object, ...], Sequence]] = []
        for priority in {seq.request.priority for seq in self.model}:
            of_class = [seq for seq in self.model if seq.request.priority == priority]
            can = [seq for seq in of_class if seq not in self.parked and seq.tenant not in self.aside]
            best = []
            for tenant in self.tenants:
                head = min((seq for seq in can if seq.tenant is tenant), key=self.key, default=None)
                if head is not None:
                    key = self.key(head)
                    rank = (key[0], tenant.service, *key[2:]) if self.policy is Policy.FAIR else key
                    best.append((rank, head))
            if best:
                not_parked = [seq.waiting_since for seq in of_class if seq not in self.parked]
                boost = max(0.0, (self.now - min(not_parked)) // self.aging) if self.aging else 0.0
                heads.append(((priority - boost, priority), min(best, key=lambda item: item[0])[1]))
        return min(heads, key=lambda item: item[0])[1] if heads else None

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model)
        assert set(self.queue) == set(self.model)
        assert self.queue.peek(self.now) is self.expected()
        assert self.queue.num_tokens == sum(len(seq.token_ids) for seq in self.model)
        for tenant in self.tenants:
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
            assert len(of_class.oldest) <= 64 + 2 * (len(queue) + 1)
            assert len(of_class.ready) <= 64 + 2 * 3
            assert sum(len(heap) for heap in of_class.heaps.values()) <= 64 + 2 * (len(queue) + 1)
    assert queue.peek(0.0) is (kept[0] if keep else None)
    assert len(queue) == keep


def test_what_waits_already_is_not_pushed_again() -> None:
    queue = WaitingQueue()
    seq = waiting()
    queue.push(seq)
    with pytest.raises(AssertionError):
        queue.push(seq)
