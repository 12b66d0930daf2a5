from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.sequence import Event, Finish, FinishReason, Sequence, State
from scheduler.timers import Timers, next_due
from tests.scheduler.sequences import waiting


class TimerMachine(RuleBasedStateMachine):
    """Against a look at every sequence: nothing is due unseen, nothing is seen before it is due."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers()
        self.seqs: list[Sequence] = []
        self.now = 0.0

    def _watch(self, seq: Sequence) -> None:
        self.timers.watch(seq, len(self.seqs))

    @rule(deadline=st.sampled_from([None, 1.0, 5.0, 20.0]))
    def submit(self, deadline: float | None) -> None:
        seq = waiting(deadline=None if deadline is None else self.now + deadline)
        self.seqs.append(seq)
        self._watch(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def orphan(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        if seq.state is not State.FINISHED:
            seq.orphaned_until = self.now + 3.0
            self._watch(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.seqs)).orphaned_until = None

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        if seq.state is not State.FINISHED:
            self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        seq.move(Event.ABORT)
        seq.finish = Finish(FinishReason.ABORT)
        seq.orphaned_until = None
        seq.forget_at = self.now + 10.0
        self._watch(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Its reader has everything, before its time came."""
        seq = data.draw(st.sampled_from(self.seqs))
        if seq.state is State.FINISHED:
            seq.forget_at = None
            self.seqs.remove(seq)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 30.0]))
    def clock(self, seconds: float) -> None:
        self.now += seconds
        found = self.timers.due(self.now)
        assert len(found) == len(set(found))
        due = {seq for seq in self.seqs if (time := next_due(seq)) is not None and time <= self.now}
        assert set(found) == due
        for seq in found:
            if seq.state is State.FINISHED:
                seq.forget_at = None
                self.seqs.remove(seq)
            else:
                self._finish(seq)

    @invariant()
    def nobody_is_overslept(self) -> None:
        due = [time for seq in self.seqs if (time := next_due(seq)) is not None]
        if due:
            assert self.timers.next_time is not None
            assert self.timers.next_time <= min(due)


TestTimers = TimerMachine.TestCase
TestTimers.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_the_heap_is_bounded_by_the_living() -> None:
    timers = Timers()
    living = [waiting(f"k{i}", i, deadline=1000.0 + i) for i in range(10)]
    for seq in living:
        timers.watch(seq, len(living))
    for i in range(5000):
        seq = waiting(f"r{i}", i, deadline=100.0)
        timers.watch(seq, len(living) + 1)
        seq.move(Event.ABORT)  # ended, read and forgotten at once
        assert len(timers._heap) <= 64 + 4 * (len(living) + 1) + 1
    assert timers.due(2000.0) == living
    assert timers.next_time is None


def test_a_deadline_is_not_forgotten_for_a_nearer_time_that_was_called_off() -> None:
    """Its router goes again and again, so that only the newest entry is kept; then the router is back."""
    timers, seq = Timers(), waiting(deadline=1000.0)
    timers.watch(seq, 1)
    seq.orphaned_until = 3.0
    for _ in range(100):
        timers.watch(seq, 1)
    assert len(timers._heap) < 100
    seq.orphaned_until = None
    assert timers.due(3.0) == []
    assert timers.next_time == 1000.0
    assert timers.due(1000.0) == [seq]


def test_a_sequence_without_a_deadline_is_never_looked_at() -> None:
    timers = Timers()
    timers.watch(waiting(), 1)
    assert timers.next_time is None
