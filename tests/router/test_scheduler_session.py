"""A router's side of one scheduler: nothing lost, nothing twice, whatever breaks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.request_log import End, FinishReason, RequestLog, TokenLogprobs
from router.scheduler_session import (
    PART_TOKENS,
    Ack,
    Cancel,
    Event,
    Fingerprints,
    Hello,
    Progressed,
    RouterMessage,
    SchedulerSession,
    SequenceFinished,
    ServingChanged,
    ServingStatus,
    SessionError,
    StepOutput,
    Submit,
    TokenizerIdentity,
    Welcome,
)
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from tests.router.test_request_log import Letters, sampling

SERVING = ServingStatus(serving=True, reason="")
ABORT = End(FinishReason.ABORT)
LENGTH = End(FinishReason.LENGTH)


def welcome(*, vocab_size: int = 272, tokenizer: str = "") -> Welcome:
    return Welcome("s1", 1, 1, 512, vocab_size, (257,), Fingerprints(tokenizer=tokenizer), "float32")


def new_session(*, recovery_timeout_seconds: float = 60.0, fingerprint: str = "aa") -> SchedulerSession:
    return SchedulerSession(
        router_id="r1",
        tokenizer=TokenizerIdentity(fingerprint, 260),
        recovery_timeout_seconds=recovery_timeout_seconds,
    )


def new_request(
    name: str = "a", *stops: str, n: int = 1, num_prompt_tokens: int = 3, **changes: object
) -> RequestLog:
    return RequestLog(
        request_id=name,
        tenant="t",
        prompt_token_ids=tuple(i % 250 for i in range(num_prompt_tokens)),
        sampling=sampling(**changes),
        texts=[TextStream(Letters(), StopStrings(stops, include=False)) for _ in range(n)],
        eos_token_ids=frozenset({257}),
        priority=-3,
        cache_salt="salt",
        body_digest=b"digest",
        deadline=200.0,
        received_at=0.0,
    )


def output(
    message_id: int,
    tokens: dict[int, list[int]] | None = None,
    *,
    finished: dict[int, End] | None = None,
    started: dict[int, int] | None = None,
    logprobs: dict[int, tuple[TokenLogprobs, ...]] | None = None,
) -> StepOutput:
    tokens = tokens or {}
    return StepOutput(
        message_id=message_id,
        handles=tuple(tokens),
        num_tokens=tuple(len(token_ids) for token_ids in tokens.values()),
        token_ids=tuple(t for token_ids in tokens.values() for t in token_ids),
        logprobs=logprobs or {},
        finished=tuple(SequenceFinished(handle, end, 0) for handle, end in (finished or {}).items()),
        started=started or {},
        step_id=message_id,
    )


def drain(session: SchedulerSession, now: float = 100.0) -> list[RouterMessage]:
    messages = []
    while (message := session.next_message(now)) is not None:
        messages.append(message)
    return messages


def opened(session: SchedulerSession, now: float = 100.0) -> int:
    """Brings a session up to where requests travel; returns the number of the stream."""
    connection = session.connected()
    session.receive(connection, SERVING, now)
    session.receive(connection, welcome(), now)
    assert session.refusal is None
    assert session.next_message(now) == Hello("r1", 1, stream=connection)
    return connection


def submits(messages: list[RouterMessage]) -> list[Submit]:
    return [message for message in messages if isinstance(message, Submit)]


# --- opening ----------------------------------------------------------------------------------------


def test_hello_goes_first_and_nothing_else_before_the_welcome() -> None:
    session = new_session()
    connection = session.connected()
    assert drain(session) == [Hello("r1", 1, stream=1)]
    session.receive(connection, SERVING, 0.0)
    assert session.refusal == "the scheduler has no executor yet"
    assert session.receive(connection, welcome(), 0.0) == [ServingChanged(None)]
    assert drain(session) == []


def test_b91_requests_are_refused_with_the_schedulers_own_reason_until_it_serves() -> None:
    session = new_session()
    assert session.refusal == "the scheduler has not been reached yet"
    connection = session.connected()
    events = session.receive(connection, ServingStatus(serving=False, reason="no executor is attached"), 0.0)
    assert events == [ServingChanged("no executor is attached")]
    session.receive(connection, welcome(), 0.0)
    assert session.refusal == "no executor is attached"
    assert session.receive(connection, SERVING, 0.0) == [ServingChanged(None)]


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused_naming_both() -> None:
    session = new_session(fingerprint="aa")
    connection = session.connected()
    session.receive(connection, SERVING, 0.0)
    session.receive(connection, welcome(tokenizer="bb"), 0.0)
    assert session.refusal is not None
    assert "aa" in session.refusal
    assert "bb" in session.refusal
    assert session.welcome is None


def test_without_a_fingerprint_the_vocabularies_are_compared() -> None:
    session = new_session()
    connection = session.connected()
    session.receive(connection, SERVING, 0.0)
    session.receive(connection, welcome(vocab_size=259), 0.0)
    assert session.refusal is not None
    assert "260" in session.refusal
    assert "259" in session.refusal


@pytest.mark.parametrize("message", [welcome(), output(1)])
def test_a_message_out_of_place_ends_the_stream(message: Welcome | StepOutput) -> None:
    session = new_session()
    connection = session.connected()
    if isinstance(message, Welcome):
        session.receive(connection, message, 0.0)
    with pytest.raises(SessionError, match="is out of place"):
        session.receive(connection, message, 0.0)


# --- requests ---------------------------------------------------------------------------------------


def test_a_submit_carries_all_that_a_scheduler_must_know() -> None:
    session = new_session()
    opened(session)
    request = new_request(n=2)
    session.submit(request, 150.0)
    first, second = submits(drain(session, 150.0))
    assert first.prompt_token_ids == request.prompt_token_ids
    assert (first.part, first.num_parts) == (0, 1)
    assert first.body is not None
    assert second.body is not None
    assert (first.handle, second.handle) == (1, 2)
    assert first.body.group == second.body.group
    assert [first.body.sample_index, second.body.sample_index] == [0, 1]
    assert first.body.key != second.body.key
    assert first.body.sampling.seed == 7
    assert first.body.remaining_ms == 50_000
    assert first.body.waited_ms == 0
    assert not first.body.accepted_before
    assert (first.body.priority, first.body.tenant, first.body.cache_salt) == (-3, "t", "salt")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "parts"),
    [
        (1, [1]),
        (PART_TOKENS, [PART_TOKENS]),
        (PART_TOKENS + 1, [PART_TOKENS, 1]),
        (40_000, [16_384, 16_384, 7_232]),
    ],
)
def test_long_prompts_travel_in_parts(num_prompt_tokens: int, parts: list[int]) -> None:
    session = new_session()
    opened(session)
    request = new_request(num_prompt_tokens=num_prompt_tokens)
    session.submit(request, 100.0)
    sent = submits(drain(session))
    assert [len(part.prompt_token_ids) for part in sent] == parts
    assert [part.part for part in sent] == list(range(len(parts)))
    assert {part.num_parts for part in sent} == {len(parts)}
    assert {part.handle for part in sent} == {1}
    assert [part.body is not None for part in sent] == [True] + [False] * (len(parts) - 1)
    assert tuple(t for part in sent for t in part.prompt_token_ids) == request.prompt_token_ids


def test_a_cancel_does_not_wait_behind_a_long_prompt() -> None:
    session = new_session()
    opened(session)
    long, other = new_request("long", num_prompt_tokens=100_000), new_request("other")
    session.submit(other, 100.0)
    session.submit(long, 100.0)
    drain_two = [session.next_message(100.0), session.next_message(100.0)]
    assert all(isinstance(message, Submit) for message in drain_two)
    session.cancel(other.choices[0].key, ABORT, 100.0)
    assert session.next_message(100.0) == Cancel(other.choices[0].key, FinishReason.ABORT)
    assert isinstance(session.next_message(100.0), Submit)


def test_the_rest_of_a_cancelled_prompt_is_not_sent() -> None:
    session = new_session()
    opened(session)
    request = new_request(num_prompt_tokens=100_000)
    session.submit(request, 100.0)
    session.next_message(100.0)
    session.cancel(request.choices[0].key, ABORT, 100.0)
    assert drain(session) == [Cancel(request.choices[0].key, FinishReason.ABORT)]
    assert session.num_live == 0


def test_b30_cancelling_what_has_ended_or_never_was_leaves_nothing_behind() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request()
    session.submit(request, 100.0)
    drain(session)
    session.receive(connection, output(1, {1: [97]}, finished={1: LENGTH}), 101.0)
    drain(session)
    for _ in range(3):
        session.cancel(request.choices[0].key, ABORT, 102.0)
        session.cancel(b"never was", ABORT, 102.0)
    assert drain(session) == []
    assert request.choices[0].end == LENGTH


# --- output -----------------------------------------------------------------------------------------


def test_tokens_starts_and_ends_reach_their_choices() -> None:
    session = new_session()
    connection = opened(session)
    a, b = new_request("a"), new_request("b")
    session.submit(a, 100.0)
    session.submit(b, 100.0)
    drain(session)
    events = session.receive(connection, output(1, {1: [97, 98], 2: [99]}, started={1: 16, 2: 0}), 101.0)
    assert events == [Progressed(a), Progressed(b)]
    assert a.choices[0].output_token_ids == [97, 98]
    assert b.choices[0].output_token_ids == [99]
    assert a.num_cached_tokens == 16
    assert session.receive(connection, output(2, {2: [100]}, finished={2: LENGTH}), 102.0) == [Progressed(b)]
    assert b.ended
    assert not a.ended
    assert session.num_live == 1


def test_what_has_been_taken_in_is_acknowledged_once() -> None:
    session = new_session()
    connection = opened(session)
    session.submit(new_request(), 100.0)
    drain(session)
    session.receive(connection, output(1, {1: [97]}), 101.0)
    session.receive(connection, output(2, {1: [97]}), 101.0)
    assert drain(session) == [Ack(2)]


def test_a_duplicate_message_is_dropped() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request()
    session.submit(request, 100.0)
    session.receive(connection, output(1, {1: [97]}), 101.0)
    assert session.receive(connection, output(1, {1: [97]}), 101.0) == []
    assert request.choices[0].output_token_ids == [97]


def test_b41_a_stop_string_cancels_with_stop_and_later_tokens_are_nobodys() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request("a", "b")
    session.submit(request, 100.0)
    drain(session)
    session.receive(connection, output(1, {1: [97, 98]}), 101.0)
    assert request.choices[0].end == End(FinishReason.STOP, matched_stop="b")
    assert drain(session) == [Ack(1), Cancel(request.choices[0].key, FinishReason.STOP)]
    session.receive(connection, output(2, {1: [99]}), 102.0)
    session.receive(connection, output(3, finished={1: LENGTH}), 103.0)
    assert request.choices[0].output_token_ids == [97, 98]
    assert request.choices[0].end == End(FinishReason.STOP, matched_stop="b")
    assert session.num_live == 0


def test_b48_a_stop_string_that_completes_with_the_last_token_is_the_reason() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request("a", "b", max_tokens=2)
    session.submit(request, 100.0)
    drain(session)
    session.receive(connection, output(1, {1: [97, 98]}, finished={1: LENGTH}), 101.0)
    assert request.choices[0].end == End(FinishReason.STOP, matched_stop="b")
    assert drain(session) == [Ack(1)]


def test_b65_choices_of_one_request_end_at_different_times() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request(n=3)
    session.submit(request, 100.0)
    session.receive(connection, output(1, {1: [97], 2: [98], 3: [99]}, finished={2: LENGTH}), 101.0)
    session.receive(connection, output(2, {1: [97], 3: [99]}, finished={3: LENGTH}), 102.0)
    assert [choice.end is not None for choice in request.choices] == [False, True, True]
    session.receive(connection, output(3, {1: [97]}, finished={1: LENGTH}), 103.0)
    assert [choice.output_token_ids for choice in request.choices] == [[97, 97, 97], [98], [99, 99]]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (output(2, {1: [97]}), "message 2 came after message 0"),
        (StepOutput(1, (1,), (1, 1), (97,), {}, (), {}, 1), "1 handles stand beside 2 counts"),
        (StepOutput(1, (1,), (2,), (97,), {}, (), {}, 1), "1 ids came, 2 were counted"),
        (StepOutput(1, (1, 1), (1, 1), (97, 97), {}, (), {}, 1), "two rows"),
        (output(1, {1: []}), "row without tokens"),
        (output(1, {3: [97]}), "handle 3 was never given"),
        (output(1, {0: [97]}), "handle 0 was never given"),
        (output(1, finished={9: LENGTH}), "handle 9 was never given"),
        (output(1, started={9: 0}), "handle 9 was never given"),
        (output(1, {1: [272]}), "token id 272 is outside the vocabulary of 272"),
        (output(1, {1: [97, 97, 97, 97]}), "more than its max_tokens of 3"),
        (
            output(1, {1: [97]}, logprobs={1: (TokenLogprobs(97, -1, 1, (), ()),)}),
            "1 log-probabilities, 0 are due",
        ),
        (output(1, {2: [97]}), "0 log-probabilities, 1 are due"),
    ],
)
def test_columns_that_do_not_fit_end_the_stream_and_nothing_of_them_is_applied(
    bad: StepOutput, match: str
) -> None:
    session = new_session()
    connection = opened(session)
    plain, with_logprobs = new_request("a", max_tokens=3), new_request("b", max_tokens=3, logprobs=2)
    session.submit(plain, 100.0)
    session.submit(with_logprobs, 100.0)
    with pytest.raises(SessionError, match=match):
        session.receive(connection, bad, 101.0)
    assert plain.choices[0].output_token_ids == with_logprobs.choices[0].output_token_ids == []
    assert not plain.ended


# --- breaking and coming back -----------------------------------------------------------------------


def test_after_a_break_every_live_request_is_submitted_again_with_the_ids_it_has() -> None:
    session = new_session()
    connection = opened(session)
    a, b, ended = new_request("a", n=2), new_request("b"), new_request("ended")
    for request in (ended, a, b):
        session.submit(request, 100.0)
    drain(session)
    a.accepted = True
    session.receive(connection, output(1, {1: [97], 2: [98, 99]}, finished={1: LENGTH}), 101.0)
    assert session.disconnected("it broke", 102.0) == [ServingChanged("it broke")]
    opened(session, 103.0)
    again = submits(drain(session, 104.0))
    bodies = [submit.body for submit in again]
    assert [submit.handle for submit in again] == [1, 2, 3]
    assert [body.request_id for body in bodies if body] == ["a", "a", "b"]
    assert [body.output_token_ids for body in bodies if body] == [(98, 99), (), ()]
    assert [body.group for body in bodies if body] == [1, 1, 3]
    assert [body.accepted_before for body in bodies if body] == [True, True, False]
    assert [body.waited_ms for body in bodies if body] == [4000, 4000, 4000]
    assert {submit.prompt_token_ids for submit in again} == {a.prompt_token_ids}


def test_every_message_of_a_stream_that_was_left_is_dropped() -> None:
    session = new_session()
    first = opened(session)
    request = new_request()
    session.submit(request, 100.0)
    session.disconnected("it broke", 101.0)
    assert session.receive(first, output(1, {1: [97]}), 101.0) == []
    opened(session, 102.0)
    assert session.receive(first, output(1, {1: [97]}, finished={1: LENGTH}), 102.0) == []
    assert session.receive(first, ServingStatus(serving=False, reason="old"), 102.0) == []
    assert request.choices[0].output_token_ids == []
    assert session.refusal is None


def test_what_was_cancelled_while_away_is_told_before_anything_is_submitted() -> None:
    session = new_session()
    opened(session)
    gone, stays = new_request("gone"), new_request("stays")
    session.submit(gone, 100.0)
    session.submit(stays, 100.0)
    drain(session)
    session.disconnected("it broke", 101.0)
    session.cancel(gone.choices[0].key, ABORT, 102.0)
    opened(session, 103.0)
    cancel, submit = drain(session)
    assert cancel == Cancel(gone.choices[0].key, FinishReason.ABORT)
    assert isinstance(submit, Submit)
    assert submit.body is not None
    assert submit.body.request_id == "stays"


def test_b92_requests_wait_for_the_recovery_timeout_and_then_fail_unavailable() -> None:
    session = new_session(recovery_timeout_seconds=60.0)
    connection = opened(session)
    request = new_request(n=2)
    session.submit(request, 100.0)
    session.receive(connection, output(1, {1: [97]}), 101.0)
    session.disconnected("it cannot be reached", 110.0)
    assert session.recovery_deadline == 170.0
    session.connected()
    session.disconnected("it cannot be reached", 150.0)  # a try that failed does not start the wait anew
    assert session.expire(169.9) == []
    assert session.expire(170.0) == [Progressed(request)]
    assert session.recovery_deadline is None
    for choice in request.choices:
        assert choice.end is not None
        assert choice.end.reason is FinishReason.ERROR
        assert choice.end.status_code == 14
        assert "it cannot be reached" in choice.end.message
    assert request.choices[0].output_token_ids == [97]
    assert session.expire(200.0) == []
    assert session.num_live == 0


def test_with_a_recovery_timeout_of_zero_a_break_fails_requests_at_once() -> None:
    session = new_session(recovery_timeout_seconds=0)
    opened(session)
    request = new_request()
    session.submit(request, 100.0)
    assert session.disconnected("it broke", 101.0) == [ServingChanged("it broke"), Progressed(request)]
    assert request.ended


def test_a_scheduler_that_comes_back_in_time_ends_the_wait() -> None:
    session = new_session(recovery_timeout_seconds=60.0)
    opened(session)
    request = new_request()
    session.submit(request, 100.0)
    session.disconnected("it broke", 101.0)
    opened(session, 160.0)
    assert session.recovery_deadline is None
    assert session.expire(1000.0) == []
    session.disconnected("it broke again", 1000.0)
    assert session.recovery_deadline == 1060.0


# --- going on elsewhere -----------------------------------------------------------------------------


def test_a_request_that_was_handed_over_leaves_in_silence_and_a_newer_log_attaches() -> None:
    session, older, newer = new_session(), new_request(n=2), new_request(n=2)
    connection = opened(session)
    session.submit(older, 100.0)
    drain(session)
    session.hand_over(older)
    newer.choices[0].resume([97], 101.0)
    session.submit(newer, 101.0)
    messages = drain(session)
    assert [m.handle for m in submits(messages)] == [3, 4]
    assert not any(isinstance(message, Cancel) for message in messages)
    # What the older handles still get is nobody's.
    assert session.receive(connection, output(1, {1: [120], 3: [98]}), 102.0) == [Progressed(newer)]
    assert newer.choices[0].output_token_ids == [97, 98]
    assert older.choices[0].output_token_ids == []


def test_half_a_prompt_that_was_handed_over_is_given_up_first() -> None:
    session, older, newer = new_session(), *(new_request(num_prompt_tokens=3 * PART_TOKENS) for _ in "12")
    opened(session)
    session.submit(older, 100.0)
    assert isinstance(session.next_message(100.0), Submit)
    session.hand_over(older)
    session.submit(newer, 101.0)
    cancel, *parts = drain(session)
    assert cancel == Cancel(older.choices[0].key, FinishReason.ABORT)
    assert [m.handle for m in submits(parts)] == [2, 2, 2]


def test_what_was_abandoned_goes_on_elsewhere_and_its_scheduler_is_told_when_it_is_back() -> None:
    session, other, request = new_session(), new_session(), new_request()
    opened(session)
    opened(other)
    session.submit(request, 100.0)
    drain(session)
    session.disconnected("gone", 101.0)
    assert session.away_since == 101.0
    assert session.requests == [request]
    session.abandon(request)
    other.submit(request, 102.0)
    assert request.submitted_at == 100.0, "its place is as old as it is"
    assert len(submits(drain(other))) == 1
    assert session.expire(1000.0) == []
    opened(session)
    assert not submits(drain(session))


def test_a_choice_that_had_its_stop_string_is_not_computed_on() -> None:
    session, request = new_session(), new_request("a", "bc", n=2)
    opened(session)
    request.choices[0].resume([98, 99], 99.0)
    session.submit(request, 100.0)
    cancel, submit = drain(session)
    assert cancel == Cancel(request.choices[0].key, FinishReason.STOP)
    assert isinstance(submit, Submit)
    assert submit.body is not None
    assert submit.body.key == request.choices[1].key


def test_breaks_of_the_protocol_that_follow_one_another_count_as_being_away() -> None:
    session, request = new_session(recovery_timeout_seconds=60.0), new_request()
    opened(session)
    session.submit(request, 100.0)
    now = 100.0
    while now < 159.0:
        session.broke_protocol("it babbles", now)
        opened(session, now)
        now += 1.0
        assert not request.ended
    assert Progressed(request) in session.broke_protocol("it babbles", 160.0)
    assert request.choices[0].end is not None


def test_a_request_given_up_as_a_stream_begins_hears_what_it_waited_for() -> None:
    session, request = new_session(recovery_timeout_seconds=60.0), new_request()
    opened(session)
    session.submit(request, 100.0)
    session.broke_protocol("it babbles", 100.0)
    session.connected()
    assert session.expire(160.0) == [Progressed(request)]
    end = request.choices[0].end
    assert end is not None
    assert end.message == "The request could not go on: it babbles."


def test_breaks_far_apart_are_affairs_of_their_own() -> None:
    session, request = new_session(recovery_timeout_seconds=60.0), new_request()
    opened(session)
    session.submit(request, 100.0)
    for now in (100.0, 150.0, 200.0):
        session.broke_protocol("it babbles", now)
        opened(session, now)
    assert not request.ended


# --- the law ----------------------------------------------------------------------------------------


class Model:
    """What one sequence must come to: its ids are a function of its key."""

    def __init__(self, request: RequestLog, index: int, num_tokens: int) -> None:
        self.choice = request.choices[index]
        self.ids = [(self.choice.key[i % 16] + i) % 250 for i in range(num_tokens)]
        self.cancelled = False


class ExactlyOnce(RuleBasedStateMachine):
    """A scheduler that forgets everything at each break, a network that doubles and delays messages."""

    def __init__(self) -> None:
        super().__init__()
        self.session = new_session(recovery_timeout_seconds=1e9)
        self.now = 0.0
        self.connection: int | None = None
        self.models: dict[bytes, Model] = {}
        self.ends: dict[bytes, End] = {}
        self.past: list[tuple[int, StepOutput]] = []  # what was ever sent, with its stream
        self.message_id = 0
        self.cursors: dict[int, tuple[bytes, int]] = {}  # the scheduler's: handle to key and ids sent
        self.parts: dict[int, int] = {}

    @initialize()
    def connect(self) -> None:
        self.reconnect()

    @rule(
        n=st.integers(1, 3), lengths=st.lists(st.integers(1, 6), min_size=3, max_size=3), long=st.booleans()
    )
    @precondition(lambda self: self.session.refusal is None)
    def submit(self, n: int, lengths: list[int], long: bool) -> None:
        name = f"request-{len(self.models)}"
        num_prompt_tokens = 2 * PART_TOKENS + 1 if long else 4
        request = new_request(name, n=n, num_prompt_tokens=num_prompt_tokens, max_tokens=6)
        self.session.submit(request, self.now)
        for index in range(n):
            model = Model(request, index, lengths[index])
            self.models[model.choice.key] = model

    @rule(count=st.integers(1, 4))
    @precondition(lambda self: self.connection is not None)
    def carry(self, count: int) -> None:
        """The scheduler reads some of what the router has to say."""
        for _ in range(count):
            message = self.session.next_message(self.now)
            match message:
                case Submit(handle=handle, part=part, num_parts=num_parts, body=body):
                    assert self.parts.get(handle, 0) == part
                    self.parts[handle] = part + 1
                    if body is not None:
                        assert handle not in self.cursors
                        assert list(body.output_token_ids) == self.models[body.key].choice.output_token_ids
                        self.cursors[handle] = (body.key, len(body.output_token_ids))
                    assert part < num_parts
                case Cancel(key=key):
                    self.cursors = {h: cursor for h, cursor in self.cursors.items() if cursor[0] != key}

    @rule(data=st.data())
    @precondition(lambda self: self.connection is not None and self.cursors)
    def step(self, data: st.DataObject) -> None:
        """The scheduler sends some tokens and the ends that follow from them."""
        handles = data.draw(st.lists(st.sampled_from(sorted(self.cursors)), unique=True, min_size=1))
        tokens: dict[int, list[int]] = {}
        finished: dict[int, End] = {}
        for handle in handles:
            key, sent = self.cursors[handle]
            ids = self.models[key].ids
            more = ids[sent : sent + data.draw(st.integers(1, 3))]
            if more:
                tokens[handle] = more
            self.cursors[handle] = (key, sent + len(more))
            if sent + len(more) == len(ids):
                finished[handle] = LENGTH
                del self.cursors[handle]
        self.message_id += 1
        assert self.connection is not None
        self.past.append((self.connection, output(self.message_id, tokens, finished=finished)))
        if data.draw(st.integers(0, 4)):  # else it is lost, and with it the stream
            self.session.receive(*self.past[-1], self.now)
        else:
            self.disconnect()

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def deliver_again(self, data: st.DataObject) -> None:
        self.session.receive(*data.draw(st.sampled_from(self.past)), self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.models)
    def cancel(self, data: st.DataObject) -> None:
        model = self.models[data.draw(st.sampled_from(sorted(self.models)))]
        model.cancelled |= model.choice.end is None
        self.session.cancel(model.choice.key, ABORT, self.now)

    @rule()
    @precondition(lambda self: self.connection is not None)
    def disconnect(self) -> None:
        self.session.disconnected("it broke", self.now)
        self.connection = None

    @rule()
    @precondition(lambda self: self.connection is None)
    def reconnect(self) -> None:
        self.connection = self.session.connected()
        self.message_id = 0
        self.cursors.clear()
        self.parts.clear()
        # What a broken stream lost is not delivered by the new one; old messages may still arrive late.
        self.past = [(stream, message) for stream, message in self.past if stream != self.connection]
        self.session.receive(self.connection, SERVING, self.now)
        self.session.receive(self.connection, welcome(), self.now)

    @invariant()
    def ids_are_a_prefix_of_what_they_must_be(self) -> None:
        for model in self.models.values():
            choice = model.choice
            assert choice.output_token_ids == model.ids[: len(choice.output_token_ids)]
            if choice.end is not None:
                assert self.ends.setdefault(choice.key, choice.end) is choice.end
                assert choice.end.reason is (FinishReason.ABORT if model.cancelled else FinishReason.LENGTH)
                assert model.cancelled or choice.output_token_ids == model.ids

    @invariant()
    def the_session_holds_what_has_not_ended(self) -> None:
        assert self.session.num_live == sum(model.choice.end is None for model in self.models.values())

    def teardown(self) -> None:
        """With a network that works again, everything comes to its end."""
        if self.connection is not None:
            self.disconnect()
        self.reconnect()
        self.carry(10_000 if self.models else 1)
        for handle, (key, sent) in sorted(self.cursors.items()):
            self.message_id += 1
            rest = self.models[key].ids[sent:]
            message = output(self.message_id, {handle: rest} if rest else {}, finished={handle: LENGTH})
            assert self.connection is not None
            self.session.receive(self.connection, message, self.now)
        self.ids_are_a_prefix_of_what_they_must_be()
        assert self.session.num_live == 0


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_events_are_told_for_each_request_once_a_message() -> None:
    session = new_session()
    connection = opened(session)
    request = new_request(n=2)
    session.submit(request, 100.0)
    events: list[Event] = session.receive(connection, output(1, {1: [97], 2: [98]}, started={1: 0}), 101.0)
    assert events == [Progressed(request)]
