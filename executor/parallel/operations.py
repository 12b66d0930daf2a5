"""A decoder's operations on one rank's shard, which exchanges make into those of the whole model.

Most are those of the shard itself. Three need the other ranks: embeddings, where a token's row is on one rank
only; updates, a mixture's too, which are sums over the ranks; and logits, which the first rank puts together.
Only the first rank samples: matchers, penalties and draws are state of requests, which would otherwise have
to be sent to the others, and one would have to trust that all ranks have equal logits. As it is, one rank's
choice is the only one.

Wraps any `Operations`, on any device: they do not know that they compute with only a part of the model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import KVCache, LayerCache
from executor.model.config import Mixture
from executor.operations.base import (
    Activation,
    Experts,
    Linear,
    Matrix,
    Mlp,
    Norm,
    Operations,
    StepTensors,
)
from executor.rows import SampleRow


class Exchange(Protocol):
    """What ranks do together with tensors."""

    is_ordered: bool
    """Whether a sum has the same bits wherever in a tensor it stands, and however large that is."""

    def add(self, part: Tensor) -> None:
        """Write the sum of all ranks' `part` to each of them. Sums are made in float32 and rounded once."""

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """On the first rank all ranks' `part` `[S, widths[rank]]` side by side; on the others their own."""


class ParallelOperations:
    """`Operations` of the whole model on rank `rank`, which has the token ids `vocabularies[rank]`."""

    def __init__(
        self, shard: Operations, exchange: Exchange, *, rank: int, vocabularies: Sequence[range]
    ) -> None:
        self._shard = shard
        self._exchange = exchange
        self._vocabulary = vocabularies[rank]
        self._widths = [len(each) for each in vocabularies]
        self.name = f"{shard.name}, {len(vocabularies)} ranks"
        self.block_size = shard.block_size
        self.row_invariant = shard.row_invariant and exchange.is_ordered

    # --- with the others ------------------------------------------------------------------------------

    def embed(self, step: StepTensors, table: Linear, scale: float) -> Tensor:
        """Each token's row from the rank that has it; the others add zeros."""
        places = step.token_ids - self._vocabulary.start
        is_elsewhere = (places < 0) | (places >= len(self._vocabulary))
        hidden = self._shard.embed(replace(step, token_ids=places.masked_fill(is_elsewhere, 0)), table, scale)
        hidden.masked_fill_(is_elsewhere[:, None], 0.0)
        self._exchange.add(hidden)
        return hidden

    def update(self, inputs: Tensor, layer: Linear) -> Tensor:
        """The sum of all ranks' products."""
        update = self._shard.linear(inputs, layer)
        self._exchange.add(update)
        return update

    def mixture(self, inputs: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """The sum of all ranks' parts: each has a part of every expert, and all choose the same ones."""
        update = self._shard.mixture(inputs, experts, activation)
        self._exchange.add(update)
        return update

    def logits(self, normed: Tensor, step: StepTensors, head: Linear, soft_cap: float | None) -> Tensor:
        """Of the whole vocabulary on the first rank; of their part of it on the others."""
        return self._exchange.gather(self._shard.logits(normed, step, head, soft_cap), self._widths)

    def repeat(self, step: StepTensors, kv_cache: KVCache) -> Tensor | None:  # noqa: ARG002 - the interface's
        """Never: the others come in between."""
        return None

    # --- by itself --------------------------------------------------------------------------------------

    def pack(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """The shard's."""
        return self._shard.pack(weight, bias)

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """The shard's."""
        return self._shard.pack_gated(weight, bias)

    def pack_experts(self, router: Tensor, mlps: Sequence[Mlp], mixture: Mixture) -> Experts:
        """The shard's."""
        return self._shard.pack_experts(router, mlps, mixture)

    def prepare(self, inputs: StepInputs) -> StepTensors:
        """The shard's."""
        return self._shard.prepare(inputs)

    def choose(self, allowed: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """The shard's; asked of the first rank."""
        return self._shard.choose(allowed, rows)

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """The shard's."""
        return self._shard.norm(hidden, norm)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm, *, update_norm: Norm | None) -> Tensor:
        """The shard's."""
        return self._shard.add_norm(hidden, update, norm, update_norm=update_norm)

    def linear(self, inputs: Tensor, layer: Linear) -> Tensor:
        """The shard's."""
        return self._shard.linear(inputs, layer)

    def gated(self, inputs: Tensor, layer: Linear, activation: Activation) -> Tensor:
        """The shard's."""
        return self._shard.gated(inputs, layer, activation)

    def rotate_and_store(
        self,
        qkv: Tensor,
        step: StepTensors,
        cache: LayerCache,
        *,
        rope: Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> Tensor:
        """The shard's."""
        return self._shard.rotate_and_store(
            qkv, step, cache, rope=rope, query_norm=query_norm, key_norm=key_norm
        )

    def attend(self, query: Tensor, step: StepTensors, cache: LayerCache, *, window: int | None) -> Tensor:
        """The shard's."""
        return self._shard.attend(query, step, cache, window=window)
