"""Opens a GGUF file of the Llama architecture. Quantised tensors are dequantised when they are read.

Two things differ from a Hugging Face folder beside the names. The file lists sizes fastest dimension first.
And the rows of the query and key projections are reordered, because llama.cpp rotates neighbouring elements
and Hugging Face rotates halves: within a head, file row 2i + h is row i + h * head_dim / 2 here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from executor.model.checkpoint import Checkpoint, StoredTensor, checked_eos_ids
from executor.model.config import ModelConfig, RopeScaling, integer, number
from executor.model.errors import ModelError
from executor.model.json_files import eos_token_ids

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class _Reader(gguf.GGUFReader):
    """The package's reader on a plain view of the mapped file; slicing a `memmap` is most of its time."""

    @property  # type: ignore[override]  # a plain array does for all that it reads
    def data(self) -> np.ndarray:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = np.asarray(mapped)


def open_gguf(path: Path, generation_config: Path | None = None) -> Checkpoint:
    """Open the file `path`. Raises `ModelError`.

    `generation_config` is the JSON file beside it, if it lies in a folder: its end tokens count as well.
    """
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader indexes into the mapped file as it goes: a short or foreign file shows as any of these.
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}): it is incomplete or damaged.") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = config_from_metadata(metadata, stored, path)
    eos_ids = {int(metadata[key]) for key in _EOS_KEYS if key in metadata}
    if generation_config is not None:
        eos_ids |= eos_token_ids(generation_config)
    return Checkpoint(
        path=path,
        config=config,
        eos_token_ids=checked_eos_ids(eos_ids, config.vocab_size, path),
        token_texts=tuple(metadata.get("tokenizer.ggml.tokens", ())),
        tensors={
            hugging_face_name(name): stored_tensor(tensor, config, path) for name, tensor in stored.items()
        },
    )


def config_from_metadata(metadata: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model's shape from the file's metadata, and from which tensors it has."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path}: architecture {architecture!r} is not supported; supported: llama.")
    if metadata.get("llama.expert_count", 0):
        raise ModelError(f"{path}: llama.expert_count is set, and mixtures of experts are not supported.")
    source = str(path)
    hidden_size = integer(metadata, "llama.embedding_length", source=source)
    num_heads = integer(metadata, "llama.attention.head_count", source=source)
    head_dim = integer(
        metadata, "llama.attention.key_length", default=hidden_size // num_heads, source=source
    )
    rotated = integer(metadata, "llama.rope.dimension_count", default=head_dim, source=source)
    if rotated != head_dim:
        raise ModelError(
            f"{path}: llama.rope.dimension_count is {rotated}; supported: the head size, {head_dim}."
        )
    embeddings = stored.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing.")
    return ModelConfig(
        vocab_size=int(embeddings.shape[-1]),
        hidden_size=hidden_size,
        intermediate_size=integer(metadata, "llama.feed_forward_length", source=source),
        num_layers=integer(metadata, "llama.block_count", source=source),
        num_heads=num_heads,
        num_kv_heads=integer(metadata, "llama.attention.head_count_kv", default=num_heads, source=source),
        head_dim=head_dim,
        max_seq_len=integer(metadata, "llama.context_length", source=source),
        rms_norm_eps=number(metadata, "llama.attention.layer_norm_rms_epsilon", default=1e-5, source=source),
        rope_theta=number(metadata, "llama.rope.freq_base", default=10_000.0, source=source),
        rope_scaling=rope_scaling(metadata, path),
        tie_word_embeddings="output.weight" not in stored,
        attention_bias="blk.0.attn_q.bias" in stored,
        mlp_bias="blk.0.ffn_gate.bias" in stored,
    )


def rope_scaling(metadata: Mapping[str, Any], path: Path) -> RopeScaling:
    """The scaling that the metadata names; `llama3` is not named there but stored as a tensor."""
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=number(metadata, "llama.rope.scaling.factor", source=str(path)))
    raise ModelError(f"{path}: llama.rope.scaling.type {kind!r} is not supported; supported: none, linear.")


def hugging_face_name(name: str) -> str:
    """The checkpoint's name for a tensor of the file; a name that is not known stays as it is."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case _:
            return _TOP_LEVEL_NAMES.get(name, name)


def stored_tensor(tensor: gguf.ReaderTensor, config: ModelConfig, path: Path) -> StoredTensor:
    """A tensor of the file in Hugging Face's layout."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return StoredTensor(shape, tensor.tensor_type.name, reader_of(tensor, shape, config, path))


def reader_of(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], config: ModelConfig, path: Path
) -> Callable[[], Tensor]:
    """How to read `tensor`: dequantised, and with its rows in Hugging Face's order."""
    num_heads = next(
        (
            count
            for part, count in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads))
            if part in tensor.name.split(".")
        ),
        None,
    )

    def read() -> Tensor:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{path}: tensor {tensor.name} has the unsupported type {tensor.tensor_type.name}."
            ) from error
        loaded = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)
        return loaded if num_heads is None else halves_from_neighbours(loaded, num_heads)

    return read


def halves_from_neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Rows `[num_heads * head_dim, …]` from llama.cpp's order to Hugging Face's, within each head."""
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
