"""One forward pass of a Llama decoder over a mixed batch: T tokens of many sequences, laid end to end.

Nothing here knows where one sequence ends and the next begins: only the attention back end does. Source of
the arithmetic: Hugging Face transformers, `modeling_llama`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from executor.attention.base import AttentionBackend, AttentionMetadata
from executor.kv_cache import KVCache
from executor.model.config import ModelConfig
from executor.model.rope import rope_table, rotate
from executor.model.weights import LayerWeights, Linear, ModelWeights


class Llama:
    """A decoder: weights, rotary table, and the attention back end it was given."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, attention: AttentionBackend) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._rope_table = rope_table(config, weights.rope_divisors, weights.embeddings.device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states, float32 `[num_tokens, hidden_size]`, of `token_ids` at `positions`.

        Both are int64 `[num_tokens]`. Writes the keys and values of these tokens into `kv_cache`.
        """
        # The sum over layers is kept in float32: its rounding would otherwise add up with depth.
        hidden = self._weights.embeddings[token_ids].float()
        cos, sin = self._rope_table[positions].unsqueeze(2).unbind(1)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            attended = self._attend(index, layer, normed, cos, sin, kv_cache, metadata)
            hidden = hidden + _linear(attended, layer.attention_out)
            normed = self._norm(hidden, layer.mlp_norm)
            gate, up = _linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _linear(functional.silu(gate) * up, layer.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[num_rows, vocab_size]` of hidden states `[num_rows, hidden_size]`."""
        normed = self._norm(hidden, self._weights.final_norm)
        return functional.linear(normed, self._weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        config = self._config
        num_tokens = normed.shape[0]
        heads = _linear(normed, layer.qkv).view(num_tokens, -1, config.head_dim)
        query, key, value = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        cache = kv_cache.layer(index)
        self._attention.write_kv(cache, rotate(key, cos, sin), value, metadata)
        return self._attention.forward(rotate(query, cos, sin), cache, metadata).reshape(num_tokens, -1)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm of float32 `hidden`, in the type of `weight`."""
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (hidden * scale * weight).to(weight.dtype)


def _linear(inputs: Tensor, layer: Linear) -> Tensor:
    return functional.linear(inputs, layer.weight, layer.bias)
