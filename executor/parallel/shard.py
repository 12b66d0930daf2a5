"""Which part of a model each rank holds. Knows no process, and reads no tensor before it is asked for.

A shard is a checkpoint of a smaller model: fewer heads, a narrower MLP, a piece of the vocabulary, and the
same hidden states. Everything that loads and computes a model works on it as it is.

    matrix                  a rank has            what its product is
    embed_tokens, lm_head   rows of some tokens   these tokens' hidden states; their logits
    q, k, v                 rows of whole heads   its heads, which attend by themselves
    gate, up                some rows             its part of the MLP's middle, of every expert's
    o, down                 the columns of these  a part of the update, which is the sum of these

Norms and routers are whole on every rank. A bias of o or down is added only by rank 0, since otherwise a sum
would contain it once for each rank. Query heads are divided evenly, each with the key-value head it reads; if
there are fewer key-value heads than ranks, several ranks hold the same one. MLP and vocabulary need not
divide evenly: some ranks then have one row more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from executor.model.checkpoint import Checkpoint, StoredTensor
from executor.model.config import Mixture, ModelConfig
from executor.model.errors import ModelError
from executor.model.weights import (
    HEAD,
    ROPE_DIVISORS,
    check_names_and_shapes,
    expected_shapes,
)

Part = TypeVar("Part")

_EVERYTHING: Final = slice(None)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`, as spans of the whole model's rows. Raises `ModelError`."""

    whole: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        heads, kv_heads, size = self.whole.num_heads, self.whole.num_kv_heads, self.size
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ModelError(
                f"a model of {heads} attention heads and {kv_heads} key-value heads cannot be shared out "
                f"over {size} ranks: the heads must be a multiple of the ranks, and the key-value heads too, "
                f"or the ranks a multiple of them. --tensor-parallel can be {_sizes(heads, kv_heads)}."
            )
        if self.whole.norms_heads_together and size > 1:
            raise ModelError(
                "a model that norms the heads of a token together cannot be shared out over several ranks, "
                "each of which has some of them: say --tensor-parallel 1."
            )
        for what, rows in self._mlp_sizes():
            if rows < size:
                raise ModelError(
                    f"a model with {what} {rows} cannot be shared out over {size} ranks: each needs a row of "
                    "the MLP."
                )

    def _mlp_sizes(self) -> Iterator[tuple[str, int]]:
        """Rows of all kinds of MLPs that the model has, for people."""
        mixture = self.whole.mixture
        if not all(kind.has_experts for kind in self.whole.layers):
            yield "intermediate_size", self.whole.intermediate_size
        if mixture is not None:
            yield "experts of intermediate_size", mixture.intermediate_size
        if mixture is not None and mixture.shared_intermediate_size is not None:
            yield "a shared expert of intermediate_size", mixture.shared_intermediate_size

    @property
    def heads(self) -> slice:
        """Query heads."""
        return _span(self.whole.num_heads, self.rank, self.size)

    @property
    def kv_heads(self) -> slice:
        """Key-value heads: those that its query heads read."""
        together = self.whole.num_heads // self.whole.num_kv_heads
        return slice(self.heads.start // together, -(-self.heads.stop // together))

    @property
    def mlp(self) -> slice:
        """Rows of the MLP's middle."""
        return self.rows_of(self.whole.intermediate_size)

    @property
    def mixture(self) -> Mixture | None:
        """Its part of every expert."""
        whole = self.whole.mixture
        if whole is None:
            return None
        shared = whole.shared_intermediate_size
        return replace(
            whole,
            intermediate_size=_length(self.rows_of(whole.intermediate_size)),
            shared_intermediate_size=None if shared is None else _length(self.rows_of(shared)),
        )

    def rows_of(self, intermediate_size: int) -> slice:
        """Rows of the middle of an MLP of this size."""
        return _span(intermediate_size, self.rank, self.size)

    @property
    def vocabulary(self) -> slice:
        """Token ids."""
        return self.vocabulary_of(self.rank)

    def vocabulary_of(self, rank: int) -> slice:
        """Token ids of another rank."""
        return _span(self.whole.vocab_size, rank, self.size)

    @property
    def config(self) -> ModelConfig:
        """The smaller model."""
        return replace(
            self.whole,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.mlp),
            vocab_size=_length(self.vocabulary),
            mixture=self.mixture,
        )

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The shard of `checkpoint`, whose tensors are checked as a whole first. Raises `ModelError`.

        Its `eos_token_ids` and texts are those of the whole.
        """
        check_names_and_shapes(checkpoint)
        needed = expected_shapes(self.whole).keys() | {HEAD, ROPE_DIVISORS}
        parts = {name: self._part(name, each) for name, each in checkpoint.tensors.items() if name in needed}
        return replace(checkpoint, config=self.config, tensors=parts)

    def _part(self, name: str, whole: StoredTensor) -> StoredTensor:
        rows, columns = self._cut(name, whole.shape)
        read = whole.read_part
        if name.endswith((".o_proj.bias", ".down_proj.bias")) and self.rank > 0:
            read = _zeros(whole)
        shape = tuple(
            len(range(*cut.indices(size))) for cut, size in zip((rows, columns), whole.shape, strict=False)
        )
        read_blocks = None if whole.read_blocks is None else _within(whole.read_blocks, rows, columns)
        return StoredTensor(shape, whole.dtype, _within(read, rows, columns), whole, read_blocks)

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[slice, slice]:
        """Rows and columns of the tensor `name`, which as a whole is of `shape`."""
        head_dim = self.whole.head_dim
        match name.split(".")[-2:]:
            case ["embed_tokens" | "lm_head", _]:
                return self.vocabulary, _EVERYTHING
            case ["q_proj", _]:
                return _times(self.heads, head_dim), _EVERYTHING
            case ["k_proj" | "v_proj", _]:
                return _times(self.kv_heads, head_dim), _EVERYTHING
            case ["gate_proj" | "up_proj", _]:
                return self.rows_of(shape[0]), _EVERYTHING
            case ["o_proj", "weight"]:
                return _EVERYTHING, _times(self.heads, head_dim)
            case ["down_proj", "weight"]:
                return _EVERYTHING, self.rows_of(shape[1])
            case _:
                return _EVERYTHING, _EVERYTHING


def _span(total: int, rank: int, size: int) -> slice:
    return slice(total * rank // size, total * (rank + 1) // size)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def _sizes(heads: int, kv_heads: int) -> str:
    """The numbers of ranks that this many heads can be shared out over, for people."""
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


_Read = Callable[[slice, slice], torch.Tensor]


def _within(
    read: Callable[[slice, slice], Part], rows: slice, columns: slice
) -> Callable[[slice, slice], Part]:
    """Reads parts of a part: only wholes are asked of a shard, and of what is not cut."""

    def read_part(inner_rows: slice, inner_columns: slice) -> Part:
        assert inner_rows == inner_columns == _EVERYTHING, "a shard is read whole"
        return read(rows, columns)

    return read_part


def _zeros(whole: StoredTensor) -> Callable[[slice, slice], torch.Tensor]:
    return lambda _rows, _columns: torch.zeros(whole.shape)
