"""Writes a Hugging Face folder as a GGUF file, as llama.cpp's converter does."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.rig import tiny_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def neighbours_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which llama.cpp stores query and key rows of `llama` (its converter's `permute`)."""
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stored_rows(architecture: str, name: str, rows: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """What the file holds for the tensor `name`."""
    if architecture == "llama" and "q_proj" in name:
        return neighbours_from_halves(rows, config["num_attention_heads"])
    if architecture == "llama" and "k_proj" in name:
        return neighbours_from_halves(rows, config["num_key_value_heads"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return rows + np.float32(1.0)
    return rows


def alone(name: str) -> str | None:
    """What an expert's matrix was called before those of a layer were one tensor; None for all others."""
    match name.split("."):
        case ["model", "layers", layer, _, "experts", expert, part, kind]:
            named = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}[part]
            return f"blk.{layer}.{named}.{expert}.{kind}"
        case _:
            return None


def with_stacks(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of a layer as one tensor for each kind of their matrices."""
    stacked: dict[str, np.ndarray] = {}
    for name, rows in tensors.items():
        match name.split("."):
            case [*before, "experts", "0", part, kind]:
                num_experts = sum(each.startswith(".".join([*before, "experts"])) for each in tensors) // 3
                parts = [
                    tensors[".".join([*before, "experts", str(n), part, kind])] for n in range(num_experts)
                ]
                named = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
                stacked[".".join([*before[:3], "mlp", "experts", named, kind])] = np.stack(parts)
            case [*_, "experts", _, _, _]:
                pass
            case _:
                stacked[name] = rows
    return stacked


def write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What is said of a mixture, as far as `config` has one."""
    if num_experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    architecture: str = "llama",
    rope_divisors: list[float] | None = None,
    scales: dict[str, float] | None = None,
    stored_as: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    token_texts: list[str] | None = None,
    num_files: int = 1,
    stacks: bool = True,
    vectors: Collection[str] = (),
    **more: Any,
) -> Path:
    """The folder as a file, its matrices `stored_as` that type.

    `token_texts` are another vocabulary, whose end of a turn is not named; the file says it is one of
    `num_files`. `scales` are tensors of one number. Without `stacks`, experts stand alone, as in files of
    2023; `vectors` are matrices of one row that lose it. `more` are further settings of the architecture,
    `__` standing for a dot.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    write_experts(writer, config)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        bool: writer.add_bool,
    }
    for name, value in more.items():
        add[type(value)](f"{architecture}.{name.replace('__', '.')}", value)
    if (folder / "tokenizer.json").exists():
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(token_texts or [*tiny_model.byte_alphabet(), *tiny_model.SPECIAL_TOKENS])
        writer.add_eos_token_id(tiny_model.EOS_ID)
        if token_texts is None:
            writer.add_eot_token_id(tiny_model.IM_END_ID)
    if num_files > 1:
        writer.add_uint16("split.count", num_files)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    tensors = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in (with_stacks(tensors) if stacks else tensors).items():
        rows = stored_rows(architecture, name, tensor, config)
        rows = np.ascontiguousarray(rows[0] if name.split(".")[-2] in vectors else rows)
        kind = stored_as if rows.ndim > 1 and ".gate." not in name else gguf.GGMLQuantizationType.F32
        name_there = alone(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name_there, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
    for name, scale in (scales or {}).items():
        writer.add_tensor(name, np.array([scale], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
