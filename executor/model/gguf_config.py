"""What the metadata of a GGUF file say of a model's shape. Knows their words; reads no tensor.

Where the metadata are silent, llama.cpp (`src/llama-model.cpp`, which defines these words) is followed.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from executor.model.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    LayerKind,
    Mixture,
    ModelConfig,
    Rope,
    RopeScaling,
    stretched_length,
    yarn_attention_factor,
)
from executor.model.errors import ModelError
from executor.model.settings import Settings

_OLD_FACTOR = "rope.scale_linear"
"""The factor of linear scaling, as files of 2023 call it."""
_UNSERVED_SCALING = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)


_SOFTMAX = 1
"""Of `expert_gating_func`."""
_UNSERVED_ROUTING: Mapping[str, tuple[float, ...]] = {
    "expert_gating_func": (0, _SOFTMAX),
    "expert_weights_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_group_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "moe_latent_size": (0,),
    "router_logit_softcapping": (0,),
}
"""What would make another mixture of it, and the values that do not."""


@dataclass(frozen=True, slots=True)
class ExpertDefaults:
    """What an architecture's absent settings mean for its experts."""

    are_optional: bool = False
    """Whether there are models without them."""
    norm_topk_prob: bool = False
    shares_size: bool = False
    """Whether an expert has `feed_forward_length`, not a part of it for each that a token has."""
    has_shared: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a name under `general.architecture` stands for, and what its absent settings mean."""

    qk_norm: bool = False
    norms_heads_together: bool = False
    is_gemma: bool = False
    """Whether norms stand around attention and MLP, and embeddings are scaled; 1 is added to the norms."""
    has_neighbour_rows: bool = False
    """Whether the rows of query and key projections lie in llama.cpp's own order (`gguf_file`)."""
    full_every: int = 0
    """Where a window is set: full is the last of so many layers; 0 is none."""
    window: int | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    experts: ExpertDefaults | None = None
    num_layers_at_27b: int = 0
    """So many layers has the size whose attention scale comes from hidden_size / num_heads."""
    rope_theta: float = 10_000.0
    sliding_rope_theta: float | None = None
    """Where layers with a window have frequencies of their own, never scaled."""


ARCHITECTURES = {
    "llama": Architecture(
        has_neighbour_rows=True,
        experts=ExpertDefaults(are_optional=True, norm_topk_prob=True, shares_size=True),
    ),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen2moe": Architecture(experts=ExpertDefaults(has_shared=True)),
    "qwen3moe": Architecture(qk_norm=True, experts=ExpertDefaults(norm_topk_prob=True)),
    "olmoe": Architecture(qk_norm=True, norms_heads_together=True, experts=ExpertDefaults(shares_size=True)),
    "gemma2": Architecture(
        is_gemma=True,
        full_every=2,
        window=4096,
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        num_layers_at_27b=46,
    ),
    "gemma3": Architecture(
        is_gemma=True,
        qk_norm=True,
        full_every=6,
        num_layers_at_27b=62,
        rope_theta=1_000_000.0,
        sliding_rope_theta=10_000.0,
    ),
}


def architecture_of(metadata: Mapping[str, Any], source: str) -> Architecture:
    """The architecture that the metadata name. Raises `ModelError` for one that is not served."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{source}: architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


def config_from_metadata(
    metadata: Mapping[str, Any], tensor_names: Collection[str], vocab_size: int, source: str
) -> ModelConfig:
    """The model's shape from the file's metadata, and from which tensors it has. Raises `ModelError`."""
    architecture = architecture_of(metadata, source)
    said = Settings(metadata, source, prefix=f"{metadata['general.architecture']}.")
    hidden_size = said.integer("embedding_length")
    num_heads = said.integer("attention.head_count")
    head_dim = said.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if said.integer(name, default=head_dim) != head_dim:
            raise said.refused(name, f"the size of a query head, {head_dim}")
    mixture = _mixture(said, architecture.experts)
    if said.get("attention.clamp_kqv"):
        raise said.refused("attention.clamp_kqv", "none")
    layers = tuple(
        replace(kind, has_experts=mixture is not None) for kind in _layer_kinds(said, architecture)
    )
    is_27b = len(layers) == architecture.num_layers_at_27b
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=said.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=said.integer("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        max_seq_len=stretched_length(said.integer("context_length"), layers),
        layers=layers,
        rms_norm_eps=said.number("attention.layer_norm_rms_epsilon", default=1e-5),
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_scale=(hidden_size / num_heads if is_27b else head_dim) ** -0.5,
        activation="gelu_tanh" if architecture.is_gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        attention_out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=architecture.qk_norm,
        norms_heads_together=architecture.norms_heads_together,
        update_norms=architecture.is_gemma,
        embedding_scale=math.sqrt(hidden_size) if architecture.is_gemma else 1.0,
        attention_soft_cap=said.optional_number(
            "attn_logit_softcapping", absent=architecture.attention_soft_cap
        ),
        logits_soft_cap=said.optional_number("final_logit_softcapping", absent=architecture.logits_soft_cap),
        mixture=mixture,
    )


def _mixture(said: Settings, experts: ExpertDefaults | None) -> Mixture | None:
    if experts is None and said.get("expert_count"):
        raise said.refused("expert_count", "none, for this architecture has no experts")
    if experts is None or (experts.are_optional and not said.get("expert_count")):
        return None
    for name, harmless in _UNSERVED_ROUTING.items():
        if said.get(name) is not None and said.get(name) not in harmless:
            raise said.refused(name, " or ".join(map(str, harmless)))
    num_experts = said.integer("expert_count", at_most=MAX_EXPERTS)
    per_token = said.integer("expert_used_count", at_most=MAX_EXPERTS)
    size = said.integer("feed_forward_length")
    return Mixture(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=said.integer(
            "expert_feed_forward_length",
            default=size if experts.shares_size else max(1, size // per_token),
        ),
        norm_topk_prob=said.boolean("expert_weights_norm", default=experts.norm_topk_prob),
        shared_intermediate_size=(
            said.integer("expert_shared_feed_forward_length", default=size) if experts.has_shared else None
        ),
    )


def _layer_kinds(said: Settings, architecture: Architecture) -> tuple[LayerKind, ...]:
    num_layers = said.integer("block_count", at_most=MAX_LAYERS)
    scaling = rope_scaling(said)
    theta = said.number("rope.freq_base", default=architecture.rope_theta)
    full = LayerKind(Rope(theta, scaling))
    if architecture.full_every:
        window = said.integer("attention.sliding_window", default=architecture.window)
    elif said.get("attention.sliding_window") is not None:
        window = said.integer("attention.sliding_window")
    else:
        return (full,) * num_layers
    sliding_rope = full.rope
    if architecture.sliding_rope_theta is not None:
        sliding_rope = Rope(said.number("rope.freq_base_swa", default=architecture.sliding_rope_theta))
    sliding = LayerKind(sliding_rope, window)
    if not architecture.full_every:
        return (sliding,) * num_layers
    pattern = said.integer("attention.sliding_window_pattern", default=architecture.full_every)
    return tuple(sliding if (layer + 1) % pattern else full for layer in range(num_layers))


def rope_scaling(said: Settings) -> RopeScaling:
    """The scaling that the metadata name; `llama3` is not named there but stored as a tensor."""
    for name in _UNSERVED_SCALING:
        if said.get(name) is not None:
            raise said.refused(name, "none")
    factor_name = "rope.scaling.factor"
    if said.get(factor_name) is None and said.get(_OLD_FACTOR) is not None:
        factor_name = _OLD_FACTOR
    named = said.get("rope.scaling.type")
    kind = ("linear" if said.get(factor_name) else "none") if named is None else named
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=said.number(factor_name))
    if kind != "yarn":
        raise said.refused("rope.scaling.type", "none, linear, yarn")
    factor = said.number(factor_name)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position_embeddings=said.integer(
            "rope.scaling.original_context_length", default=said.integer("context_length")
        ),
        beta_fast=said.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=said.number("rope.scaling.yarn_beta_slow", default=1.0),
        attention_factor=yarn_attention_factor(factor),
    )
