"""The shape of a decoder, checked once: all in which the families differ is a field here.

Knows no file and no tensor: `config_json` and `gguf_config` make it from what files say.
"""

import math
from dataclasses import dataclass

from executor.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled. Fields that the kind does not use hold neutral values.

    The kinds are those of the reference implementation (Hugging Face transformers, `modeling_rope_utils`):

    - `default`: nothing is scaled.
    - `linear`: frequencies are divided by `factor`.
    - `dynamic`: changes frequencies only beyond the length that the model was made for, and then with the
      length of the sequence, so that keys in the cache would have to be rotated anew. Sequences end at that
      length, and up to there it equals `default`.
    - `llama3`: low frequencies are divided by `factor`, high ones kept, with a ramp between.
    - `yarn` (arXiv 2309.00071): the same with another ramp, and cosines and sines times `attention_factor`.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    """turns within the original context above which a frequency is kept"""
    beta_slow: float = 1.0
    """turns within the original context below which a frequency is divided by `factor`"""
    rounds_ramp: bool = True
    """whether the ramp's ends are rounded outwards to whole dimensions"""
    attention_factor: float = 1.0


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens attention when positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the base of the frequencies, and how they are scaled."""

    theta: float
    scaling: RopeScaling = RopeScaling()

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ModelError(f"rope_theta is {self.theta}: rotary frequencies need a base above 1.")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """In what a layer differs from another one of the same model."""

    rope: Rope
    window: int | None = None
    """How many tokens a token sees, itself included; None is all that came before."""
    has_experts: bool = False
    """Whether the model's mixture of experts stands where others have an MLP."""


MAX_LAYERS = 1024
"""Several times what the deepest models have. More is a damaged number, and is refused before any is made."""
MAX_EXPERTS = 1024
"""Of a layer: twice what models have."""
MAX_ALL_EXPERTS = 1 << 16
"""Of all layers: twice what models have. Each is a few tensors to be looked for."""
MAX_POSITIONS = 1 << 22
"""Of one sequence: the longest context that models here are made for. Each position has a row in the rotary
tables, so that a damaged number would take all memory."""


def stretched_length(length: int, layers: tuple[LayerKind, ...]) -> int:
    """The longest sequence of a model made for `length` tokens: YaRN stretches it, in some layers or in all.

    Those who turn it on, as the model cards of Qwen say, leave `max_position_embeddings` as it was. Layers
    with `dynamic` scaling hold the others back.
    """
    scalings = {kind.rope.scaling for kind in layers}
    if any(each.kind == "dynamic" for each in scalings):
        return length
    stretched = (each for each in scalings if each.kind == "yarn")
    return max(
        [
            length,
            # A factor may be anything, and too much is refused by whoever knows the limit.
            *(int(min(each.original_max_position_embeddings * each.factor, 2**62)) for each in stretched),
        ]
    )


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in the place of an MLP: small ones, of which a router chooses a few for each token.

    What the router gives goes through a softmax over all experts. The likeliest are chosen, and what they
    give is added up, each weighed by its probability.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """Whether the probabilities of those that were chosen are divided by their sum."""
    shared_intermediate_size: int | None = None
    """Of one more expert, which every token has, weighed by a sigmoid of its own; None is none."""

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            raise ModelError(
                f"{self.num_experts_per_token} experts for each token cannot be chosen of {self.num_experts}."
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    layers: tuple[LayerKind, ...]
    """One for each layer."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The embeddings are the output head."""
    attention_scale: float
    """What the products of queries and keys are multiplied with."""
    activation: str = "silu"
    """Of the MLP's gate; a value of `executor.operations.base.Activation`."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each query and key head is normed before it is rotated."""
    norms_heads_together: bool = False
    """Such a norm is over all heads of a token, not over each by itself."""
    update_norms: bool = False
    """What attention and MLP give is normed before it is added to the hidden states."""
    norm_offset: float = 0.0
    """What is added to the weights of all norms: 1 where they are stored as their distance from 1."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    """c, where attention scores become `c * tanh(scores / c)`."""
    logits_soft_cap: float | None = None
    mixture: Mixture | None = None
    """Of the layers that have experts."""

    def __post_init__(self) -> None:
        if self.max_seq_len > MAX_POSITIONS:
            raise ModelError(
                f"the longest sequence is {self.max_seq_len} tokens by the model's files; at most "
                f"{MAX_POSITIONS} are supported."
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be shared out over {self.num_kv_heads} key-value "
                "heads: the first number must be a multiple of the second."
            )
        num_experts = 0 if self.mixture is None else self.mixture.num_experts
        num_experts *= sum(kind.has_experts for kind in self.layers)
        if num_experts > MAX_ALL_EXPERTS:
            raise ModelError(
                f"the model's layers have {num_experts} experts by its files; at most {MAX_ALL_EXPERTS} are "
                "supported."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary positions need an even number.")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)
