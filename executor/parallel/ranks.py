"""What a model on several ranks needs from the other ranks; and the rank that is alone.

The runner is written once, against `Ranks`; it does the same on a shard as on a whole model. If there are
several ranks, each has a runner, and all of these make the same calls in the same order: the first rank's
runner because of what the scheduler asks, the others because of what the first rank tells them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from executor.inputs import StepInputs
from executor.model.checkpoint import Checkpoint
from executor.operations.base import Operations


class Ranks(Protocol):
    """This process among those that share a model."""

    rank: int
    size: int
    num_sharers: int
    """Ranks that share this one's memory and processors."""

    def shard(self, checkpoint: Checkpoint) -> Checkpoint:
        """This rank's part of `checkpoint`. Raises `ModelError` when it cannot be shared out like this."""

    def meet(self) -> None:
        """Wait for all ranks. Before that, nothing below may be called. Raises `RankLostError`."""

    def agree(self, what: str, value: str) -> None:
        """Raises `ModelError` when ranks have different values; `what` it is, for people."""

    def least(self, number: int) -> int:
        """The lowest number that a rank has."""

    def joined(self, operations: Operations, whole: Checkpoint) -> Operations:
        """`operations` on this rank's shard as parts of those on the whole model."""

    def share(self, token_ids: Tensor) -> Tensor:
        """The first rank's `token_ids` (int64 `[S]`), on all ranks; the others' are written over."""

    def leading(self, inputs: StepInputs) -> AbstractContextManager[None]:
        """The others make this step with us. Asked of the first rank alone.

        An exception within it is the end of all ranks: nobody knows how far the others are.
        """

    def steps(self) -> Iterator[StepInputs]:
        """The steps that the first rank leads, until it ends. Asked of the others alone."""

    def end(self) -> None:
        """Take leave. The first rank's leave is the end of the others' `steps`."""


class Alone:
    """The one rank of a model that is not shared out."""

    rank, size, num_sharers = 0, 1, 1

    def shard(self, checkpoint: Checkpoint) -> Checkpoint:
        """All of it."""
        return checkpoint

    def meet(self) -> None:
        """There is nobody to wait for."""

    def agree(self, what: str, value: str) -> None:
        """There is no other value."""

    def least(self, number: int) -> int:
        """`number`."""
        return number

    def joined(self, operations: Operations, whole: Checkpoint) -> Operations:  # noqa: ARG002
        """As they are."""
        return operations

    def share(self, token_ids: Tensor) -> Tensor:
        """As they are."""
        return token_ids

    def leading(self, inputs: StepInputs) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nobody is told."""
        return nullcontext()

    def steps(self) -> Iterator[StepInputs]:
        """None: nobody leads."""
        return iter(())

    def end(self) -> None:
        """Nobody is left."""
