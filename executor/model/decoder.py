"""One forward pass of a decoder over a mixed batch: T tokens of many sequences, laid end to end.

All families are this one loop: in what they differ is in the configuration, and in which norms the weights
have. Nothing here knows where one sequence ends and the next begins: only attention does. Nothing here knows
how anything is computed either: `executor.operations` does. Source of the arithmetic: Hugging Face
transformers, `modeling_llama`, `modeling_qwen3`, `modeling_gemma3` and `modeling_qwen2_moe`.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import KVCache
from executor.model.config import ModelConfig
from executor.model.rope import rope_table
from executor.model.weights import ModelWeights
from executor.operations.base import Activation, Experts, Mlp, Operations, StepTensors


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the layers made of one step's tokens, before the output head; good until the next forward pass."""

    normed: Tensor
    """`[T, hidden_size]`, in the computation's type"""
    step: StepTensors


class Decoder:
    """Weights, rotary tables, and the operations that packed the weights."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations) -> None:
        self._config = config
        self._weights = weights
        self._operations = operations
        self._activation = Activation(config.activation)
        device = weights.final_norm.weight.device
        self._rope_tables = {
            rope: rope_table(rope, config.head_dim, config.max_seq_len, weights.rope_divisors, device)
            for rope in {kind.rope for kind in config.layers}
        }

    def logits(self, inputs: StepInputs, kv_cache: KVCache) -> Tensor:
        """Float32 logits `[num_sampling_rows, vocab_size]` of one step.

        Writes the keys and values of the step's tokens into `kv_cache`.
        """
        return self.head(self.forward(inputs, kv_cache))

    def forward(self, inputs: StepInputs, kv_cache: KVCache) -> Hidden:
        """Everything but the output head."""
        step = self._operations.prepare(inputs)
        normed = self._operations.repeat(step, kv_cache)
        return self.layers(step, kv_cache) if normed is None else Hidden(normed, step)

    def layers(self, step: StepTensors, kv_cache: KVCache) -> Hidden:
        """The same, of a step that is on the device, operation by operation."""
        config, operations, weights = self._config, self._operations, self._weights
        # Each layer is followed by the norm that the next one, or the output head, reads.
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        hidden = operations.embed(step, weights.embeddings, config.embedding_scale)
        normed = operations.norm(hidden, norms[0])
        for index, (kind, layer) in enumerate(zip(config.layers, weights.layers, strict=True)):
            cache = kv_cache.layer(index)
            query = operations.rotate_and_store(
                operations.linear(normed, layer.qkv),
                step,
                cache,
                rope=self._rope_tables[kind.rope],
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
            )
            attended = operations.attend(query, step, cache, window=kind.window)
            update = operations.update(attended, layer.attention_out)
            normed = operations.add_norm(
                hidden, update, layer.mlp_norm, update_norm=layer.attention_update_norm
            )
            update = self._mlp(normed, layer.mlp)
            normed = operations.add_norm(hidden, update, norms[index + 1], update_norm=layer.mlp_update_norm)
        return Hidden(normed, step)

    def _mlp(self, normed: Tensor, mlp: Mlp | Experts) -> Tensor:
        operations = self._operations
        if isinstance(mlp, Experts):
            return operations.mixture(normed, mlp, self._activation)
        return operations.update(operations.gated(normed, mlp.gate_up, self._activation), mlp.down)

    def head(self, hidden: Hidden, indices: Tensor | None = None) -> Tensor:
        """Float32 logits of the sampling rows, or of the tokens at `indices` (int64) into T.

        The next call overwrites them.
        """
        step = hidden.step if indices is None else replace(hidden.step, logits_indices=indices)
        return self._operations.logits(hidden.normed, step, self._weights.head, self._config.logits_soft_cap)
