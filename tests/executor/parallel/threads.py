"""Ranks as threads of one process: the sharding and the arithmetic without processes and their messages.

Our kernels take one caller at a time, so the ranks compute in plain torch here; with the kernels they run as
processes, in the tests of whole executors.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from executor.inputs import StepInputs
from executor.model.checkpoint import Checkpoint
from executor.operations.base import Operations
from executor.parallel.group import total_of
from executor.parallel.messages import packed, unpacked
from executor.parallel.operations import ParallelOperations
from executor.parallel.shard import Shard
from executor.runner import ModelRunner
from tests.rig.fake_device import in_place

T = TypeVar("T")


class Table:
    """Where the ranks lay down what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = Barrier(size, timeout=60)
        self._places: list[object] = [None] * size
        self.words: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(size)]
        """What the first rank tells each rank: a step, or nothing at all, which is the end."""

    def exchange(self, rank: int, value: T) -> list[T]:
        """Everybody's value, once everybody has laid it down."""
        self._places[rank] = value
        self._barrier.wait()
        values: list[T] = list(self._places)  # type: ignore[arg-type]  # they all call this
        self._barrier.wait()
        return values

    def give_up(self) -> None:
        """Whoever waits for the others gets an exception, or the end."""
        self._barrier.abort()
        self.tell(b"")

    def tell(self, word: bytes) -> None:
        for words in self.words[1:]:
            words.put(word)


class ThreadRanks:
    """`Ranks` at a table."""

    is_ordered = True
    num_sharers = 1

    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self.rank, self.size = rank, table.size

    def shard(self, checkpoint: Checkpoint) -> Checkpoint:
        return Shard(checkpoint.config, self.rank, self.size).of(checkpoint)

    def meet(self) -> None:
        pass

    def agree(self, what: str, value: str) -> None:
        assert set(self._table.exchange(self.rank, value)) == {value}, what

    def least(self, number: int) -> int:
        return min(self._table.exchange(self.rank, number))

    def joined(self, operations: Operations, whole: Checkpoint) -> Operations:
        shard = Shard(whole.config, self.rank, self.size)
        spans = [shard.vocabulary_of(rank) for rank in range(self.size)]
        vocabularies = [range(span.start, span.stop) for span in spans]
        return ParallelOperations(operations, self, rank=self.rank, vocabularies=vocabularies)

    def add(self, part: Tensor) -> None:
        in_place(lambda: part.copy_(total_of(torch.stack(self._table.exchange(self.rank, part.clone())))))

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        parts = self._table.exchange(self.rank, part.clone())
        assert [each.shape[1] for each in parts] == list(widths)
        return torch.cat(parts, dim=1) if self.rank == 0 else part

    def share(self, token_ids: Tensor) -> Tensor:
        return token_ids.copy_(self._table.exchange(self.rank, token_ids.clone())[0])

    def leading(self, inputs: StepInputs) -> AbstractContextManager[None]:
        self._table.tell(packed(inputs))
        return nullcontext()

    def steps(self) -> Iterator[StepInputs]:
        while word := self._table.words[self.rank].get():
            yield unpacked(word)

    def end(self) -> None:
        if self.rank == 0:
            self._table.tell(b"")


def on_each_rank(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` returns on each rank, all running at once."""
    table = Table(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(table, rank))
        except BaseException:
            table.give_up()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        return [future.result() for future in futures]


def load(path: Path, ranks: ThreadRanks | None = None, dtype: str = "float32") -> ModelRunner:
    """The model, or the shard of one rank."""
    return ModelRunner.load(
        path, dtype=dtype, device="cpu", num_blocks=64, block_size=16, max_num_seqs=8, ranks=ranks
    )
