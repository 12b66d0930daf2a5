"""Every token of every sequence arrives once and in order, and every handle ends once, whatever happens."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler import router_session
from scheduler.router_session import (
    MAX_UNACKED_MESSAGES,
    RouterSession,
    SessionError,
    StepOutput,
    session_of,
    superseded,
    touch,
)
from scheduler.sequence import Event, Finish, FinishReason, Sequence, State, StatusCode
from tests.scheduler.sequences import running, waiting

TAKEN_OVER = StatusCode.ABORTED


class Reader:
    """A router's side of one stream: what it has of each handle, and what it expects."""

    def __init__(self, name: str) -> None:
        self.session = RouterSession(name)
        self.is_open = True
        self.handles = itertools.count(1)
        self.seq_of: dict[int, Sequence] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[object]] = {}
        self.started: set[int] = set()
        self.finished: dict[int, Finish] = {}
        self.refused: set[int] = set()
        self.newest_message = 0
        self.acked = 0

    def take(self, now: float) -> None:
        output = self.session.take(now)
        if output is not None:
            self.check(output)

    def check(self, output: StepOutput) -> None:
        assert output.message_id == self.newest_message + 1
        self.newest_message += 1
        self._tokens(output)
        for handle, _ in output.started:
            assert handle not in self.started, "a second start"
            self.started.add(handle)
        for item in output.finished:
            assert item.handle not in self.finished, "a second end"
            self.finished[item.handle] = item.finish

    def _tokens(self, output: StepOutput) -> None:
        at = 0
        entries = dict(output.logprobs)
        assert len(output.handles) == len(set(output.handles))
        for handle, count in zip(output.handles, output.num_tokens, strict=True):
            assert count > 0
            assert handle not in self.finished, "tokens after the end"
            self.ids[handle] += output.token_ids[at : at + count]
            if self.seq_of[handle].logprobs is not None:
                assert len(entries[handle]) == count
                self.logprobs[handle] += entries[handle]
            at += count
        assert at == len(output.token_ids)


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.readers = [Reader("one"), Reader("two")]
        self.seqs: list[Sequence] = []
        self.forgotten: set[Sequence] = set()
        self.now = 0.0
        self.count = 0

    # --- sequences ----------------------------------------------------------------------------------

    @rule(resumed=st.integers(0, 3), want_logprobs=st.booleans())
    def submit(self, resumed: int, want_logprobs: bool) -> None:
        self.count += 1
        seq = waiting(
            f"r{self.count}", self.count, max_tokens=1000, output=resumed, want_logprobs=want_logprobs
        )
        self.seqs.append(seq)

    def _living(self) -> list[Sequence]:
        return [seq for seq in self.seqs if seq.state is not State.FINISHED]

    @precondition(lambda self: self._living())
    @rule(data=st.data(), count=st.integers(1, 3), tells=st.booleans())
    def progress(self, data: st.DataObject, count: int, tells: bool) -> None:
        seq = data.draw(st.sampled_from(self._living()))
        if seq.state is State.WAITING:
            seq.move(Event.ADMIT)
            seq.has_started = True
        for _ in range(count):
            index = seq.num_output_tokens
            seq.token_ids.append(1000 + index)
            if seq.logprobs is not None:
                seq.logprobs.append(("logprob of", index))
        if tells:  # else it is told with the next news, or never lost anyway
            touch(seq)

    @precondition(lambda self: self._living())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self._living()))
        seq.move(Event.ABORT)
        seq.finish = Finish(FinishReason.ABORT)
        touch(seq)

    # --- readers ------------------------------------------------------------------------------------

    @precondition(lambda self: set(self.seqs) - self.forgotten)
    @rule(data=st.data(), which=st.integers(0, 1))
    def attach(self, data: st.DataObject, which: int) -> None:
        """With as many ids as the reader says it has; the core would take no fewer than were submitted."""
        reader = self.readers[which]
        seq = data.draw(st.sampled_from([seq for seq in self.seqs if seq not in self.forgotten]))
        have = data.draw(st.integers(seq.num_resumed_tokens, seq.num_output_tokens))
        handle = next(reader.handles)
        reader.seq_of[handle] = seq
        reader.ids[handle] = list(seq.output_token_ids()[:have])
        reader.logprobs[handle] = [("logprob of", index) for index in range(seq.num_resumed_tokens, have)]
        before = session_of(seq)
        assert reader.session.attach(handle, seq, have) is before
        assert session_of(seq) is reader.session
        with pytest.raises(SessionError, match=f"handle {handle} is in use"):
            reader.session.refuse(handle, Finish(FinishReason.ABORT))

    @rule(which=st.integers(0, 1))
    def refuse(self, which: int) -> None:
        reader = self.readers[which]
        handle = next(reader.handles)
        reader.refused.add(handle)
        reader.session.refuse(handle, Finish(FinishReason.ERROR, message="no"))

    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        self.now += 1.0
        self.readers[which].take(self.now)

    @rule(which=st.integers(0, 1), data=st.data())
    def ack(self, which: int, data: st.DataObject) -> None:
        reader = self.readers[which]
        message_id = data.draw(st.integers(reader.acked, reader.newest_message))
        done = reader.session.acked(message_id)
        reader.acked = message_id
        for seq in done:
            assert seq.state is State.FINISHED
            assert seq.attachment is None
            self.forgotten.add(seq)

    @rule(which=st.integers(0, 1))
    def close(self, which: int) -> None:
        """The stream breaks; the router comes back with an empty one."""
        reader = self.readers[which]
        read = {seq for seq in self.seqs if session_of(seq) is reader.session}
        orphans = reader.session.close()
        assert set(orphans) == read
        assert len(orphans) == len(read)
        assert all(seq.attachment is None for seq in orphans)
        assert not reader.session.has_news
        self.readers[which] = Reader(f"{self.count}")

    # --- laws ---------------------------------------------------------------------------------------

    @invariant()
    def what_arrived_is_a_beginning_of_what_there_is(self) -> None:
        for reader in self.readers:
            for handle, seq in reader.seq_of.items():
                assert reader.ids[handle] == list(seq.output_token_ids()[: len(reader.ids[handle])])
                if seq.logprobs is not None:
                    first = seq.num_resumed_tokens
                    expected = [("logprob of", index) for index in range(first, len(reader.ids[handle]))]
                    assert reader.logprobs[handle] == expected

    @invariant()
    def each_sequence_has_one_reader_at_most(self) -> None:
        for seq in self.seqs:
            sessions = [
                reader
                for reader in self.readers
                if any(
                    item.seq is seq and seq.attachment is item for item in reader.session.attachments.values()
                )
            ]
            assert len(sessions) == (seq.attachment is not None)

    @invariant()
    def no_more_messages_are_out_than_may_be(self) -> None:
        for reader in self.readers:
            assert reader.newest_message - reader.acked <= MAX_UNACKED_MESSAGES
            assert (reader.session.oldest_unacked() is None) == (reader.newest_message == reader.acked)

    def teardown(self) -> None:
        """Everything is told at last, and then nothing is left."""
        for seq in self._living():
            touch(seq)
            seq.move(Event.ABORT)
            seq.finish = Finish(FinishReason.ABORT)
        for reader in self.readers:
            for _ in range(3):
                reader.take(self.now)
                reader.session.acked(reader.newest_message)
            assert reader.session.take(self.now) is None
            assert reader.session.attachments == {}
            assert set(reader.finished) == set(reader.seq_of) | reader.refused
            for handle, seq in reader.seq_of.items():
                if reader.finished[handle].status_code != TAKEN_OVER:
                    assert reader.ids[handle] == list(seq.output_token_ids())
        assert all(seq.attachment is None for seq in self.seqs)


TestRouterSession = RouterMachine.TestCase
TestRouterSession.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_slow_router_gets_fewer_and_larger_messages() -> None:
    session, seq = RouterSession("r"), running(max_tokens=1000)
    session.attach(1, seq, 0)
    sizes = []
    for step in range(100):
        seq.token_ids.append(step)
        touch(seq)
        output = session.take(now=float(step))
        if output is not None:
            sizes.append(len(output.token_ids))
    assert len(sizes) == MAX_UNACKED_MESSAGES
    session.acked(1)
    output = session.take(now=100.0)
    assert output is not None
    assert list(output.token_ids) == list(range(MAX_UNACKED_MESSAGES, 100))
    assert session.oldest_unacked() == 1.0


def test_tokens_and_end_travel_in_one_message_however_much_came_between() -> None:
    session, seq = RouterSession("r"), running(won=5)
    session.attach(1, seq, 0)
    seq.finish = Finish(FinishReason.LENGTH)
    output = session.take(now=0.0)
    assert output is not None
    assert (list(output.token_ids), output.started) == ([0, 1, 2, 3, 4], [(1, 0)])
    assert [item.handle for item in output.finished] == [1]
    assert session.take(now=1.0) is None


def test_what_a_router_that_comes_back_is_owed_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message grows beyond what a connection takes: it would be refused, and again on the next stream."""
    monkeypatch.setattr(router_session, "MAX_TOKENS", 10)
    monkeypatch.setattr(router_session, "MAX_LOGPROBS", 6)
    reader = Reader("r")
    seqs = [running("plain", won=25), running("told", won=8, want_logprobs=True, want_prompt_logprobs=True)]
    seqs[1].logprobs = list(range(8))
    seqs[1].prompt_logprobs = list("abcdefgh")
    prompt_logprobs: list[object] = []
    for handle, seq in enumerate(seqs, start=1):
        seq.finish = Finish(FinishReason.LENGTH)
        reader.session.attach(handle, seq, 0)
        reader.seq_of[handle], reader.ids[handle], reader.logprobs[handle] = seq, [], []
    num_messages = 0
    while (output := reader.session.take(0.0)) is not None:
        num_messages += 1
        assert len(output.token_ids) <= 10
        told = sum(len(entries) for *_, entries in (*output.logprobs, *output.prompt_logprobs))
        assert told <= 6
        for _, first_position, entries in output.prompt_logprobs:
            assert first_position == len(prompt_logprobs) + 1
            assert not reader.ids[2], "of the prompt after the first token"
            prompt_logprobs += entries
        reader.check(output)
        reader.session.acked(output.message_id)
    assert num_messages == 4
    assert prompt_logprobs == list("abcdefgh")
    assert reader.ids == {1: list(range(25)), 2: list(range(8))}
    assert reader.logprobs[2] == list(range(8))
    assert set(reader.finished) == {1, 2}
    assert not reader.session.attachments


def test_a_sequence_read_elsewhere_is_silent_here_but_for_its_end() -> None:
    older, newer, seq = RouterSession("older"), RouterSession("newer"), running(won=2)
    older.attach(1, seq, 0)
    assert newer.attach(7, seq, 1) is older
    output = older.take(now=0.0)
    assert output is not None
    assert (output.handles, output.started) == ([], [])
    assert [(item.handle, item.finish.status_code) for item in output.finished] == [(1, TAKEN_OVER)]
    assert older.close() == []
    assert session_of(seq) is newer


def test_one_whose_end_was_told_already_is_not_ended_again_when_it_is_read_anew() -> None:
    session, seq = RouterSession("r"), running(won=2)
    session.attach(1, seq, 0)
    seq.finish = Finish(FinishReason.LENGTH)
    first = session.take(now=0.0)
    assert first is not None
    session.attach(2, seq, 0)  # the same router asks again, before its ack came
    second = session.take(now=1.0)
    assert second is not None
    assert [item.handle for item in second.finished] == [2]
    assert list(second.token_ids) == [0, 1]
    assert session.acked(1) == []  # somebody still reads it
    assert session.acked(2) == [seq]


@pytest.mark.parametrize("message_id", [1, 2**63])
def test_an_ack_of_what_was_never_sent_breaks_the_stream(message_id: int) -> None:
    with pytest.raises(SessionError, match=f"message {message_id} was acknowledged"):
        RouterSession("r").acked(message_id)


def test_a_newer_stream_of_a_router_ends_its_older_ones_and_a_late_older_one_itself() -> None:
    older, newer, other = RouterSession("r", 1), RouterSession("r", 2), RouterSession("other", 1)
    assert superseded(newer, [older, other]) == [older]
    assert superseded(older, [newer, other]) == [older]
    assert superseded(other, [older, newer]) == []


def test_streams_that_are_not_counted_end_one_another_by_what_they_read_alone() -> None:
    """As those of a router of an earlier revision."""
    assert superseded(RouterSession("r"), [RouterSession("r")]) == []
    assert superseded(RouterSession("r", 2), [RouterSession("r", 2)]) == []


def test_news_of_what_nobody_reads_is_nobodys() -> None:
    seq = running()
    assert touch(seq) is None
    assert session_of(seq) is None
