from typing import Any

import pytest

from executor.stopping import FinishReason, StopRule, end_token_ids


def rule(**changes: Any) -> StopRule:
    values: dict[str, Any] = {
        "end_token_ids": frozenset({7, 3}),
        "min_tokens": 0,
        "max_tokens": 5,
        "max_seq_len": 100,
    }
    return StopRule(**{**values, **changes})


def test_an_ordinary_token_ends_nothing() -> None:
    assert rule().finish_reason(1, num_output_tokens=4, seq_len=20) is None


def test_an_end_token_ends_with_stop() -> None:
    assert rule().finish_reason(7, num_output_tokens=1, seq_len=20) is FinishReason.STOP


def test_b48_an_end_token_as_the_last_allowed_token_ends_with_stop() -> None:
    assert rule().finish_reason(7, num_output_tokens=5, seq_len=100) is FinishReason.STOP


@pytest.mark.parametrize(("num_output_tokens", "seq_len"), [(5, 20), (1, 100)])
def test_max_tokens_and_the_model_length_end_with_length(num_output_tokens: int, seq_len: int) -> None:
    reason = rule().finish_reason(1, num_output_tokens=num_output_tokens, seq_len=seq_len)
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_b58_end_tokens_are_masked_until_exactly_min_tokens_are_out(min_tokens: int) -> None:
    masked = [rule(min_tokens=min_tokens).masked_ids(i) for i in range(6)]
    assert masked == [(3, 7)] * min_tokens + [()] * (6 - min_tokens)


def test_ignore_eos_leaves_the_stop_ids() -> None:
    assert end_token_ids((1, 2), (3,), ignore_eos=False) == {1, 2, 3}
    assert end_token_ids((1, 2), (3,), ignore_eos=True) == {3}
