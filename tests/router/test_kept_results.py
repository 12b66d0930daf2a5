"""Results that are kept: told again, for a while, within bounds."""

from router.kept_results import KeptResults
from router.request_log import End, FinishReason, RequestLog
from tests.router.test_request_log import ids, new_log

NAME = ("", "r")


def ended(
    text: str = "abc", *stops: str, reason: FinishReason = FinishReason.LENGTH, n: int = 1
) -> RequestLog:
    log = new_log(*stops, n=n)
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
        assert choice.end == End(FinishReason.LENGTH)
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
    huge = ended("x" * 99)
    huge.request_id = "huge"
    KeptResults(max_bytes=600).keep(huge, 20.0)
    assert kept.find(("", "huge"), b"d", 23.0) is None
