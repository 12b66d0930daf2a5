"""A decoder's operations in plain torch, on any device: the fallback, and the reference for the others.

Its bits depend on the batch: the matrix products of torch choose their order of summation by the number of
rows. Rotation and norms are computed in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from executor import late_sampler, sampler
from executor.attention.base import AttentionBackend
from executor.inputs import StepInputs
from executor.kv_cache import KVCache, LayerCache
from executor.model.config import Mixture
from executor.operations.base import Activation, Experts, Linear, Matrix, Mlp, Norm, StepTensors
from executor.rows import SampleRow
from executor.staging import StepArrays, on_device


@dataclass(frozen=True, slots=True)
class PlainExperts(Experts):
    """A mixture as it was given."""

    mlps: tuple[Mlp, ...]


class PlainOperations:
    """`Operations` in plain torch around an attention back end."""

    row_invariant = False

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self._spec = attention.spec
        self.block_size = attention.spec.block_size
        self.name = f"torch, {attention.name} attention"

    def pack(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """As it is."""
        assert isinstance(weight, Tensor), "codes are our own kernels' alone"
        out_features, in_features = weight.shape
        return Linear(weight, bias, in_features, out_features)

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """As it is: gate rows, then up rows."""
        assert isinstance(weight, Tensor), "codes are our own kernels' alone"
        num_rows, in_features = weight.shape
        return Linear(weight, bias, in_features, num_rows // 2)

    def pack_experts(self, router: Tensor, mlps: Sequence[Mlp], mixture: Mixture) -> Experts:
        """As they are."""
        return PlainExperts(router, mixture, tuple(mlps))

    def prepare(self, inputs: StepInputs) -> StepTensors:
        """The step's arrays on the device."""
        return self.arrange(inputs, on_device(inputs, self._spec.device))

    def arrange(self, inputs: StepInputs, arrays: StepArrays) -> StepTensors:
        """The same, when the arrays are there already."""
        return StepTensors(
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            logits_indices=arrays.logits_indices,
            attention=self.attention.prepare(inputs, arrays),
        )

    def repeat(self, step: StepTensors, kv_cache: KVCache) -> Tensor | None:  # noqa: ARG002 - the interface's
        """Never: nothing is remembered."""
        return None

    def embed(self, step: StepTensors, table: Linear, scale: float) -> Tensor:
        """Rows of the table."""
        return table.weight[step.token_ids].float() * scale

    def logits(self, normed: Tensor, step: StepTensors, head: Linear, soft_cap: float | None) -> Tensor:
        """Logits of the sampling rows."""
        logits = _linear(normed[step.logits_indices], head).float()
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    def choose(self, allowed: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """In torch."""
        return sampler.choose(allowed, rows)

    def filter_rows(self, weights: Tensor, rows: Tensor, filters: Tensor) -> None:
        """`late_sampler.FilterRows`: by a sort."""
        late_sampler.filter_by_sorting(weights, rows, filters)

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """`hidden`, normed."""
        return _normed(hidden, norm).to(self._spec.dtype)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm, *, update_norm: Norm | None) -> Tensor:
        """Add in place, and norm the sum."""
        hidden += update if update_norm is None else _normed(update.float(), update_norm)
        return self.norm(hidden, norm)

    def linear(self, inputs: Tensor, layer: Linear) -> Tensor:
        """One matrix product."""
        return _linear(inputs, layer)

    def update(self, inputs: Tensor, layer: Linear) -> Tensor:
        """One matrix product."""
        return _linear(inputs, layer)

    def gated(self, inputs: Tensor, layer: Linear, activation: Activation) -> Tensor:
        """One matrix product for both halves."""
        gate, up = _linear(inputs, layer).chunk(2, dim=-1)
        if activation is Activation.SILU:
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def mixture(self, inputs: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """Expert by expert, each with the tokens that chose it."""
        assert isinstance(experts, PlainExperts)
        chosen, weights = routed(functional.linear(inputs.float(), experts.router), experts.mixture)
        total = torch.zeros(inputs.shape[0], experts.router.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            mlp = experts.mlps[expert]
            tokens, places = torch.where(chosen == expert)
            update = _linear(self.gated(inputs[tokens], mlp.gate_up, activation), mlp.down)
            total[tokens] += update.float() * weights[tokens, places, None]
        return total.to(self._spec.dtype)

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
        """Heads, norms, rotation, and the write into the cache."""
        spec = self._spec
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        cos, sin = rope[step.positions].unsqueeze(2).unbind(1)
        rotated = _rotated(key, key_norm, cos, sin).to(spec.dtype)
        self.attention.write_kv(cache, rotated, value, step.attention)
        return _rotated(query, query_norm, cos, sin).to(spec.dtype)

    def attend(self, query: Tensor, step: StepTensors, cache: LayerCache, *, window: int | None) -> Tensor:
        """By the back end."""
        return self.attention.forward(query, cache, step.attention, window=window).flatten(1)


def routed(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Experts `[T, chosen]` of each token, ascending, and their weights, by what the router gives.

    `logits` are float32 `[T, num_experts]`, and after them the shared expert's, which is always chosen.
    """
    probabilities = torch.softmax(logits[:, : mixture.num_experts], dim=-1)
    # Sorted, for `topk` takes any of equals.
    weights, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = (each[:, : mixture.num_experts_per_token] for each in (weights, chosen))
    if mixture.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    chosen, order = chosen.sort(dim=-1)
    weights = weights.gather(-1, order)
    if mixture.shared_intermediate_size is None:
        return chosen, weights
    shared = torch.full_like(chosen[:, :1], mixture.num_experts)
    gate = torch.sigmoid(logits[:, mixture.num_experts :])
    return torch.cat([chosen, shared], dim=-1), torch.cat([weights, gate], dim=-1)


def _linear(inputs: Tensor, layer: Linear) -> Tensor:
    return functional.linear(inputs, layer.weight, layer.bias)


def _normed(states: Tensor, norm: Norm) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _rotated(heads: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` `[T, H, head_dim]`, normed and rotated, in float32; `cos` and `sin` are `[T, 1, head_dim / 2]`.

    Halves are rotated, not neighbours: element i is paired with element i + head_dim / 2.
    """
    states = heads.float()
    if norm is not None:
        # Over as many numbers as it has weights: a head's, or those of all heads.
        states = _normed(states.view(len(states), -1, len(norm.weight)), norm).view(states.shape)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
