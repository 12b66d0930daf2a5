"""Log-probabilities of a prompt on their way through the router: once, whole, before the first token."""

import asyncio
from dataclasses import replace

import pytest

from router.call import Call, Ended, Grown, PromptSeen
from router.request_log import End, FinishReason, RequestLog, TokenLogprobs
from router.scheduler_session import SchedulerSession, SessionError, StepOutput
from tests.router.test_scheduler_session import drain, new_request, new_session, opened, output, submits

LENGTH = End(FinishReason.LENGTH)


def report(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, (), ())


def reports(log: RequestLog, first: int, last: int) -> tuple[TokenLogprobs, ...]:
    """Of the positions `first` to `last` of its prompt."""
    return tuple(map(report, log.prompt_token_ids[first : last + 1]))


def told(message: StepOutput, handle: int, first: int, entries: tuple[TokenLogprobs, ...]) -> StepOutput:
    return replace(message, prompt_logprobs={handle: (first, entries)})


def begun(n: int = 1) -> tuple[SchedulerSession, int, RequestLog]:
    """A session with one request of five prompt tokens that asks; its handles are 1 to n."""
    session, log = new_session(), new_request(n=n, num_prompt_tokens=5, prompt_logprobs=0)
    connection = opened(session)
    session.submit(log, 100.0)
    drain(session)
    return session, connection, log


def test_the_first_choice_alone_asks() -> None:
    session, log = new_session(), new_request(n=3, num_prompt_tokens=5, prompt_logprobs=2)
    opened(session)
    session.submit(log, 100.0)
    asked = [submit.body.sampling.prompt_logprobs for submit in submits(drain(session)) if submit.body]
    assert asked == [2, None, None]
    assert log.num_prompt_numbers == 4 * 3 * 3


def test_chunks_add_up_and_tokens_may_follow_in_the_same_message() -> None:
    session, connection, log = begun()
    session.receive(connection, told(output(1), 1, 1, reports(log, 1, 2)), 100.0)
    assert log.lacks_prompt_logprobs
    session.receive(connection, told(output(2, {1: [65]}), 1, 3, reports(log, 3, 4)), 100.0)
    assert not log.lacks_prompt_logprobs
    assert log.prompt_logprobs == list(reports(log, 1, 4))
    assert log.choices[0].output_token_ids == [65]


@pytest.mark.parametrize("known", [0, 2, 4])
def test_after_a_break_they_come_from_the_start_and_none_is_kept_twice(known: int) -> None:
    session, connection, log = begun()
    if known:
        session.receive(connection, told(output(1), 1, 1, reports(log, 1, known)), 100.0)
    session.disconnected("it broke", 101.0)
    connection = opened(session, 102.0)
    (submit,) = submits(drain(session))
    assert submit.body is not None
    assert submit.body.sampling.prompt_logprobs == (0 if known < 4 else None)
    again = told(output(1, {submit.handle: [65]}), submit.handle, 1, reports(log, 1, 4))
    if known < 4:
        session.receive(connection, again, 103.0)
    else:
        session.receive(connection, output(1, {submit.handle: [65]}), 103.0)
    assert log.prompt_logprobs == list(reports(log, 1, 4))


def test_a_scheduler_that_tells_all_again_unasked_is_no_fault() -> None:
    session, connection, log = begun()
    session.receive(connection, told(output(1), 1, 1, reports(log, 1, 4)), 100.0)
    session.disconnected("it broke", 101.0)
    connection = opened(session, 102.0)
    (submit,) = submits(drain(session))
    session.receive(connection, told(output(1), submit.handle, 1, reports(log, 1, 4)), 103.0)
    assert log.prompt_logprobs == list(reports(log, 1, 4))


@pytest.mark.parametrize("first", [0, 2, 9])
def test_a_gap_ends_the_stream(first: int) -> None:
    session, connection, log = begun()
    with pytest.raises(SessionError, match=f"from {first} on; 1 is next"):
        session.receive(connection, told(output(1), 1, first, reports(log, 1, 1)), 100.0)
    assert log.prompt_logprobs == []


def test_b71_those_of_other_tokens_end_the_stream() -> None:
    session, connection, log = begun()
    with pytest.raises(SessionError, match="another prompt"):
        session.receive(connection, told(output(1), 1, 1, reports(log, 0, 2)), 100.0)
    too_many = (*reports(log, 1, 4), report(7))
    with pytest.raises(SessionError, match="another prompt"):
        session.receive(connection, told(output(1), 1, 1, too_many), 100.0)


def test_a_token_before_they_are_whole_ends_the_stream() -> None:
    session, connection, log = begun()
    with pytest.raises(SessionError, match="got tokens after 2 of 4"):
        session.receive(connection, told(output(1, {1: [65]}), 1, 1, reports(log, 1, 2)), 100.0)
    assert log.choices[0].output_token_ids == []
    session, connection, log = begun()
    with pytest.raises(SessionError, match="got tokens after 0 of 4"):
        session.receive(connection, output(1, {1: [65]}), 100.0)


def test_one_that_did_not_ask_gets_none() -> None:
    session, log = new_session(), new_request(num_prompt_tokens=5)
    connection = opened(session)
    session.submit(log, 100.0)
    with pytest.raises(SessionError, match="asked for none"):
        session.receive(connection, told(output(1), 1, 1, reports(log, 1, 1)), 100.0)


# --- towards the client -----------------------------------------------------------------------------


async def test_nothing_is_told_before_the_prompt_is_whole() -> None:
    session, connection, log = begun(n=2)
    call = Call((log,))
    session.receive(
        connection, told(output(1, {2: [66]}, started={1: 0, 2: 0}), 1, 1, reports(log, 1, 3)), 1.0
    )
    waiting = asyncio.ensure_future(call.news())
    await asyncio.sleep(0)
    assert not waiting.done()
    session.receive(connection, told(output(2, {1: [65]}), 1, 4, reports(log, 4, 4)), 1.0)
    call.ring()
    first, *deltas = await waiting
    assert isinstance(first, PromptSeen)
    assert len(first.log.prompt_logprobs) == 4
    assert [item.delta.token_ids for item in deltas if isinstance(item, Grown)] == [(65,), (66,)]


async def test_a_choice_that_ended_without_them_is_told_all_the_same() -> None:
    session, connection, log = begun()
    session.receive(connection, output(1, finished={1: LENGTH}), 1.0)
    news = await Call((log,)).news()
    assert [type(item) for item in news] == [PromptSeen, Ended]
