import dataclasses
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from executor.plan import BatchPlan
from executor.session import Answer, Broken, Held, NotOpen, Pending, Run, Session, Superseded

WINDOW = 2


def plan(step_id: int, acked: int = 0, epoch: int = 11, **fields: object) -> BatchPlan:
    return BatchPlan(epoch=epoch, step_id=step_id, acked_step_id=acked, **fields)  # type: ignore[arg-type]


def opened(window: int = WINDOW) -> tuple[Session[str], int]:
    session: Session[str] = Session(window)
    session.open("a", 0, 11)
    return session, session.attach()


# --- who holds it -----------------------------------------------------------------------------------


def test_the_first_open_without_a_term_gets_term_one() -> None:
    assert Session[str](WINDOW).open("a", 0, 11) == 1


def test_a_lower_term_is_refused_naming_the_holder() -> None:
    session = Session[str](WINDOW)
    session.open("a", 5, 11)
    with pytest.raises(Held, match="held by scheduler a at term 5") as held:
        session.open("b", 4, 12)
    assert (held.value.scheduler_id, held.value.term) == ("a", 5)
    assert session.epoch == 11


def test_a_lower_term_of_the_holder_itself_is_refused() -> None:
    session = Session[str](WINDOW)
    session.open("a", 5, 11)
    with pytest.raises(Held):
        session.open("a", 4, 12)


def test_no_term_is_given_to_two_schedulers() -> None:
    session = Session[str](WINDOW)
    session.open("a", 5, 11)
    with pytest.raises(Held):
        session.open("b", 5, 12)
    assert session.open("a", 5, 13) == 5
    assert session.open("b", 6, 14) == 6


def test_without_a_term_another_scheduler_waits_until_the_holders_stream_is_gone() -> None:
    session, stream = opened()
    with pytest.raises(Held):
        session.open("b", 0, 12)
    session.detach(stream)
    assert session.open("b", 0, 13) == 2


def test_without_a_term_the_holder_itself_is_let_in_again_at_once() -> None:
    session, _ = opened()
    assert session.open("a", 0, 12) == 2


def test_a_stream_that_has_brought_no_plan_counts_as_the_holders() -> None:
    session = Session[str](WINDOW)
    session.open("a", 0, 11)
    session.attach()
    assert session.is_connected


def test_a_fenced_scheduler_is_told_who_holds_and_a_returning_one_that_it_is_not_open() -> None:
    session, stream = opened()
    session.open("a", 0, 12)
    with pytest.raises(NotOpen, match="epoch 11 is not the one that is open"):
        session.receive(stream, plan(1))
    session.open("b", 9, 13)
    for epoch in (11, 12):
        with pytest.raises(Held, match="held by scheduler b at term 9"):
            session.receive(session.attach(), plan(1, epoch=epoch))
    with pytest.raises(NotOpen):
        session.receive(session.attach(), plan(1, epoch=404))


def test_epochs_that_ended_long_ago_are_forgotten_so_that_they_do_not_pile_up() -> None:
    session, _ = opened()
    for epoch in range(12, 212):
        session.open("b", epoch, epoch)
    session.open("c", 212, 212)
    with pytest.raises(NotOpen):
        session.receive(session.attach(), plan(1, epoch=11))
    with pytest.raises(Held, match="held by scheduler c"):
        session.receive(session.attach(), plan(1, epoch=211))


def test_an_executor_that_nobody_opened_says_so() -> None:
    session = Session[str](WINDOW)
    with pytest.raises(NotOpen, match="no scheduler has opened the executor since it started"):
        session.receive(session.attach(), plan(1))


def test_an_epoch_that_broke_is_not_open_and_says_why() -> None:
    session, stream = opened()
    session.fail(11, "positions differ")
    with pytest.raises(NotOpen, match="positions differ"):
        session.receive(stream, plan(1))
    assert not session.is_connected
    assert session.open("b", 0, 12) == 2


def test_a_failure_of_an_epoch_that_is_over_changes_nothing() -> None:
    session, _ = opened()
    session.open("a", 0, 12)
    session.fail(11, "too late")
    assert session.epoch == 12


def test_a_stream_from_before_an_open_does_not_belong_to_the_new_epoch() -> None:
    session, stream = opened()
    session.open("a", 0, 12)
    with pytest.raises(Superseded):
        session.receive(stream, plan(1, epoch=12))


# --- plans ------------------------------------------------------------------------------------------


def test_plans_run_in_order_and_results_go_to_the_stream_that_sent_them() -> None:
    session, stream = opened()
    assert session.receive(stream, plan(1)) == Run(plan(1))
    assert session.receive(stream, plan(2)) == Run(plan(2))
    assert session.complete(11, 1, "one") == (stream,)
    assert session.complete(11, 2, "two") == (stream,)
    assert session.num_running == 0


def test_a_duplicate_is_answered_from_the_kept_result() -> None:
    session, stream = opened()
    session.receive(stream, plan(1))
    session.complete(11, 1, "one")
    assert session.receive(stream, plan(1)) == Answer("one")


def test_a_duplicate_of_a_running_plan_waits_for_its_first_execution() -> None:
    session, stream = opened()
    session.receive(stream, plan(1))
    assert session.receive(stream, plan(1)) == Pending()
    assert session.complete(11, 1, "one") == (stream, stream)


def test_a_kept_result_is_dropped_when_a_plan_acknowledges_it() -> None:
    session, stream = opened()
    session.receive(stream, plan(1))
    session.complete(11, 1, "one")
    session.receive(stream, plan(2, acked=1))
    assert session.num_kept == 1
    with pytest.raises(Broken, match="step 1 came after step 2"):
        session.receive(stream, plan(1))


@pytest.mark.parametrize(
    ("before", "faulty", "sentence"),
    [
        ([], plan(2), "step 2 came after step 0"),
        ([], plan(0), "step 0 came after step 0"),
        ([plan(1)], plan(3), "step 3 came after step 1"),
        ([plan(1)], plan(2, acked=2), "acknowledges step 2, which has no result"),
        ([plan(1), plan(2, acked=1)], plan(3, acked=0), "acknowledges step 0 after step 1"),
        ([plan(1), plan(2)], plan(3), "makes 3 plans unanswered; the window is 2"),
        ([plan(1)], plan(1, positions_sum=1), "step 1 came again and differs"),
    ],
)
def test_a_plan_that_cannot_follow_ends_the_epoch(
    before: list[BatchPlan], faulty: BatchPlan, sentence: str
) -> None:
    session, stream = opened()
    for earlier in before:
        session.receive(stream, earlier)
        session.complete(11, earlier.step_id, "done")
    with pytest.raises(Broken, match=sentence):
        session.receive(stream, faulty)
    assert session.epoch is None


def test_with_a_window_of_one_each_plan_acknowledges_the_one_before() -> None:
    session, stream = opened(window=1)
    session.receive(stream, plan(1))
    session.complete(11, 1, "one")
    session.receive(stream, plan(2, acked=1))
    session.complete(11, 2, "two")
    with pytest.raises(Broken, match="the window is 1"):
        session.receive(stream, plan(3, acked=1))


def test_an_acknowledgement_of_a_running_plan_ends_the_epoch() -> None:
    session, stream = opened()
    session.receive(stream, plan(1))
    with pytest.raises(Broken, match="which has no result yet"):
        session.receive(stream, plan(2, acked=1))


# --- streams ----------------------------------------------------------------------------------------


def test_a_result_of_a_broken_stream_is_kept_for_the_one_that_asks_again() -> None:
    session, first = opened()
    session.receive(first, plan(1))
    session.receive(first, plan(2))
    session.detach(first)
    assert session.complete(11, 1, "one") == ()
    second = session.attach()
    assert session.receive(second, plan(1)) == Answer("one")
    assert session.receive(second, plan(2)) == Pending()
    assert session.complete(11, 2, "two") == (second,)


def test_the_newest_stream_wins_with_its_first_plan_and_the_older_gets_nothing_more() -> None:
    session, older = opened()
    session.receive(older, plan(1))
    newer = session.attach()
    assert session.current_stream == older
    session.receive(newer, plan(1))
    assert session.current_stream == newer
    assert session.complete(11, 1, "one") == (newer,)
    with pytest.raises(Superseded):
        session.receive(older, plan(2))


def test_a_superseded_stream_stays_so_when_the_newer_one_ends() -> None:
    session, older = opened()
    newer = session.attach()
    session.receive(newer, plan(1))
    session.detach(newer)
    with pytest.raises(Superseded):
        session.receive(older, plan(1))


def test_a_result_of_an_epoch_that_is_over_goes_to_nobody() -> None:
    session, stream = opened()
    session.receive(stream, plan(1))
    session.open("a", 0, 12)
    assert session.complete(11, 1, "one") == ()


# --- the laws ---------------------------------------------------------------------------------------


class SessionMachine(RuleBasedStateMachine):
    """Two schedulers, breaking streams, resent plans, a device that takes its time.

    Laws: a step runs at most once in its epoch and in order; each answer is the result of its own step;
    results come on a stream in the order of its plans; nothing goes to a superseded or ended stream; what is
    kept is bounded by the window.
    """

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.session: Session[str] = Session(WINDOW)
        self.epoch = 0
        self.holder = ""
        self.sent: list[BatchPlan] = []  # unacknowledged plans of the open epoch
        self.acked = 0
        self.queue: list[BatchPlan] = []  # with the device
        self.ran: Counter[tuple[int, int]] = Counter()
        self.live: set[int] = set()
        self.answers: dict[int, list[int]] = {}
        self.done: set[int] = set()

    @property
    def last_step(self) -> int:
        return self.sent[-1].step_id if self.sent else self.acked

    @rule(scheduler=st.sampled_from(["a", "b"]), term=st.integers(0, 3))
    def open(self, scheduler: str, term: int) -> None:
        try:
            self.session.open(scheduler, term, self.epoch + 1)
        except Held as held:
            assert held.scheduler_id == self.holder  # noqa: PT017 - a model that may refuse or grant
            return
        self.epoch += 1
        self.holder = scheduler
        self.sent, self.acked, self.done = [], 0, set()
        self.live.clear()

    @rule(target=streams)
    def attach(self) -> int:
        stream = self.session.attach()
        if self.session.epoch is not None:
            self.live.add(stream)
        self.answers[stream] = []
        return stream

    @rule(stream=streams)
    def detach(self, stream: int) -> None:
        self.session.detach(stream)
        self.live.discard(stream)

    @precondition(lambda self: self.session.epoch is not None and self.last_step - self.acked < WINDOW)
    @rule(stream=streams, applies=st.integers(0, WINDOW))
    def send_next(self, stream: int, applies: int) -> None:
        if stream not in self.live:
            return
        acked = self.acked
        while applies and acked + 1 in self.done:
            acked, applies = acked + 1, applies - 1
        new = plan(self.last_step + 1, acked, self.epoch)
        try:
            action = self.session.receive(stream, new)
        except Superseded:
            assert self.session.current_stream != stream
            self.live.discard(stream)
            return
        assert action == Run(new)
        self.took_over(stream)
        self.queue.append(new)
        self.sent = [p for p in [*self.sent, new] if p.step_id > acked]
        self.acked = acked

    @precondition(lambda self: self.sent)
    @rule(stream=streams, data=st.data())
    def send_again(self, stream: int, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.sent))
        if stream not in self.live:
            return
        try:
            action = self.session.receive(stream, dataclasses.replace(again))
        except Superseded:
            self.live.discard(stream)
            return
        self.took_over(stream)
        if again.step_id in self.done:
            assert action == Answer(f"{again.epoch}/{again.step_id}")
        else:
            assert action == Pending()

    @precondition(lambda self: self.session.epoch is not None)
    @rule(stream=streams)
    def send_nonsense(self, stream: int) -> None:
        if stream != self.session.current_stream:
            return
        with pytest.raises(Broken):
            self.session.receive(stream, plan(self.last_step + 2, self.acked, self.epoch))
        assert self.session.epoch is None
        self.sent, self.live = [], set()

    @precondition(lambda self: self.queue)
    @rule()
    def complete(self) -> None:
        finished = self.queue.pop(0)
        self.ran[finished.epoch, finished.step_id] += 1
        current = self.session.current_stream
        targets = self.session.complete(
            finished.epoch, finished.step_id, f"{finished.epoch}/{finished.step_id}"
        )
        assert set(targets) <= {current}
        if self.session.epoch != finished.epoch:
            assert targets == ()
            return
        self.done.add(finished.step_id)
        for stream in targets:
            assert stream in self.live
            self.answers[stream].append(finished.step_id)

    def took_over(self, stream: int) -> None:
        assert self.session.current_stream == stream
        self.live = {other for other in self.live if other >= stream}

    @invariant()
    def a_step_runs_at_most_once(self) -> None:
        assert not self.ran or max(self.ran.values()) == 1

    @invariant()
    def results_of_executions_come_in_order_on_each_stream(self) -> None:
        for steps in self.answers.values():
            assert steps == sorted(steps)

    @invariant()
    def what_is_kept_is_bounded_by_the_window(self) -> None:
        assert self.session.num_kept <= WINDOW

    @invariant()
    def a_connection_is_known(self) -> None:
        assert self.session.is_connected == (self.session.epoch is not None and bool(self.live))


TestSessionLaws = SessionMachine.TestCase
TestSessionLaws.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
