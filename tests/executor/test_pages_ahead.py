from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor import memory, pages_ahead
from executor.pages_ahead import PagesAhead

NUM_ARRAYS = 3


@pytest.fixture(autouse=True)
def pages_of_four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HUGE_PAGE_BYTES", 4 * 10)


class Taken:
    """Which blocks of which array pages were taken for, told by where a tensor lies."""

    def __init__(self, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = torch.zeros((NUM_ARRAYS, num_blocks, 2, 5), dtype=torch.uint8)
        self.parts: set[tuple[int, int]] = set()
        monkeypatch.setattr(memory, "take_pages", self._take)

    def _take(self, part: Tensor) -> None:
        assert part.is_contiguous()
        first = (part.data_ptr() - self.blocks.data_ptr()) // 10
        places = {divmod(at, self.blocks.shape[1]) for at in range(first, first + part.nbytes // 10)}
        assert not places & self.parts, "nothing is taken twice"
        self.parts |= places

    def num_blocks_of_every_array(self) -> int:
        return next(
            block for block in count() if any((array, block) not in self.parts for array in range(NUM_ARRAYS))
        )


@given(st.integers(1, 100), st.lists(st.integers(0, 99), max_size=10))
def test_an_eighth_is_taken_ahead_of_the_highest_block_used_and_nothing_twice(
    num_blocks: int, used: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        taken = Taken(num_blocks, monkeypatch)
        pages = PagesAhead(taken.blocks)
        highest = -1
        for block_id in (None, *used):
            if block_id is not None:
                pages.used(block_id % num_blocks)
                highest = max(highest, block_id % num_blocks)
            while pages.take():
                pass
            wanted = min(num_blocks, highest + 1 + max(1, num_blocks // 8))
            assert wanted <= taken.num_blocks_of_every_array() <= min(num_blocks, wanted + 3)


def test_a_great_cache_is_not_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "MOST_BYTES_AHEAD", NUM_ARRAYS * 10 * 7)
    taken = Taken(1000, monkeypatch)
    pages = PagesAhead(taken.blocks)
    pages.used(500)
    while pages.take():
        pass
    assert 508 <= taken.num_blocks_of_every_array() < 512


def test_one_call_takes_no_more_than_about_a_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(1000, monkeypatch)
    assert PagesAhead(taken.blocks).take()
    assert len(taken.parts) == 4


def test_a_gpus_memory_is_not_taken_ahead() -> None:
    assert pages_ahead.of(torch.zeros((1, 1, 1), device="meta")) is None
