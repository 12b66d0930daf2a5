"""The law of kind 8: the result is the whole text, cut at the first place where any stop completes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.stop_strings import StopStrings


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """The deltas (what is flushed at the end is the last) and the matched stop."""
    cutter = StopStrings(tuple(stops), include=include)
    deltas = []
    for piece in pieces:
        pushed = cutter.push(piece)
        deltas.append(pushed.text)
        if pushed.matched is not None:
            assert not cutter.flush()
            return deltas, pushed.matched
    return [*deltas, cutter.flush()], None


def by_definition(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Read the text from the left until a stop is complete; the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


FEW_LETTERS = st.text(alphabet="ab\n", max_size=8)
STOPS = st.lists(FEW_LETTERS.filter(bool), max_size=6)


@given(pieces=st.lists(FEW_LETTERS, max_size=20), stops=STOPS, include=st.booleans())
@example(pieces=["abcd"], stops=["cd", "b"], include=False)
@example(pieces=["a", "b", "a", "b", "a", "a"], stops=["ababaa", "abaa"], include=False)
def test_the_result_is_the_text_cut_where_a_stop_first_completes(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    deltas, matched = run(pieces, stops, include=include)
    assert ("".join(deltas), matched) == by_definition("".join(pieces), stops, include=include)


def test_cutters_of_the_same_stops_do_not_know_of_each_other() -> None:
    first, second = StopStrings(("ab",), include=False), StopStrings(("ab",), include=False)
    assert first.push("a") == ("", None)
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")


@given(pieces=st.lists(FEW_LETTERS, max_size=20), stops=STOPS)
def test_exactly_the_longest_suffix_that_begins_a_stop_is_held(pieces: list[str], stops: list[str]) -> None:
    cutter = StopStrings(tuple(stops), include=False)
    text = sent = ""
    for piece in pieces:
        pushed = cutter.push(piece)
        if pushed.matched is not None:
            return
        text += piece
        sent += pushed.text
        beginnings = {stop[:end] for stop in stops for end in range(len(stop))}
        assert text[len(sent) :] == max((b for b in beginnings | {""} if text.endswith(b)), key=len)


def test_b41_the_beginning_of_a_stop_never_reaches_the_client() -> None:
    deltas, matched = run([" ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"])
    assert (deltas, matched) == ([" ABC", "", "", "", ""], "DEFGHIJ")


def test_b41_a_beginning_that_comes_to_nothing_arrives_whole() -> None:
    deltas, matched = run([" ABC", "DEF", "G", "HI", "X"], ["DEFGHIJ"])
    assert ("".join(deltas), matched) == (" ABCDEFGHIX", None)
    assert deltas[4] == "DEFGHIX"


def test_b42_of_a_stop_twice_in_one_token_the_first_cuts() -> None:
    assert run(["Answer", "\n\n"], ["\n"]) == (["Answer", ""], "\n")


@pytest.mark.parametrize("stops", [["cd", "b"], ["b", "cd"]])
def test_b43_the_place_in_the_text_decides_not_the_place_in_the_list(stops: list[str]) -> None:
    assert run(["abcd"], stops) == (["a"], "b")


@pytest.mark.parametrize("stops", [["bcd", "cd"], ["cd", "bcd"]])
def test_of_stops_that_complete_together_the_longest_counts(stops: list[str]) -> None:
    assert run(["ab", "cd"], stops) == (["a", ""], "bcd")


def test_b44_a_stop_that_ends_inside_a_token_cuts_inside_it() -> None:
    assert run(["go ", "stop!", " more"], ["stop"]) == (["go ", ""], "stop")


@pytest.mark.parametrize(("include", "text"), [(True, "ab,c"), (False, "a")])
def test_b45_include_keeps_the_stop_once_and_nothing_after_it(include: bool, text: str) -> None:
    deltas, matched = run(["a", "b,", "c,d"], ["b,c"], include=include)
    assert ("".join(deltas), matched) == (text, "b,c")


def test_b46_no_stops_hold_nothing_back() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_b47_text_that_begins_no_stop_is_not_held() -> None:
    letters = list("abcdefghij" * 6)
    assert run(letters, ["Q" * 200]) == ([*letters, ""], None)


def test_a_stop_begun_again_inside_itself_is_found() -> None:
    deltas, matched = run(list("aabaabaaab"), ["aabaaab"])
    assert (deltas, matched) == (["", "", "", "", "", "aab", "", "", "", ""], "aabaaab")


def test_b101_steps_for_each_character_are_bounded_whatever_the_stops() -> None:
    """Sixteen stops of 256 letters that all nearly match: no more suffix steps than characters."""
    stops = tuple("a" * (255 - i) + "b" * (i + 1) for i in range(16))
    cutter = StopStrings(stops, include=False)
    table = cutter._table
    num_steps = 0

    class Counted(list[int]):
        def __getitem__(self, index: int) -> int:
            nonlocal num_steps
            num_steps += 1
            return super().__getitem__(index)

    table._suffix = Counted(table._suffix)
    text = ("a" * 254 + "c" + "ab") * 20
    for char in text:
        assert cutter.push(char).matched is None
    assert 0 < num_steps <= len(text)
