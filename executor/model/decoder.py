"""One forward pass of a decoder over a mixed batch: T tokens of many sequences, laid end to end.

Nothing here knows where one sequence ends and the next begins: only attention does. Nothing here knows how
anything is computed either: `executor.operations` does. Source of the arithmetic: Hugging Face transformers,
`modeling_llama`.
"""

from torch import Tensor

from executor.inputs import StepInputs
from executor.kv_cache import KVCache
from executor.model.config import ModelConfig
from executor.model.rope import rope_table
from executor.model.weights import ModelWeights
from executor.operations.base import Activation, Operations


class Decoder:
    """Weights, rotary table, and the operations that packed the weights."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, operations: Operations) -> None:
        self._weights = weights
        self._operations = operations
        self._rope_table = rope_table(config, weights.rope_divisors, weights.final_norm.weight.device)

    def logits(self, inputs: StepInputs, kv_cache: KVCache) -> Tensor:
        """Float32 logits `[num_sampling_rows, vocab_size]` of one step.

        Writes the keys and values of the step's tokens into `kv_cache`.
        """
        operations, weights = self._operations, self._weights
        step = operations.prepare(inputs)
        # Each layer is followed by the norm that the next one, or the output head, reads.
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        hidden = operations.embed(step, weights.embeddings, 1.0)
        normed = operations.norm(hidden, norms[0])
        for index, layer in enumerate(weights.layers):
            cache = kv_cache.layer(index)
            query = operations.rotate_and_store(
                operations.linear(normed, layer.qkv),
                step,
                cache,
                rope=self._rope_table,
                query_norm=None,
                key_norm=None,
            )
            attended = operations.attend(query, step, cache, window=None)
            update = operations.linear(attended, layer.attention_out)
            normed = operations.add_norm(hidden, update, layer.mlp_norm, update_norm=None)
            update = operations.linear(operations.gated(normed, layer.gate_up, Activation.SILU), layer.down)
            normed = operations.add_norm(hidden, update, norms[index + 1], update_norm=None)
        return operations.logits(normed, step, weights.head, None)
