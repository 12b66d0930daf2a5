"""Lines of a child's output, however long: none ends the reader, and none holds up the child."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import child_process
from chairlift.child_lines import MAX_LINE_BYTES, lines_of
from chairlift.child_process import ChildProcess, Service
from tests.chairlift.shouting_child import LONG_BYTES


async def read(*chunks: bytes, max_bytes: int) -> list[bytes]:
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    return [line async for line in lines_of(stream, max_bytes=max_bytes)]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a\n\nb"], [b"a", b"", b"b"]),
        ([b"a", b"b", b"c\nd", b"e\n"], [b"abc", b"de"]),
        ([b"abcdef\n"], [b"abcdef"]),
        ([b"abcdefg\nh\n"], ["abcdef … (1 more bytes of this line are left out)".encode(), b"h"]),
        ([b"abcdefg"], ["abcdef … (1 more bytes of this line are left out)".encode()]),
    ],
)
async def test_lines_are_whole_up_to_a_limit(chunks: list[bytes], lines: list[bytes]) -> None:
    assert await read(*chunks, max_bytes=6) == lines


@given(st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"abcdefghij"]), max_size=20))
def test_any_cutting_gives_the_same(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = asyncio.run(read(whole, max_bytes=8))
    assert asyncio.run(read(*chunks, max_bytes=8)) == expected
    assert len(expected) == len(whole.split(b"\n")) - (not whole or whole.endswith(b"\n"))
    assert all(len(line) <= 8 or line[8:].startswith(" … (".encode()) for line in expected)


async def test_a_child_that_writes_a_line_without_end_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand still once its pipe were full."""
    logged: list[str] = []
    announced: list[str] = []
    monkeypatch.setattr(child_process.log, "write", logged.append)
    monkeypatch.setattr(child_process, "announce", announced.append)
    child = ChildProcess(Service("shouter", ("--listen", "unix:x"), "tests.chairlift.shouting_child"))
    await child.start()
    assert await asyncio.wait_for(child.ended, 60) == 0
    assert await child.last_words() == "the shouter ended with exit code 0"
    for lines, behind in ((logged, ["short"] * 3 + ["no end"]), (announced, ["short"] * 3)):
        assert lines[1:] == behind
        assert lines[0].startswith("x" * MAX_LINE_BYTES + " … (")
        assert lines[0].endswith(f"({LONG_BYTES - MAX_LINE_BYTES} more bytes of this line are left out)")
