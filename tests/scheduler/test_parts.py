from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.parts import PartAssembler
from scheduler.router_session import SessionError


def ids(*values: int) -> "array[int]":
    return array("I", values)


@given(
    prompts=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=5), max_size=5),
    data=st.data(),
)
def test_prompts_are_put_together_however_their_parts_interleave(
    prompts: list[list[list[int]]], data: st.DataObject
) -> None:
    parts: PartAssembler[str] = PartAssembler()
    next_part = [0] * len(prompts)
    whole: dict[str, list[int]] = {}
    while pending := [i for i, prompt in enumerate(prompts) if next_part[i] < len(prompt)]:
        handle = data.draw(st.sampled_from(pending))
        index = next_part[handle]
        next_part[handle] += 1
        count = len(prompts[handle])
        done = parts.add(
            handle, index, count, f"{handle}.{index}", bytes([handle]), ids(*prompts[handle][index])
        )
        assert (done is not None) == (index == count - 1)
        if done is not None:
            whole[done[0]] = list(done[1])
    assert whole == {
        f"{handle}.0": [token for part in prompt for token in part] for handle, prompt in enumerate(prompts)
    }
    assert len(parts) == 0


def test_the_first_message_is_what_counts() -> None:
    parts: PartAssembler[str] = PartAssembler()
    assert parts.add(1, 0, 2, "first", b"k", ids(1)) is None
    assert parts.add(1, 1, 2, "second", b"", ids(2)) == ("first", ids(1, 2))


@pytest.mark.parametrize(("index", "count"), [(2, 3), (1, 4)])
def test_a_part_that_does_not_follow_breaks_the_stream(index: int, count: int) -> None:
    parts: PartAssembler[str] = PartAssembler()
    parts.add(1, 0, 3, "first", b"k", ids(1))
    with pytest.raises(SessionError, match=f"part {index} of {count} after 1 of 3"):
        parts.add(1, index, count, "later", b"", ids(2))


def test_a_prompt_does_not_begin_twice() -> None:
    parts: PartAssembler[str] = PartAssembler()
    parts.add(1, 0, 3, "first", b"k", ids(1))
    with pytest.raises(SessionError, match="a second time"):
        parts.add(1, 0, 3, "again", b"k", ids(1))


def test_the_rest_of_a_prompt_that_was_given_up_means_nothing() -> None:
    parts: PartAssembler[str] = PartAssembler()
    parts.add(1, 0, 3, "first", b"k", ids(1))
    parts.add(2, 0, 2, "other", b"o", ids(7))
    assert parts.give_up(b"k") == [1]
    assert parts.give_up(b"k") == []
    assert parts.add(1, 1, 3, "later", b"", ids(2)) is None
    assert parts.add(1, 2, 3, "later", b"", ids(3)) is None
    assert parts.add(2, 1, 2, "later", b"", ids(8)) == ("other", ids(7, 8))
    assert len(parts) == 0
