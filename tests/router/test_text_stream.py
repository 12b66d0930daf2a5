from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import ByteLevelDetokenizer
from router.stop_strings import StopStrings
from router.text_stream import Piece, TextStream


def words(*texts: str) -> ByteLevelDetokenizer:
    """A vocabulary whose token n is the n-th of `texts`."""
    return ByteLevelDetokenizer(lambda token_id: texts[token_id].encode())


def single_bytes() -> ByteLevelDetokenizer:
    return ByteLevelDetokenizer(lambda token_id: bytes([token_id]))


def stream(detokenizer: ByteLevelDetokenizer, *stops: str, include: bool = False) -> TextStream:
    return TextStream(detokenizer, StopStrings(stops, include=include))


def test_b41_ids_after_the_match_are_not_counted() -> None:
    text = stream(words(" ABC", "DEF", "G", "HI", "J", "K"), "DEFGHIJ")
    assert text.push([0, 1]) == Piece(" ABC", 2, None)
    assert text.push([2, 3, 4, 5]) == Piece("", 3, "DEFGHIJ")
    assert not text.finish()
    assert text.matched == "DEFGHIJ"


def test_b44_the_token_that_holds_the_stops_end_counts() -> None:
    text = stream(words("go ", "stop!", " more"), "stop")
    assert text.push([0, 1, 2]) == Piece("go ", 2, "stop")


def test_no_ids_are_no_piece() -> None:
    assert stream(single_bytes()).push([]) == Piece("", 0, None)


def test_finish_gives_the_held_beginning_of_a_stop_once() -> None:
    text = stream(words("a", "st"), "stop")
    assert text.push([0, 1]) == Piece("a", 2, None)
    assert text.finish() == "st"
    assert not text.finish()


def test_finish_gives_a_half_character_after_the_held_beginning_of_a_stop() -> None:
    text = stream(single_bytes(), "stop")
    assert text.push(b"st\xc3") == Piece("", 3, None)
    assert text.finish() == "st\ufffd"


@pytest.mark.parametrize(("include", "end"), [(False, "a"), (True, "a\ufffd")])
def test_b48_a_stop_that_completes_only_at_the_end_is_told(include: bool, end: str) -> None:
    text = stream(single_bytes(), "\ufffd", include=include)
    assert text.push(b"a\xc3") == Piece("a", 2, None)
    assert "a" + text.finish() == end
    assert text.matched == "\ufffd"


@given(
    ids=st.text(alphabet="ab😀é", max_size=20).map(str.encode) | st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    stops=st.lists(st.text(alphabet="ab😀\ufffd", min_size=1, max_size=3), max_size=3),
)
def test_b52_text_and_count_do_not_depend_on_how_the_ids_arrive(
    ids: bytes, cuts: list[int], stops: list[str]
) -> None:
    def outcome(bounds: list[int]) -> tuple[str, int, str | None]:
        text = stream(single_bytes(), *stops)
        sent, num_tokens = "", 0
        for start, end in pairwise(bounds):
            piece = text.push(ids[start:end])
            sent += piece.text
            num_tokens += piece.num_tokens
            if piece.matched is not None:
                break
        return sent + text.finish(), num_tokens, text.matched

    one_by_one = outcome(list(range(len(ids) + 1)))
    assert outcome([0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]) == one_by_one
