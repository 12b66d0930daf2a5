import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import open_loop
from chairlift.open_loop import Due, Limits, Seen, percentile, poisson, prompts, report, until

NO_LIMITS = Limits(None, None)


def seen(due: float, *arrivals: float, late: float = 0.0, num_tokens: int | None = None) -> Seen:
    each = Seen(Due(due, 4, 4), sent=due + late, arrivals=list(arrivals))
    each.num_tokens = len(arrivals) if num_tokens is None else num_tokens
    return each


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_a_percentile_is_everybodys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_the_seed_says_when_requests_come() -> None:
    lengths = [(4, 4)] * 2000
    first, again, other = (list(poisson(5.0, lengths, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert prompts(first[:9], 300, 3) == prompts(again[:9], 300, 3) != prompts(first[:9], 300, 4)
    gaps = np.diff([0.0, *(due.seconds for due in first)])
    assert np.mean(gaps) == pytest.approx(1 / 5.0, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 5.0, rel=0.15)  # that of an exponential distribution is its mean


def test_ids_of_prompts_are_in_the_vocabulary() -> None:
    for vocab_size in (2, 300, 50_000):
        ids = {each for prompt in prompts([Due(0, 50, 1)] * 20, vocab_size, 0) for each in prompt}
        assert 0 < min(ids) <= max(ids) < vocab_size


def test_a_load_ends_by_time_or_by_number() -> None:
    dues = [Due(float(second), 1, 1) for second in range(10)]
    assert len(until(dues, seconds=4.5, count=None)) == 5
    assert len(until(dues, seconds=4.5, count=3)) == 3
    assert len(until(dues, seconds=None, count=7)) == 7


def test_times_count_from_when_a_request_was_due() -> None:
    result = report([seen(1.0, 1.5, 1.6, 1.9, late=0.3)], NO_LIMITS, seconds=2.0, cpu_seconds=0.1)
    assert result["time_to_first_token_seconds"]["p50"] == pytest.approx(0.5)
    assert result["inter_token_seconds"]["max"] == pytest.approx(0.3)
    assert result["inter_token_seconds"]["p50"] == pytest.approx(0.2)
    assert result["inter_token_seconds"]["mean"] == pytest.approx(0.2)
    assert result["output_tokens_per_second"] == pytest.approx(1.5)


def test_a_generator_that_comes_late_says_so() -> None:
    on_time = [seen(float(n), n + 0.1) for n in range(199)]
    late = seen(200.0, 200.5, late=2 * open_loop.LATE_SECONDS)
    one = report([*on_time, late], NO_LIMITS, seconds=201, cpu_seconds=0)["generator"]
    assert (one["num_late"], one["kept_the_rate"]) == (1, True)
    three = report([*on_time, late, late, late], NO_LIMITS, seconds=201, cpu_seconds=0)["generator"]
    assert (three["num_late"], three["kept_the_rate"]) == (3, False)


def test_goodput_counts_what_keeps_both_limits() -> None:
    failed = Seen(Due(3.0, 4, 4), sent=3.0, failure="UNAVAILABLE")
    load = [seen(0.0, 0.2, 0.3, 0.4), seen(1.0, 1.9, 2.0, 2.1), seen(2.0, 2.1, 2.9, 3.5), failed]
    for limits, good in (
        (NO_LIMITS, 3),
        (Limits(0.5, None), 2),
        (Limits(None, 0.2), 2),
        (Limits(0.5, 0.2), 1),
    ):
        result = report(load, limits, seconds=4.0, cpu_seconds=0)
        assert result["goodput"]["requests_per_second"] == pytest.approx(good / 4)
        assert result["goodput"]["share"] == pytest.approx(good / 4)
    assert result["failures"] == {"UNAVAILABLE": 1}
    assert result["num_answered"] == 3


def test_tokens_that_come_together_share_their_time() -> None:
    assert seen(0.0, 1.0, 2.0, num_tokens=11).mean_gap == pytest.approx(0.1)


def test_a_load_that_nobody_answers_has_a_report() -> None:
    result = report([Seen(Due(0.0, 1, 1), failure="x")], NO_LIMITS, seconds=1.0, cpu_seconds=0)
    assert result["time_to_first_token_seconds"] is None
    assert result["goodput"]["share"] == 0


def test_requests_that_come_all_at_once_have_no_rate_and_a_report() -> None:
    result = report([seen(0.0, 0.2), seen(0.0, 0.3)], NO_LIMITS, seconds=1.0, cpu_seconds=0)
    assert result["offered_requests_per_second"] is None
    assert result["num_answered"] == 2
    alone = report([seen(1.0, 1.2)], NO_LIMITS, seconds=1.2, cpu_seconds=0)
    assert alone["offered_requests_per_second"] is None
    two = report([seen(1.0, 1.2), seen(4.0, 4.3)], NO_LIMITS, seconds=4.3, cpu_seconds=0)
    assert two["offered_requests_per_second"] == pytest.approx(2 / 4.0)


def test_what_was_found_in_the_cache_is_counted_of_those_that_were_answered() -> None:
    failed = Seen(Due(3.0, 4, 4), sent=3.0, failure="UNAVAILABLE")
    load = [seen(0.0, 0.2), seen(1.0, 1.2), failed]
    result = report(load, NO_LIMITS, seconds=4.0, cpu_seconds=0)
    assert (result["num_prompt_tokens"], result["num_cached_tokens"]) == (8, None)
    load[1].num_cached = 3
    assert report(load, NO_LIMITS, seconds=4.0, cpu_seconds=0)["num_cached_tokens"] == 3
