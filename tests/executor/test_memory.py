import mmap
import resource
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from executor import memory


def test_tensors_are_zero_and_have_their_shape() -> None:
    tensor = memory.zeros((3, 5, 7), torch.bfloat16)
    assert tensor.shape == (3, 5, 7)
    assert not tensor.any()
    tensor.fill_(1.0)


def test_tensors_of_an_arena_never_overlap_and_begin_at_cache_lines() -> None:
    arena = memory.Arena()
    sizes = [1, 3, 1000, 33 << 20, 33 << 20, 70 << 20, 5]
    tensors = [arena.zeros(size, torch.uint8) for size in sizes]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert [len(tensor) for tensor in tensors] == sizes


def test_an_arenas_tensors_outlive_it() -> None:
    tensor = memory.Arena().zeros(100, torch.float32)
    tensor.fill_(2.0)
    assert tensor.sum() == 200


def test_pages_that_were_taken_hold_what_they_held_and_are_not_waited_for() -> None:
    taken, other = (memory.zeros((128 << 20,), torch.uint8) for _ in range(2))
    taken[5] = 7
    memory.take_pages(taken[3:-9])

    def num_faults(tensor: Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor[6:] = 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert num_faults(other) > 2 * num_faults(taken)
    assert taken[5] == 7


def test_a_kernel_that_cannot_take_pages_leaves_them_to_the_first_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    tensor = memory.zeros((1 << 20,), torch.uint8)
    memory.take_pages(tensor)
    assert not tensor.any()


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Asked(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Asked)
    memory.zeros((10,), torch.float32)
    assert asked == [mmap.MADV_HUGEPAGE]


def test_small_pages_do_where_there_are_no_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoHugePages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("Invalid argument")

    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    assert memory.zeros((10,), torch.float32).shape == (10,)
