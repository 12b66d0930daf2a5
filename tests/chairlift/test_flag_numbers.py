import argparse

import pytest

from chairlift.flag_numbers import integer, not_negative, number, positive, positives, whole


def test_numbers_are_read() -> None:
    assert whole("12") == 12
    assert positive("0.25") == 0.25
    assert positives("3,1,2.5,1") == [1.0, 2.5, 3.0]
    assert integer("-3") == -3
    assert number("-0.5") == -0.5


def test_a_word_is_no_number() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^it is '1\.5', and must be a whole number$"):
        integer("1.5")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^it is 'fast', and must be a number$"):
        number("fast")


@pytest.mark.parametrize("text", ["four", "0", "-1", "1.5", ""])
def test_what_is_not_whole_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^it is '{text}', and must be a whole number"):
        whole(text)
    if text == "0":
        assert not_negative(text) == 0
    else:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^it is '{text}', and .* number, at least 0$"):
            not_negative(text)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf", "1e300", ""])
def test_what_is_not_above_zero_is_refused_with_a_sentence(text: str) -> None:
    for read in (positive, positives):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"^it is '{text}', and must be a number above 0$"
        ):
            read(text)
