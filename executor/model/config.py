"""The shape of a Llama model, checked once. Knows config.json's words; knows no file and no tensor.

Rotary positions, as in the reference implementation (Hugging Face transformers, `modeling_rope_utils`):

- `default`: nothing is scaled.
- `linear`: frequencies are divided by `factor`.
- `dynamic`: changes frequencies only beyond `max_position_embeddings`, and then with the length of the
  sequence, so that keys in the cache would have to be rotated anew. Sequences end at that length, and up to
  there it equals `default`.
- `llama3`: low frequencies are divided by `factor`, high ones kept, with a ramp between.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.model.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled. Fields that the kind does not use hold neutral values."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a Llama decoder. `tie_word_embeddings`: the embeddings are the output head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be shared out over {self.num_kv_heads} key-value "
                "heads: the first number must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}: rotary positions need an even number.")


def from_config_json(raw: Mapping[str, Any]) -> ModelConfig:
    """The shape that config.json of a Hugging Face folder describes. Raises `ModelError`."""
    _refuse_what_is_not_served(raw)
    hidden_size = integer(raw, "hidden_size")
    num_heads = integer(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and head_dim is not given."
        )
    max_seq_len = integer(raw, "max_position_embeddings", default=2048)
    # transformers 5 writes rope_theta and the scaling into one entry, rope_parameters.
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = raw.get(name)
    if rope is None:
        rope = {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"config.json: {name} is {rope!r}; it must be an object or null.")
    return ModelConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", default=num_heads),
        head_dim=integer(raw, "head_dim", default=max(1, hidden_size // num_heads)),
        max_seq_len=max_seq_len,
        rms_norm_eps=number(raw, "rms_norm_eps", default=1e-6),
        rope_theta=number(rope if "rope_theta" in rope else raw, "rope_theta", default=10_000.0),
        rope_scaling=rope_scaling(rope, max_seq_len),
        tie_word_embeddings=boolean(raw, "tie_word_embeddings"),
        attention_bias=boolean(raw, "attention_bias"),
        mlp_bias=boolean(raw, "mlp_bias"),
    )


def rope_scaling(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling:
    """The scaling that config.json describes; its kind stands under `rope_type` or, in old files, `type`."""
    spellings = [raw[name] for name in ("rope_type", "type") if raw.get(name) is not None]
    if len(spellings) == 2 and spellings[0] != spellings[1]:  # noqa: PLR2004 - there are two spellings
        raise ModelError(
            f"config.json: rope_scaling says rope_type {spellings[0]!r} and type {spellings[1]!r}; "
            "they must agree."
        )
    if not spellings and raw.get("factor") is not None:
        raise ModelError("config.json: rope_scaling has a factor but no rope_type to say what it scales.")
    kind = spellings[0] if spellings else "default"
    match kind:
        case "default":
            return RopeScaling()
        case "linear" | "dynamic":
            return RopeScaling(kind, factor=number(raw, "factor"))
        case "llama3":
            low, high = number(raw, "low_freq_factor"), number(raw, "high_freq_factor")
            if low >= high:
                raise ModelError(
                    f"config.json: rope_scaling has low_freq_factor {low} and high_freq_factor {high}; "
                    "the first must be less."
                )
            return RopeScaling(
                kind,
                factor=number(raw, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=integer(
                    raw, "original_max_position_embeddings", default=max_position_embeddings
                ),
            )
        case _:
            raise ModelError(
                f"config.json: rope_scaling kind {kind!r} is not supported; supported: "
                f"{', '.join(SUPPORTED_ROPE_KINDS)}."
            )


def _refuse_what_is_not_served(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if found not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"config.json: architecture {found!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported; supported: silu.")
    if raw.get("quantization_config") is not None:
        raise ModelError(
            "config.json: quantization_config is set, and quantised safetensors are not supported; "
            "use the unquantised folder or a GGUF file."
        )
    rotated_share = raw.get("partial_rotary_factor", 1.0)
    if rotated_share != 1.0:
        raise ModelError(
            f"config.json: partial_rotary_factor {rotated_share!r} is not supported; supported: 1."
        )


def integer(
    raw: Mapping[str, Any], name: str, *, default: int | None = None, source: str = "config.json"
) -> int:
    """The whole number >= 1 under `name`; `default` (None: required) when it is absent or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{source}: {name} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{source}: {name} is {value!r}; it must be a whole number of at least 1.")
    return value


def number(
    raw: Mapping[str, Any], name: str, *, default: float | None = None, source: str = "config.json"
) -> float:
    """The finite number > 0 under `name`; `default` (None: required) when it is absent or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{source}: {name} is missing.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{source}: {name} is {value!r}; it must be a finite number above 0.")
    return float(value)


def boolean(raw: Mapping[str, Any], name: str) -> bool:
    """The switch under `name`; absent or null is false."""
    value = raw.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} is {value!r}; it must be true or false.")
    return value
