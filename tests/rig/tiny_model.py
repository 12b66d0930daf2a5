"""The rig's model: a tiny Llama with fixed random weights and a byte tokenizer, as a Hugging Face folder.

One byte is one token (id = byte value), so lengths are easy to choose. Greedy output is varied and depends
on the whole context, so a wrong position, block or row shows in the ids. The ids from 256 up have zero rows
in an untied output head: greedy decoding does not meet an end token, sampling seldom does. Torch is not
needed to write the folder.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 272
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258, 259
SPECIAL_TOKENS = {"<|bos|>": BOS_ID, "<|eos|>": EOS_ID, "<|im_start|>": IM_START_ID, "<|im_end|>": IM_END_ID}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_seq_len: int = 8192,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    hidden_size: int = 64,
    **config_overrides: Any,
) -> Path:
    """Write the model into `folder` (made if need be) and return it.

    `dtype` is float32 or bfloat16 and names what the weights are stored as. `config_overrides` go into
    config.json as they are; those that shape tensors (intermediate_size, head_dim, tie_word_embeddings,
    attention_bias, mlp_bias, vocab_size) are followed by the weights.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": dtype,
    } | config_overrides
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    )
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", tokenizer_config(config["max_position_embeddings"]))
    write_safetensors(folder / "model.safetensors", weights(config, seed), dtype)
    return folder


def weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The float32 tensors `config` asks for, under their Hugging Face names.

    Projections have gain above one, so that attention and MLP outweigh the residual stream's memory of the
    last token: the next token is a function of the whole context.
    """
    rng = np.random.default_rng(seed)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32),
        "model.norm.weight": vector(hidden, 1.0),
    }
    if not config["tie_word_embeddings"]:
        head = matrix(vocab, hidden, 4.0)
        head[256:] = 0.0
        tensors["lm_head.weight"] = head
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = vector(hidden, 1.0)
        tensors[prefix + "post_attention_layernorm.weight"] = vector(hidden, 1.0)
        projections = {
            "self_attn.q_proj": (q_size, hidden, 1.5),
            "self_attn.k_proj": (kv_size, hidden, 1.5),
            "self_attn.v_proj": (kv_size, hidden, 2.0),
            "self_attn.o_proj": (hidden, q_size, 2.0),
            "mlp.gate_proj": (mlp, hidden, 1.5),
            "mlp.up_proj": (mlp, hidden, 1.5),
            "mlp.down_proj": (hidden, mlp, 1.5),
        }
        for name, (rows, columns, gain) in projections.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns, gain)
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                tensors[f"{prefix}{name}.bias"] = vector(rows, 0.0)
    return tensors


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Store float32 `tensors` as `dtype` (float32 or bfloat16).

    The format: header length (8 bytes, little-endian), JSON header, then the bytes of tensor after tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = []
    start = 0
    for name, tensor in tensors.items():
        blob = encoded(tensor, dtype)
        end = start + len(blob)
        stored_as = {"float32": "F32", "bfloat16": "BF16"}[dtype]
        header[name] = {"dtype": stored_as, "shape": list(tensor.shape), "data_offsets": [start, end]}
        blobs.append(blob)
        start = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blobs))


def encoded(tensor: np.ndarray, dtype: str) -> bytes:
    """The little-endian bytes of a float32 tensor stored as `dtype` (bfloat16: nearest, ties to even)."""
    if dtype == "float32":
        return tensor.astype("<f4").tobytes()
    bits = tensor.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte (GPT-2's bytes_to_unicode)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges. It adds no BOS."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, token_id in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: byte for byte, text in enumerate(byte_alphabet())} | SPECIAL_TOKENS,
            "merges": [],
        },
    }


def tokenizer_config(max_seq_len: int) -> dict[str, Any]:
    """tokenizer_config.json: names of the special tokens, and a ChatML template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
