"""Opens a GGUF file. Quantised tensors are dequantised when they are read, or read in their codes.

Four things differ from a Hugging Face folder beside the names. The file lists sizes fastest dimension
first. The experts of a layer are one tensor, which is cut into theirs. Gemma's norms have had their 1 added.
And the rows of query and key projections of `llama` are reordered, because llama.cpp rotates neighbouring
elements there and Hugging Face rotates halves: within a head, file row 2i + h is row i + h * head_dim / 2
here. The other architectures rotate halves in both.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from executor.model.checkpoint import Checkpoint, StoredTensor, checked_eos_ids
from executor.model.errors import ModelError
from executor.model.gguf_blocks import blocks_of, is_in_blocks
from executor.model.gguf_config import architecture_of, config_from_metadata
from executor.model.gguf_reader import Reader
from executor.model.json_files import eos_token_ids
from executor.model.quantized import BLOCK_SIZE, QuantizedMatrix
from executor.model.settings import Settings
from executor.model.token_bytes import of_gguf

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_STACKS = {"ffn_gate_exps": "ffn_gate", "ffn_up_exps": "ffn_up", "ffn_down_exps": "ffn_down"}
"""Matrices of all experts of a layer, one after the other, and what each was called when it stood alone."""
_EXPERT_NAMES = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SCALES = (".scale", ".input_scale")
_LONG_ROW_BYTES = 1 << 16
_TURN_END_KEY = "tokenizer.ggml.eot_token_id"
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", _TURN_END_KEY, "tokenizer.ggml.eom_token_id")
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
"""Tokens that end a turn where the metadata name none, as llama.cpp has it (`src/llama-vocab.cpp`):
converters left it out for years, and without it a chat would not end."""


def open_gguf(path: Path, generation_config: Path | None = None) -> Checkpoint:
    """Open the file `path`. Raises `ModelError`.

    `generation_config` is the JSON file beside it, if it lies in a folder: its end tokens count as well.
    """
    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader indexes into the mapped file as it goes: a short or foreign file shows as any of these.
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}): it is incomplete or damaged.") from error
    said = Settings(metadata, str(path))
    if (num_files := said.integer("split.count", default=1)) > 1:
        raise ModelError(
            f"{path} is one of the {num_files} files of a model: join them with llama.cpp's "
            "`llama-gguf-split --merge`, and name the file that it writes."
        )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    architecture = architecture_of(metadata, str(path))
    embeddings = stored.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing.")
    # Types of four bits whose numbers are to be multiplied by one that lies beside them (NVFP4).
    if scales := [name for name in stored if name.endswith(_SCALES)]:
        raise ModelError(f"{path}: tensor {scales[0]} scales another one, which is not supported.")
    config = config_from_metadata(metadata, stored, int(embeddings.shape[-1]), str(path))
    layer_names = _GEMMA_LAYER_NAMES if architecture.is_gemma else _LAYER_NAMES
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    reordered = heads if architecture.has_neighbour_rows else {}
    token_texts = tuple(metadata.get("tokenizer.ggml.tokens", ()))
    eos_ids = {said.integer(key, at_least=0) for key in _EOS_KEYS if key in metadata}
    if _TURN_END_KEY not in metadata:
        eos_ids |= {token_texts.index(text) for text in _TURN_ENDS if text in token_texts}
    if generation_config is not None:
        eos_ids |= eos_token_ids(generation_config)
    return Checkpoint(
        path=path,
        config=config,
        eos_token_ids=checked_eos_ids(eos_ids, config.vocab_size, path),
        token_texts=token_texts,
        token_bytes=of_gguf(metadata),
        tensors={
            hugging_face_name(name, layer_names): stored_tensor(tensor, reordered, path)
            for whole in stored.values()
            for name, tensor in matrices_of(whole)
        },
    )


def matrices_of(tensor: gguf.ReaderTensor) -> Iterator[tuple[str, gguf.ReaderTensor]]:
    """A tensor of the file as Hugging Face has it, by llama.cpp's names: a stack of experts one by one.

    The shared expert's gate is a vector in some files, and a matrix of one row in others.
    """
    match tensor.name.split("."):
        case ["blk", layer, part, kind] if part in _STACKS and len(tensor.data.shape) == 3:  # noqa: PLR2004
            for expert, data in enumerate(tensor.data):
                alone = tensor._replace(shape=tensor.shape[:2], data=data)
                yield f"blk.{layer}.{_STACKS[part]}.{expert}.{kind}", alone
        case ["blk", _, "ffn_gate_inp_shexp", _] if len(tensor.data.shape) == 1:
            row = tensor.data.reshape(1, -1)
            yield tensor.name, tensor._replace(shape=np.append(tensor.shape, 1), data=row)
        case _:
            yield tensor.name, tensor


def hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """The checkpoint's name for a tensor of the file; a name that is not known stays as it is."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
        case ["blk", layer, part, expert, kind] if part in _EXPERT_NAMES:
            return f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERT_NAMES[part]}.{kind}"
        case _:
            return _TOP_LEVEL_NAMES.get(name, name)


def stored_tensor(tensor: gguf.ReaderTensor, reordered: Mapping[str, int], path: Path) -> StoredTensor:
    """A tensor of the file in Hugging Face's layout; `reordered` has the heads of parts to be reordered."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    num_heads = next((count for part, count in reordered.items() if part in tensor.name.split(".")), None)
    name = tensor.tensor_type.name
    read_blocks = blocks_reader_of(tensor, shape, num_heads) if is_in_blocks(name) else None
    return StoredTensor(shape, name, reader_of(tensor, shape, num_heads, path), read_blocks=read_blocks)


def reader_of(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], num_heads: int | None, path: Path
) -> Callable[[slice, slice], Tensor]:
    """How to read `tensor`: dequantised, and with the rows of so many heads in Hugging Face's order.

    Rows are put in order by whole heads, and numbers are dequantised by whole blocks: what is read reaches to
    their bounds, and is cut afterwards.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    items_per_block = block_bytes // tensor.data.itemsize
    head_rows = 1 if num_heads is None else shape[0] // num_heads

    def read_part(rows: slice, columns: slice) -> Tensor:
        first_row, last_row = _outwards(rows, shape[0], head_rows)
        data, wide = tensor.data, shape[1:]
        first_column = 0
        if len(shape) == 2:  # noqa: PLR2004 - a matrix
            first_column, last_column = _outwards(columns, shape[1], block)
            items = slice(first_column // block * items_per_block, last_column // block * items_per_block)
            data, wide = data[:, items], (last_column - first_column,)
        try:
            values = gguf.quants.dequantize(in_long_rows(data[first_row:last_row]), tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{path}: tensor {tensor.name} has the unsupported type {tensor.tensor_type.name}."
            ) from error
        # What needed no dequantising still lies in the file, which must not be written to.
        values = values if values.flags.writeable else values.copy()
        loaded = torch.from_numpy(values).reshape(-1, *wide)
        if num_heads is not None:
            loaded = halves_from_neighbours(loaded, len(loaded) // head_rows)
        cut = [_moved(rows, shape[0], first_row)]
        if len(shape) == 2:  # noqa: PLR2004
            cut.append(_moved(columns, shape[1], first_column))
        return loaded[*cut]

    return read_part


def blocks_reader_of(
    tensor: gguf.ReaderTensor, shape: tuple[int, ...], num_heads: int | None
) -> Callable[[slice, slice], QuantizedMatrix | None]:
    """How to read the matrix `tensor` in its codes, with the rows of so many heads in order."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]

    def read_blocks(rows: slice, columns: slice) -> QuantizedMatrix | None:
        first, last, _ = columns.indices(shape[1])
        if first % BLOCK_SIZE or (last % BLOCK_SIZE and last < shape[1]):
            return None
        wanted = torch.arange(shape[0])
        if num_heads is not None:
            wanted = halves_from_neighbours(wanted, num_heads)
        matrix = blocks_of(tensor.data[wanted[rows].numpy()], tensor.tensor_type.name, block_bytes, shape[1])
        return None if matrix is None else matrix.part(slice(None), columns)

    return read_blocks


def _outwards(part: slice, size: int, unit: int) -> tuple[int, int]:
    """The bounds of `part` of `size`, moved outwards to whole units."""
    first, last, _ = part.indices(size)
    return first // unit * unit, -(-last // unit) * unit


def _moved(part: slice, size: int, start: int) -> slice:
    """`part` of `size`, as seen from `start`."""
    first, last, _ = part.indices(size)
    return slice(first - start, last - start)


def in_long_rows(data: np.ndarray) -> np.ndarray:
    """`data` with some rows laid end to end: the package dequantises sixteen at a time, however short."""
    num_rows, row_bytes = math.prod(data.shape[:-1]), data.shape[-1]
    together = 1 << max(0, (_LONG_ROW_BYTES // row_bytes).bit_length() - 1)
    return data.reshape(-1, row_bytes * math.gcd(num_rows, together))


def halves_from_neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Rows `[num_heads * head_dim, …]` from llama.cpp's order to Hugging Face's, within each head."""
    head_dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
