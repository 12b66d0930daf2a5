"""`Cuda` without CUDA: what it asks torch for, in which order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from executor.accelerator import Cuda, CudaEvent


class Graph:
    """As torch's: a pool is known while a graph of its own lives, and an unknown one is an error."""

    users: dict[int, int]

    def __init__(self) -> None:
        self._pool: int | None = None

    def begin(self, pool: int | None) -> None:
        if pool is None:
            pool = len(self.users)
        else:
            assert self.users[pool] > 0, "use_count > 0 INTERNAL ASSERT FAILED"
        self.users[pool] = self.users.get(pool, 0) + 1
        self._pool = pool

    def pool(self) -> int:
        assert self._pool is not None
        return self._pool

    def __del__(self) -> None:
        if self._pool is not None:
            self.users[self._pool] -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    @contextmanager
    def capturing(graph: Graph, pool: int | None, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "what NCCL's own thread asks would break it off"
        graph.begin(pool)
        yield

    monkeypatch.setattr(Graph, "users", {}, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return Cuda(torch.device("cuda"))


def test_graphs_that_live_share_a_pool_and_one_that_outlived_its_graphs_is_not_taken_again(
    cuda: Cuda,
) -> None:
    first: Any = cuda.capture(lambda: None)
    second: Any = cuda.capture(lambda: None)
    assert first.pool() == second.pool()
    del first
    third: Any = cuda.capture(lambda: None)
    assert third.pool() == second.pool()
    left = third.pool()
    del second, third
    assert Graph.users == {left: 0}
    anew: Any = cuda.capture(lambda: None)
    assert anew.pool() != left


def test_work_is_done_once_before_it_is_captured(cuda: Cuda) -> None:
    done = []
    cuda.capture(lambda: done.append(len(Graph.users)))
    assert done == [0, 1]


def test_who_waits_for_a_mark_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: asked.append(options))
    CudaEvent()
    assert asked == [{"enable_timing": True, "blocking": True}]
