"""What config.json of a Hugging Face folder says of a model's shape. Knows its words, and no tensor.

An architecture's name stands for much that config.json leaves unsaid: that is its `Family`. Everything else
is read, and a setting that would change the model and is not served is refused: a model that is nearly right
talks nonsense.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""As config.json calls them, and as `ModelConfig` does."""
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
_NOTHING = Settings({}, "config.json")
GEMMA_QUERY_SCALAR = 256
"""`query_pre_attn_scalar` when it is absent."""

# --- families -------------------------------------------------------------------------------------

LayerTypes = Callable[[Settings, int], list[str]]
"""The types of so many layers, where config.json has no `layer_types`."""


def _all_full(_: Settings, num_layers: int) -> list[str]:
    return [FULL] * num_layers


def _all_sliding(_: Settings, num_layers: int) -> list[str]:
    return [SLIDING] * num_layers


def _sliding_from_some_layer_on(raw: Settings, num_layers: int) -> list[str]:
    first = raw.integer("max_window_layers", default=28, at_least=0)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def _every_second_sliding_up_to_some_layer(raw: Settings, num_layers: int) -> list[str]:
    end = raw.integer("max_window_layers", default=28, at_least=0)
    return [SLIDING if layer % 2 == 0 and layer < end else FULL for layer in range(num_layers)]


def _every_second_full(_: Settings, num_layers: int) -> list[str]:
    return _every_nth_full(2, num_layers)


def _every_sixth_full(raw: Settings, num_layers: int) -> list[str]:
    return _every_nth_full(raw.integer("sliding_window_pattern", default=6), num_layers)


def _every_nth_full(pattern: int, num_layers: int) -> list[str]:
    """Gemma's layers: full is the last of each `pattern`."""
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class ExpertDefaults:
    """How a family speaks of its experts, and what its absent settings mean."""

    num_experts: int
    """`num_experts` or `num_local_experts` when both are absent."""
    num_experts_per_token: int
    """`num_experts_per_tok` when it is absent."""
    size_name: str = "moe_intermediate_size"
    """What the size of an expert is called."""
    size: int | None = None
    """That, when it is absent; None where it must be there."""
    always_normed: bool = False
    """Whether probabilities are divided by their sum without `norm_topk_prob` saying so."""
    dense_layers: bool = False
    """Whether `decoder_sparse_step` and `mlp_only_layers`, which leave layers without experts, are words."""
    shared_size: int | None = None
    """`shared_expert_intermediate_size` when it is absent; None where no expert is shared."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the name of an architecture stands for, and what its absent settings mean."""

    model_type: str
    """The same by another word, which transformers goes by."""
    max_seq_len: int
    """`max_position_embeddings` when it is absent."""
    layer_types: LayerTypes = _all_full
    window: int | None = None
    """`sliding_window` when it is absent; null is none. Not a word of families with full layers alone."""
    window_switch: str | None = None
    """The switch without which no layer has a window."""
    experts: ExpertDefaults | None = None
    always_qkv_bias: bool = False
    qkv_bias_switch: str | None = None
    """The switch that takes these biases away, if there is one."""
    attention_bias: bool = True
    """Whether `attention_bias` is a word of the family; it means all four projections."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is a word of the family."""
    qk_norm: bool = False
    norms_heads_together: bool = False
    clips_qkv: bool = False
    """Whether `clip_qkv` is a word of the family."""
    rms_norm_eps: float = 1e-6
    """That, when it is absent."""
    activation_name: str = "hidden_act"
    activation: str = "silu"
    tied: bool = False
    """`tie_word_embeddings` when it is absent."""
    is_gemma: bool = False
    """Whether norms stand around attention and MLP, stored as distances from 1, embeddings are scaled, and
    attention's scale and soft caps are settings."""
    attention_soft_cap: float | None = None
    """`attn_logit_softcapping` when it is absent; null is none. A family without one has no such cap."""
    logits_soft_cap: float | None = None
    """`final_logit_softcapping` when it is absent; null is none."""
    rope_theta: float = 10_000.0
    sliding_rope_theta: float | None = None
    """Where layers with a window have frequencies of their own, never scaled."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", max_seq_len=2048, mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral", max_seq_len=131_072, layer_types=_all_sliding, window=4096, attention_bias=False
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        max_seq_len=32_768,
        layer_types=_sliding_from_some_layer_on,
        window=4096,
        window_switch="use_sliding_window",
        always_qkv_bias=True,
        attention_bias=False,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        max_seq_len=32_768,
        layer_types=_sliding_from_some_layer_on,
        window=4096,
        window_switch="use_sliding_window",
        qk_norm=True,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        max_seq_len=131_072,
        layer_types=_all_sliding,
        attention_bias=False,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        experts=ExpertDefaults(8, 2, size_name="intermediate_size", always_normed=True),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        max_seq_len=32_768,
        layer_types=_every_second_sliding_up_to_some_layer,
        window=4096,
        window_switch="use_sliding_window",
        always_qkv_bias=True,
        qkv_bias_switch="qkv_bias",
        attention_bias=False,
        experts=ExpertDefaults(60, 4, size=1408, dense_layers=True, shared_size=5632),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        max_seq_len=32_768,
        layer_types=_all_sliding,
        window=4096,
        window_switch="use_sliding_window",
        qk_norm=True,
        experts=ExpertDefaults(128, 8, size=768, dense_layers=True),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        max_seq_len=4096,
        qk_norm=True,
        norms_heads_together=True,
        clips_qkv=True,
        rms_norm_eps=1e-5,
        experts=ExpertDefaults(64, 8, size_name="intermediate_size"),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        max_seq_len=8192,
        layer_types=_every_second_full,
        window=4096,
        activation_name="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        is_gemma=True,
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        max_seq_len=131_072,
        layer_types=_every_sixth_full,
        window=4096,
        qk_norm=True,
        activation_name="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        is_gemma=True,
        rope_theta=1_000_000.0,
        sliding_rope_theta=10_000.0,
    ),
}

# Models that see pictures too: the text part of each, and what is absent from its `text_config`.
TEXT_PARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    )
}

# --- the shape ------------------------------------------------------------------------------------


def from_config_json(values: Mapping[str, Any]) -> ModelConfig:
    """The shape that config.json describes. Raises `ModelError`."""
    raw = _text_part(Settings(values, "config.json"))
    family = _family(raw)
    _refuse_what_is_not_served(raw, family)
    hidden_size = raw.integer("hidden_size")
    num_heads = raw.integer("num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and head_dim is not given."
        )
    head_dim = raw.integer("head_dim", default=max(1, hidden_size // num_heads))
    layers = layer_kinds(raw, family)
    has_bias = family.attention_bias and raw.boolean("attention_bias")
    qkv_bias = family.always_qkv_bias
    if family.qkv_bias_switch is not None:
        qkv_bias = raw.boolean(family.qkv_bias_switch, default=True)
    query_scalar = float(head_dim)
    if family.is_gemma:
        query_scalar = raw.number("query_pre_attn_scalar", default=GEMMA_QUERY_SCALAR)

    def soft_cap(name: str, absent: float | None) -> float | None:
        return raw.optional_number(name, absent=absent) if family.is_gemma else None

    return ModelConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=raw.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        max_seq_len=stretched_length(_max_position_embeddings(raw, family), layers),
        layers=layers,
        rms_norm_eps=raw.number("rms_norm_eps", default=family.rms_norm_eps),
        tie_word_embeddings=raw.boolean("tie_word_embeddings", default=family.tied),
        attention_scale=query_scalar**-0.5,
        activation=ACTIVATIONS[raw.get(family.activation_name) or family.activation],
        qkv_bias=qkv_bias or has_bias,
        attention_out_bias=has_bias,
        mlp_bias=family.mlp_bias and raw.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        norms_heads_together=family.norms_heads_together,
        update_norms=family.is_gemma,
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=math.sqrt(hidden_size) if family.is_gemma else 1.0,
        attention_soft_cap=soft_cap("attn_logit_softcapping", family.attention_soft_cap),
        logits_soft_cap=soft_cap("final_logit_softcapping", family.logits_soft_cap),
        mixture=None if family.experts is None else _mixture(raw, family.experts),
    )


def _text_part(raw: Settings) -> Settings:
    """What is said of the text part, where a model has others; else all."""
    part = TEXT_PARTS.get(str(_architecture(raw)))
    if part is None:
        return raw
    text = raw.table("text_config")
    if not text.values:
        raise raw.wrong("text_config", "the shape of the model's text part")
    architecture, absent = part
    return Settings({**absent, **text.values, "architectures": [architecture]}, text.source)


def _architecture(raw: Settings) -> Any:
    architectures = raw.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else architectures


def _family(raw: Settings) -> Family:
    found = _architecture(raw)
    if not isinstance(found, str) or found not in FAMILIES:
        supported = ", ".join([*FAMILIES, *TEXT_PARTS])
        raise ModelError(f"config.json: architecture {found!r} is not supported; supported: {supported}.")
    return FAMILIES[found]


def _refuse_what_is_not_served(raw: Settings, family: Family) -> None:
    activation = raw.get(family.activation_name) or family.activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise raw.refused(family.activation_name, ", ".join(ACTIVATIONS))
    if raw.get("quantization_config") is not None:
        raise ModelError(
            "config.json: quantization_config is set, and quantised safetensors are not supported; "
            "use the unquantised folder or a GGUF file."
        )
    if raw.get("use_bidirectional_attention"):
        raise raw.refused("use_bidirectional_attention", "false")
    if not raw.boolean("is_causal", default=True):
        raise raw.refused("is_causal", "true")
    if raw.get("per_layer_config") is not None:
        raise raw.refused("per_layer_config", "none, for all layers are of one shape")
    if family.clips_qkv and raw.get("clip_qkv") is not None:
        raise raw.refused("clip_qkv", "null")
    # transformers knows this setting of Gemma 3, and does not follow it.
    if (
        family.is_gemma
        and family.attention_soft_cap is None
        and raw.get("attn_logit_softcapping") is not None
    ):
        raise raw.refused("attn_logit_softcapping", "null")
    _refuse_another_model_type(raw, family)
    _refuse_partial_rotation(raw)


def _refuse_another_model_type(raw: Settings, family: Family) -> None:
    """The two words for a model must not name two families: some go by the one, some by the other."""
    word = raw.get("model_type")
    if word != family.model_type and word in {other.model_type for other in FAMILIES.values()}:
        raise ModelError(
            f"{raw.source}: architecture {_architecture(raw)!r} and model_type {word!r} are two models; "
            f"of this architecture it is {family.model_type!r}."
        )


def _refuse_partial_rotation(raw: Settings) -> None:
    if raw.number("partial_rotary_factor", default=1.0) != 1.0:
        raise raw.refused("partial_rotary_factor", "1")


def _max_position_embeddings(raw: Settings, family: Family) -> int:
    return raw.integer("max_position_embeddings", default=family.max_seq_len)


# --- layers ---------------------------------------------------------------------------------------


def layer_kinds(raw: Settings, family: Family) -> tuple[LayerKind, ...]:
    """What each layer sees, and how it rotates."""
    num_layers = raw.integer("num_hidden_layers", at_most=MAX_LAYERS)
    types = raw.get("layer_types")
    if types is None:
        types = family.layer_types(raw, num_layers)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(each not in LAYER_TYPES for each in types)
    ):
        raise raw.wrong("layer_types", f"a list of {num_layers} of {', '.join(LAYER_TYPES)}")
    ropes = _ropes(raw, family)
    windows = {FULL: None, SLIDING: _window(raw, family)}
    with_experts = _layers_with_experts(raw, family.experts, num_layers)
    return tuple(
        LayerKind(ropes[each], windows[each], layer in with_experts) for layer, each in enumerate(types)
    )


def _layers_with_experts(raw: Settings, experts: ExpertDefaults | None, num_layers: int) -> Collection[int]:
    if experts is None:
        return ()
    if not experts.dense_layers:
        return range(num_layers)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < num_layers for each in dense
    ):
        raise raw.wrong("mlp_only_layers", f"a list of layers, 0 to {num_layers - 1}")
    step = raw.integer("decoder_sparse_step", default=1)
    return set(range(step - 1, num_layers, step)) - set(dense)


def _mixture(raw: Settings, experts: ExpertDefaults) -> Mixture:
    """What takes the MLP's place. `num_experts` and `num_local_experts` are one thing: versions differ."""
    counts = [
        raw.integer(name, at_most=MAX_EXPERTS)
        for name in ("num_experts", "num_local_experts")
        if raw.get(name) is not None
    ] or [experts.num_experts]
    if counts[0] != counts[-1]:
        raise ModelError(
            f"{raw.source} says num_experts {counts[0]} and num_local_experts {counts[-1]}; they must agree."
        )
    shared_size = None
    if experts.shared_size is not None:
        shared_size = raw.integer("shared_expert_intermediate_size", default=experts.shared_size)
    return Mixture(
        num_experts=counts[0],
        num_experts_per_token=raw.integer(
            "num_experts_per_tok", default=experts.num_experts_per_token, at_most=MAX_EXPERTS
        ),
        intermediate_size=raw.integer(experts.size_name, default=experts.size),
        norm_topk_prob=experts.always_normed or raw.boolean("norm_topk_prob"),
        shared_intermediate_size=shared_size,
    )


def _window(raw: Settings, family: Family) -> int | None:
    is_switched_off = family.window_switch is not None and not raw.boolean(family.window_switch)
    is_none = raw.get("sliding_window") is None and (family.window is None or "sliding_window" in raw.values)
    if family.layer_types is _all_full or is_switched_off or is_none:
        return None
    return raw.integer("sliding_window", default=family.window)


def _ropes(raw: Settings, family: Family) -> dict[str, Rope]:
    """The rotation of each type of layer.

    transformers 5 writes base and scaling into one entry, `rope_parameters`, or into one for each type of
    layer; before it, they stood in `rope_theta` and `rope_scaling`, and Gemma 3 had `rope_local_base_freq`.
    """
    entries = [raw.table(name) for name in ("rope_parameters", "rope_scaling") if raw.get(name)]
    said = [_ropes_of(entry, raw, family) for entry in entries] or [_ropes_of(_NOTHING, raw, family)]
    # One of them was written by transformers, the other by hand, and versions differ in which one counts.
    if said[0] != said[-1]:
        raise ModelError(
            f"{raw.source} has rope_parameters and rope_scaling, and they do not mean the same: keep one."
        )
    return said[0]


def _ropes_of(entry: Settings, raw: Settings, family: Family) -> dict[str, Rope]:
    theta = raw.number("rope_theta", default=family.rope_theta)
    sliding_theta = raw.number("rope_local_base_freq", default=family.sliding_rope_theta or theta)
    trained_length = _trained_length(entry, raw, family)
    if any(name in entry.values for name in LAYER_TYPES):
        return {
            FULL: rope(entry.table(FULL), theta, trained_length),
            SLIDING: rope(entry.table(SLIDING), sliding_theta, trained_length),
        }
    # transformers reads nothing of an entry for all layers here.
    if family.sliding_rope_theta is not None and raw.get("rope_parameters") is entry.values:
        raise raw.wrong("rope_parameters", f"an object with an entry for each of {', '.join(LAYER_TYPES)}")
    full = rope(entry, theta, trained_length)
    return {FULL: full, SLIDING: full if family.sliding_rope_theta is None else Rope(sliding_theta)}


def _trained_length(entry: Settings, raw: Settings, family: Family) -> int:
    """The context before it was stretched, for an entry that does not name it."""
    name = "original_max_position_embeddings"
    length = raw.integer(name, default=_max_position_embeddings(raw, family))
    if raw.get(name) is not None and entry.integer(name, default=length) != length:
        raise ModelError(
            f"{raw.source} says {name} {length} and {entry.get(name)} in {entry.source}; they must agree."
        )
    return length


def rope(entry: Settings, theta: float, trained_length: int) -> Rope:
    """The rotation that an entry describes; `theta` is its base where it names none."""
    _refuse_partial_rotation(entry)
    return Rope(entry.number("rope_theta", default=theta), rope_scaling(entry, trained_length))


def rope_scaling(entry: Settings, trained_length: int) -> RopeScaling:
    """The scaling that an entry describes; its kind stands under `rope_type` or, in old files, `type`."""
    spellings = [entry.get(name) for name in ("rope_type", "type") if entry.get(name) is not None]
    if len(spellings) == 2 and spellings[0] != spellings[1]:  # noqa: PLR2004 - there are two spellings
        raise ModelError(
            f"{entry.source} says rope_type {spellings[0]!r} and type {spellings[1]!r}; they must agree."
        )
    if not spellings and entry.get("factor") is not None:
        raise ModelError(f"{entry.source} has a factor but no rope_type to say what it scales.")
    kind = spellings[0] if spellings else "default"
    match kind:
        case "default":
            return RopeScaling()
        case "linear" | "dynamic":
            return RopeScaling(kind, factor=entry.number("factor"))
        case "llama3":
            return _llama3(entry, trained_length)
        case "yarn":
            return _yarn(entry, trained_length)
        case _:
            raise ModelError(
                f"{entry.source} kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}."
            )


def _llama3(entry: Settings, trained_length: int) -> RopeScaling:
    low, high = entry.number("low_freq_factor"), entry.number("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"{entry.source} has low_freq_factor {low} and high_freq_factor {high}; the first must be less."
        )
    return RopeScaling(
        "llama3",
        factor=entry.number("factor"),
        original_max_position_embeddings=entry.integer(
            "original_max_position_embeddings", default=trained_length
        ),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(entry: Settings, trained_length: int) -> RopeScaling:
    original = entry.integer("original_max_position_embeddings", default=trained_length)
    factor = entry.number("factor")
    fast, slow = entry.number("beta_fast", default=32.0), entry.number("beta_slow", default=1.0)
    if slow >= fast:
        raise ModelError(f"{entry.source} has beta_slow {slow} and beta_fast {fast}; the first must be less.")
    if "truncate" in entry.values and entry.get("truncate") is None:
        raise entry.wrong("truncate", "true or false")
    above, below = entry.optional_number("mscale"), entry.optional_number("mscale_all_dim")
    sharpened = (
        yarn_attention_factor(factor)
        if above is None or below is None
        else yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)
    )
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        rounds_ramp=entry.boolean("truncate", default=True),
        attention_factor=entry.number("attention_factor", default=sharpened),
    )
