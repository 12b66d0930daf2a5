"""Which executors can stand in for each other."""

from dataclasses import replace

import pytest

from scheduler.identity import other_model, other_numbers
from tests.rig.checking_executor import capacity

ONE = replace(
    capacity(),
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    numerics_fingerprint="n",
    row_invariant=True,
)


def test_the_same_and_what_is_not_known_fit() -> None:
    unknown = replace(ONE, model_fingerprint="", tokenizer_fingerprint="", numerics_fingerprint="")
    assert other_model(ONE, ONE) is other_model(ONE, unknown) is other_model(unknown, ONE) is None
    assert other_numbers(ONE, unknown) is None


def test_block_sizes_and_limits_may_differ() -> None:
    assert other_model(ONE, replace(ONE, block_size=64, num_blocks=9, max_num_seqs=1, max_seq_len=20)) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_fingerprint": "x"}, "its model fingerprint is x, theirs is m"),
        ({"tokenizer_fingerprint": "x"}, "its tokenizer fingerprint is x, theirs is t"),
        ({"vocab_size": 7}, "its vocabulary has 7 ids, theirs has 97"),
        ({"eos_token_ids": frozenset({3, 1})}, r"its end tokens are [1, 3], theirs are [96]"),
    ],
)
def test_another_model_is_named_with_both_values(change: dict[str, object], sentence: str) -> None:
    assert other_model(ONE, replace(ONE, **change)) == sentence  # type: ignore[arg-type]


def test_other_numbers_matter_where_one_of_the_two_promises_bits() -> None:
    other = replace(ONE, numerics_fingerprint="x", row_invariant=False)
    assert other_numbers(ONE, other) == "its numerics are x, theirs are n"
    assert other_numbers(other, ONE) == "its numerics are n, theirs are x"
    assert other_numbers(replace(ONE, row_invariant=False), other) is None
