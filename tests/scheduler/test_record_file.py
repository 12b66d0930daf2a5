"""What was sealed is read back; what was changed, moved or cut is refused with its place."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.record_file import MAGIC, RecordError, Sealer, chunks


def written(bodies: list[bytes]) -> list[bytes]:
    """The magic line and each chunk."""
    sealer = Sealer()
    last = len(bodies) - 1
    return [MAGIC, *(sealer.seal(body, is_last=index == last) for index, body in enumerate(bodies))]


def read(data: bytes, *, may_be_cut: bool = False) -> list[bytes]:
    return [chunk.lines for chunk in chunks(io.BytesIO(data), may_be_cut=may_be_cut)]


bodies = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


@given(bodies)
def test_what_was_written_is_read(items: list[bytes]) -> None:
    assert read(b"".join(written(items))) == items


@given(bodies, st.data())
def test_a_changed_byte_is_refused_with_its_chunk(items: list[bytes], data: st.DataObject) -> None:
    parts = written(items)
    whole = b"".join(parts)
    at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    number = next(n for n in range(1, len(parts)) if at < len(b"".join(parts[: n + 1])))
    offset = len(b"".join(parts[:number]))
    before: list[bytes] = []
    with pytest.raises(RecordError, match=f"chunk {number} at byte {offset}") as caught:
        before.extend(chunk.lines for chunk in chunks(io.BytesIO(bytes(changed))))
    assert "is not as it was written" in str(caught.value) or "is cut off" in str(caught.value)


@given(bodies, st.data())
def test_a_cut_record_is_refused_and_its_whole_part_can_be_had(
    items: list[bytes], data: st.DataObject
) -> None:
    parts = written(items)
    whole = b"".join(parts)
    length = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    num_whole = sum(len(b"".join(parts[: n + 1])) <= length for n in range(1, len(parts)))
    offset = len(b"".join(parts[: num_whole + 1]))
    cut = f"cut off in chunk {num_whole + 1} at byte {offset}: .* still being written"
    with pytest.raises(RecordError, match=cut):
        read(whole[:length])
    assert read(whole[:length], may_be_cut=True) == items[:num_whole]


def test_chunks_that_are_missing_moved_or_from_another_record_are_refused() -> None:
    magic, one, two, three = written([b"one", b"two", b"three"])
    other = Sealer().seal(b"another beginning")
    for data in (magic + one + three, magic + two + one + three, magic + other + two + three):
        with pytest.raises(RecordError, match=r"chunk [12] at byte \d+ is not as it was written"):
            read(data)
    with pytest.raises(RecordError, match="there is more behind it"):
        read(magic + one + two + three + b"x")


@pytest.mark.parametrize("data", [b"", b"arrival_s,prompt_tokens\n", MAGIC[:-1]])
def test_another_file_is_no_record(data: bytes) -> None:
    with pytest.raises(RecordError, match="this is no record"):
        read(data)
