"""Results that are kept: told again, for a while, within bounds."""

from router.kept_results import KeptResults
from router.request_log import End, FinishReason, RequestLog
from tests.router.test_request_log import ids, logprob, new_log

NAME = ("", "r")


def ended(
    text: str = "abc",
    *stops: str,
    reason: FinishReason = FinishReason.LENGTH,
    n: int = 1,
    prompt_logprobs: int | None = None,
) -> RequestLog:
    log = new_log(*stops, n=n, prompt_logprobs=prompt_logprobs)
    for choice in log.choices:
        choice.append(ids(text), (), 11.0)
        if choice.end is None:
            choice.finish(End(reason), 12.0)
    return log


def test_a_result_is_told_from_where_its_client_is() -> None:
    kept = KeptResults()
    kept.keep(ended(n=2), 20.0)
    result = kept.find(NAME, b"d", 79.9)
    assert result is not None
    fresh, behind = new_log(n=2).choices
    behind.resume(ids("ab"), 30.0)
    for choice, known in zip((fresh, behind), result.choices, strict=True):
        assert known is not None
        assert known.tell(choice, 30.0)
        assert (choice.end, choice.num_cached_tokens) == (End(FinishReason.LENGTH), 0)
    told = [choice.take_delta() for choice in (fresh, behind)]
    assert [delta and (delta.offset, delta.text) for delta in told] == [(0, "abc"), (2, "c")]


def test_ids_that_differ_are_not_gone_on_from() -> None:
    kept = KeptResults()
    kept.keep(ended(), 20.0)
    result = kept.find(NAME, b"d", 21.0)
    other = new_log().choices[0]
    other.resume(ids("x"), 30.0)
    assert result is not None
    assert result.choices[0] is not None
    assert not result.choices[0].tell(other, 30.0)
    assert other.end is None


def test_a_stop_string_ends_it_again_as_it_did() -> None:
    kept = KeptResults()
    kept.keep(ended("abc", "bc"), 20.0)
    result = kept.find(NAME, b"d", 21.0)
    again = new_log("bc").choices[0]
    assert result is not None
    assert result.choices[0] is not None
    assert result.choices[0].tell(again, 30.0)
    assert again.end == End(FinishReason.STOP, matched_stop="bc")


def test_what_was_kept_counts_as_begun_by_a_scheduler_and_with_what_its_cache_gave() -> None:
    log = ended()
    log.choices[0].start(5)
    kept = KeptResults()
    kept.keep(log, 20.0)
    again = new_log()
    result = kept.find(NAME, b"d", 21.0)
    assert result is not None
    assert result.choices[0] is not None
    assert result.choices[0].tell(again.choices[0], 30.0)
    assert again.taken_in
    assert again.num_cached_tokens == 5


def test_one_choice_that_cannot_be_told_again_keeps_the_request_from_being_kept() -> None:
    kept = KeptResults()
    asks = new_log(logprobs=0)
    asks.choices[0].append(ids("a"), [logprob(ids("a")[0])], 11.0)
    asks.choices[0].finish(End(FinishReason.LENGTH), 12.0)
    asks_of_its_prompt = ended(n=2, prompt_logprobs=0)
    asks_of_its_prompt.take_prompt_logprobs(1, [logprob(2), logprob(3)])
    half = new_log(n=2)
    half.choices[0].finish(End(FinishReason.LENGTH), 12.0)
    for log in (asks, asks_of_its_prompt, half):
        kept.keep(log, 20.0)
        assert kept.find(NAME, b"d", 21.0) is None


def test_another_body_a_later_time_and_a_broken_end_find_nothing() -> None:
    kept = KeptResults()
    kept.keep(ended(), 20.0)
    assert kept.find(NAME, b"e", 21.0) is None
    assert kept.find(("tenant", "r"), b"d", 21.0) is None
    assert kept.find(NAME, b"d", 80.0) is None
    kept.keep(ended(reason=FinishReason.ABORT), 90.0)
    assert kept.find(NAME, b"d", 91.0) is None


def test_bytes_are_bounded_and_the_oldest_go_first() -> None:
    kept = KeptResults(max_bytes=1200)
    for number in range(3):
        log = ended("x" * 10)
        log.request_id = f"r{number}"
        kept.keep(log, 20.0 + number)
    assert [kept.find(("", f"r{number}"), b"d", 23.0) is not None for number in range(3)] == [
        False,
        True,
        True,
    ]
    small = KeptResults(max_bytes=600)
    small.keep(ended("x" * 9), 20.0)
    small.keep(ended("x" * 99), 21.0)
    assert small.find(NAME, b"d", 23.0) is None, "the newer one has no room, the older one is over"
