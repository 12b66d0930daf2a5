import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.policy import waiting_key
from scheduler.sequence import Event, Sequence
from scheduler.waiting import WaitingQueue
from tests.scheduler.sequences import waiting


class WaitingMachine(RuleBasedStateMachine):
    """Against a list that is sorted each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.model: list[Sequence] = []
        self.away: list[Sequence] = []
        self.count = 0

    @rule(priority=st.integers(-1, 1), arrival=st.integers(0, 4), prompt_len=st.integers(1, 5))
    def push(self, priority: int, arrival: int, prompt_len: int) -> None:
        self.count += 1
        seq = waiting(
            f"r{self.count}", self.count, priority=priority, arrival=float(arrival), prompt_len=prompt_len
        )
        self.queue.push(seq)
        self.model.append(seq)

    @precondition(lambda self: self.model)
    @rule()
    def admit(self) -> None:
        seq = self.queue.peek()
        assert seq is not None
        self.queue.remove(seq)
        self.model.remove(seq)
        seq.move(Event.ADMIT)
        seq.has_started = True
        self.away.append(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """Preempted: its key has changed, its old entry may still lie in the heap."""
        seq = data.draw(st.sampled_from(self.away))
        self.away.remove(seq)
        seq.token_ids.append(9)
        seq.move(Event.PREEMPT)
        self.queue.push(seq)
        self.model.append(seq)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.model))
        self.queue.remove(seq)
        self.model.remove(seq)
        seq.move(Event.ABORT)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model)
        assert set(self.queue) == set(self.model)
        assert self.queue.peek() is min(self.model, key=waiting_key, default=None)
        assert self.queue.num_tokens == sum(len(seq.token_ids) for seq in self.model)


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("keep", [0, 10])
def test_stale_entries_never_outnumber_the_living_by_much(keep: int) -> None:
    queue = WaitingQueue()
    kept = [waiting(f"k{i}", i) for i in range(keep)]
    for seq in kept:
        queue.push(seq)
    for i in range(5000):
        seq = waiting(f"r{i}", 100 + i)
        queue.push(seq)
        queue.remove(seq)
        assert len(queue._entries) <= 64 + 2 * (len(queue) + 1)
    assert queue.peek() is (kept[0] if keep else None)
    assert len(queue) == keep


def test_what_waits_already_is_not_pushed_again() -> None:
    queue = WaitingQueue()
    seq = waiting()
    queue.push(seq)
    with pytest.raises(AssertionError):
        queue.push(seq)
