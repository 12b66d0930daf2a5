"""However much is sent, so much is kept and no more; what is short is always taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import RequestError
from rpc.holding import SHORT_BYTES, Room


def test_beyond_the_room_long_ones_wait_and_short_ones_pass() -> None:
    room = Room(10_000)
    with room.kept(SHORT_BYTES + 10_000):
        with pytest.raises(RequestError, match="10000 bytes in all") as caught:
            room.kept(SHORT_BYTES + 1)
        assert caught.value.code.name == "RESOURCE_EXHAUSTED"
        assert caught.value.retry_after_seconds
        with room.kept(SHORT_BYTES):
            pass
    with room.kept(SHORT_BYTES + 1):
        pass


@given(st.lists(st.lists(st.integers(0, 50_000), max_size=6), max_size=8))
def test_the_room_is_never_overfull_and_empty_at_the_end(requests: list[list[int]]) -> None:
    room, all_kept = Room(100_000), []
    for pieces in requests:
        kept = room.kept()
        all_kept.append(kept)
        for num_bytes in pieces:
            try:
                kept.grow(num_bytes)
            except RequestError:
                kept.let_go()
                break
            assert 0 <= room.num_bytes <= 100_000
    for kept in all_kept:
        kept.let_go()
        kept.let_go()
    assert room.num_bytes == 0
