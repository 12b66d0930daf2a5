"""The interface to a decoder's arithmetic: few operations, each large enough to be one kernel.

A decoder is written once, in these operations; only an implementation knows how they are computed and how the
weights are stored. All tensors are on the device. *The computation's type* is the number type the model
runs in; hidden states between the layers are float32, because their rounding would add up with depth.

A tensor that an operation returns may be overwritten by the next call of the same operation: a decoder uses
each result before it asks for the next of its kind. An operation writes to a tensor only where it says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import KVCache, LayerCache
from executor.model.config import Mixture
from executor.model.quantized import QuantizedMatrix
from executor.rows import SampleRow


class Activation(Enum):
    """What the gate of an MLP goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU in its tanh approximation."""


Matrix = Tensor | QuantizedMatrix
"""A weight `[out, in]`: numbers of the computation's type, or codes, which our own kernels alone take."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm: `x / sqrt(mean(x²) + eps) * weight`. Families that add 1 have added it here."""

    weight: Tensor
    """float32 `[size]`"""
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection as the operations packed it: only they know what `weight` looks like."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    """Columns of the result; of a gated projection, half of the columns that are computed."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP: `down(gated(inputs))`."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts as the operations packed it; each kind of them adds the MLPs in its own form."""

    router: Tensor
    """Float32, in the operations' own form: a row for each expert, and one for the gate of a shared one."""
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step's batch on the device: T tokens, S of which sample."""

    token_ids: Tensor
    """int64 `[T]`"""
    positions: Tensor
    """int64 `[T]`"""
    logits_indices: Tensor
    """int64 `[S]`, which of the T tokens sample"""
    attention: Any
    """what attention reads; made and read behind the door"""


class Operations(Protocol):
    """A decoder's arithmetic on one device, in one number type, over one paged cache."""

    name: str
    """For people, and for what the bits depend on."""
    block_size: int
    """Tokens in a block of the cache."""
    row_invariant: bool
    """Whether a token's results have the same bits whatever else is in the batch and however it was cut."""

    # --- once per model -----------------------------------------------------------------------------

    def pack(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """A projection from its weight `[out, in]` and bias `[out]`, which are the packer's from now on."""

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """An MLP's first projection, for `gated`: gate rows, then as many up rows."""

    def pack_experts(self, router: Tensor, mlps: Sequence[Mlp], mixture: Mixture) -> Experts:
        """A mixture of packed MLPs: those that are routed to, then the shared one, if there is one.

        `router` is float32 `[num_experts, hidden_size]`, with a row more for the shared expert's gate.
        """

    # --- once per step ------------------------------------------------------------------------------

    def prepare(self, inputs: StepInputs) -> StepTensors:
        """The step's arrays on the device, in the form that all layers read."""

    def repeat(self, step: StepTensors, kv_cache: KVCache) -> Tensor | None:
        """What the last norm leaves for the output head, where the step can be computed as one before it was.

        None: it has to be asked for operation by operation, from `embed` on.
        """

    def embed(self, step: StepTensors, table: Linear, scale: float) -> Tensor:
        """Hidden states, float32 `[T, hidden_size]`: the tokens' rows of `table`, times `scale`.

        `table` is packed like any projection, so that tied embeddings and output head are one tensor.
        """

    def logits(self, normed: Tensor, step: StepTensors, head: Linear, soft_cap: float | None) -> Tensor:
        """Float32 logits `[S, vocab_size]` of the sampling rows of `normed` `[T, hidden_size]`.

        `step.logits_indices` ascend, each token once. With a soft cap c they are `c * tanh(logits / c)`.
        """

    def choose(self, allowed: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """A token for each row of `allowed` logits: see `executor.sampler.Choose`."""

    # --- once or more per layer ---------------------------------------------------------------------

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """`hidden` (float32 `[T, hidden_size]`), normed, in the computation's type."""

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm, *, update_norm: Norm | None) -> Tensor:
        """Add `update` to `hidden` in place; return the sum, normed, in the computation's type.

        With `update_norm`, the update is normed before it is added.
        """

    def linear(self, inputs: Tensor, layer: Linear) -> Tensor:
        """`inputs @ weight.T + bias`, `[T, out]`."""

    def update(self, inputs: Tensor, layer: Linear) -> Tensor:
        """What attention or the MLP adds to the hidden states: the product with all of their `inputs`.

        `linear`, but where the model is shared out: each rank has some of the inputs, and gets the sum.
        """

    def gated(self, inputs: Tensor, layer: Linear, activation: Activation) -> Tensor:
        """`activation(inputs @ gate.T) * (inputs @ up.T)`, `[T, out]`, both with their bias."""

    def mixture(self, inputs: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """What a mixture of experts adds to the hidden states, `[T, hidden_size]`: an `update`.

        The softmax of `inputs @ router.T` is made in float32, and a token's likeliest experts are chosen, of
        equals the first. Their MLPs, each times its weight, are added in float32 in the order of the experts.
        """

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
        """Split `qkv` into heads, write keys and values into the cache, return the queries.

        `qkv` is `[T, (num_heads + 2 * num_kv_heads) * head_dim]`: query heads, key heads, value heads. Query
        and key heads are normed where there are norms, one by one (weights `[head_dim]`) or all of a token's
        together (weights `[num_heads * head_dim]`), then rotated by their positions: `rope` is float32
        `[max_seq_len, 2, head_dim / 2]`, cosines and sines. The queries are `[T, num_heads, head_dim]`.
        """

    def attend(self, query: Tensor, step: StepTensors, cache: LayerCache, *, window: int | None) -> Tensor:
        """Attend to the cached contexts: `[T, num_heads * head_dim]`.

        With a `window`, a token sees itself and the `window - 1` tokens before it.
        """
