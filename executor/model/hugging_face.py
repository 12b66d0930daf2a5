"""Opens a Hugging Face folder: config.json, safetensors (one file, or shards with an index), tokenizer files.

Files are mapped into memory; a tensor is read when the weights are filled. Plain JSON is all that is needed
of the tokenizer here: its vocabulary and its end token.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.model.checkpoint import Checkpoint, StoredTensor, checked_eos_ids
from executor.model.config_json import from_config_json
from executor.model.errors import ModelError
from executor.model.json_files import eos_token_ids, optional_json, read_json
from executor.model.token_bytes import of_tokenizer_json

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MAX_TOKEN_IDS = 1 << 24
NUMBER_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def open_folder(folder: Path) -> Checkpoint:
    """Open `folder`. Raises `ModelError`."""
    config = from_config_json(read_json(folder / "config.json"))
    tokenizer = optional_json(folder / "tokenizer.json")
    tokens = vocabulary(tokenizer, folder / "tokenizer.json")
    eos_ids = (
        eos_token_ids(folder / "config.json")
        | eos_token_ids(folder / "generation_config.json")
        | tokenizer_eos_ids(optional_json(folder / "tokenizer_config.json"), tokens)
    )
    return Checkpoint(
        path=folder,
        config=config,
        eos_token_ids=checked_eos_ids(eos_ids, config.vocab_size, folder),
        token_texts=texts_in_id_order(tokens),
        token_bytes=of_tokenizer_json(tokenizer, tokens),
        tensors=with_common_names(text_part(stored_tensors(folder))),
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's safetensors.

    Raises `ModelError` for a missing shard or tensor, or a bad file.
    """
    index_path = folder / _INDEX_NAME
    if not index_path.exists():
        if not (folder / _SINGLE_NAME).exists():
            raise ModelError(f"{folder} has neither {_SINGLE_NAME} nor {_INDEX_NAME}.")
        return shard_tensors(folder / _SINGLE_NAME)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path}: weight_map must name a file for each tensor.")
    # Saved twice, in one file and in shards: of which transformers takes the first, and others the second.
    if (folder / _SINGLE_NAME).exists() and _SINGLE_NAME not in weight_map.values():
        raise ModelError(
            f"{folder} has {_SINGLE_NAME} and {_INDEX_NAME}, which does not name it: remove the older one."
        )
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard_name in sorted(set(weight_map.values())):
        # A shard is a file beside the index: an index must not reach for files elsewhere.
        if Path(shard_name).name != shard_name:
            raise ModelError(f"{index_path}: {shard_name!r} is not a plain file name.")
        if not (folder / shard_name).exists():
            raise ModelError(f"{folder / shard_name} does not exist, but {_INDEX_NAME} names it.")
        shards[shard_name] = shard_tensors(folder / shard_name)
    for tensor_name, shard_name in weight_map.items():
        if tensor_name not in shards[shard_name]:
            raise ModelError(f"{folder / shard_name} has no tensor {tensor_name}, but {_INDEX_NAME} says so.")
    return {name: tensor for shard in shards.values() for name, tensor in shard.items()}


def text_part(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a model that sees pictures too, those of its text part alone and under their own names.

    That part is `language_model`, beside the head or above it; other models are returned as they are.
    """
    if not any("language_model." in name for name in tensors):
        return dict(tensors)
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model."):
            found[name.removeprefix("language_model.")] = tensor
        elif name.startswith("model.language_model."):
            found["model." + name.removeprefix("model.language_model.")] = tensor
        elif name == "lm_head.weight":
            found[name] = tensor
    return found


def with_common_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, Mixtral's experts under the names that the other families have for theirs."""
    return {common_name(name): tensor for name, tensor in tensors.items()}


def common_name(name: str) -> str:
    """What a tensor is called here; most have one name everywhere."""
    match name.split("."):
        case ["model", "layers", layer, "block_sparse_moe", "gate", kind]:
            return f"model.layers.{layer}.mlp.gate.{kind}"
        case ["model", "layers", layer, "block_sparse_moe", "experts", expert, part, kind] if (
            part in _MIXTRAL_PARTS
        ):
            return f"model.layers.{layer}.mlp.experts.{expert}.{_MIXTRAL_PARTS[part]}.{kind}"
        case _:
            return name


def shard_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises `ModelError` when it is truncated or no safetensors file.
    """
    try:
        file: Any = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as safetensors ({error}): it is incomplete or damaged."
        ) from error

    def reader(name: str, piece: Any) -> Callable[[slice, slice], Tensor]:
        def read_part(rows: slice, columns: slice) -> Tensor:
            tensor: Tensor = piece[rows, columns] if len(piece.get_shape()) > 1 else piece[rows]
            if tensor.dtype not in NUMBER_TYPES:
                raise ModelError(
                    f"{path}: tensor {name} holds {tensor.dtype}; expected floating point numbers of 16 bits "
                    "or more, for quantised safetensors are not supported."
                )
            return tensor

        return read_part

    return {
        name: StoredTensor(tuple(piece.get_shape()), str(piece.get_dtype()), reader(name, piece))
        for name, piece in slices.items()
    }


def vocabulary(raw: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Token text to id of a tokenizer.json, added tokens included; none of an empty one."""
    if not raw:
        return {}
    try:
        vocab = raw["model"]["vocab"]
        tokens = (
            dict(vocab)
            if isinstance(vocab, dict)
            else {text: token_id for token_id, (text, _) in enumerate(vocab)}
        )
        tokens |= {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: the vocabulary cannot be read ({error!r}).") from error
    for text, token_id in tokens.items():
        # Tables are made up to the largest, whatever is between.
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_TOKEN_IDS:
            raise ModelError(
                f"{path}: the id of token {text[:100]!r} is {str(token_id)[:100]}; it must be a whole number "
                f"from 0 to {MAX_TOKEN_IDS - 1}."
            )
    return tokens


def texts_in_id_order(tokens: Mapping[str, int]) -> tuple[str, ...]:
    """One text for each id that has a token; an added token's where it has another one beside."""
    texts = {token_id: text for text, token_id in tokens.items()}
    return tuple(text for _, text in sorted(texts.items()))


def tokenizer_eos_ids(raw_tokenizer_config: Mapping[str, Any], tokens: Mapping[str, int]) -> set[int]:
    """The id of tokenizer_config.json's `eos_token`, which is a text or an object with a `content`."""
    eos_token = raw_tokenizer_config.get("eos_token")
    if isinstance(eos_token, Mapping):
        eos_token = eos_token.get("content")
    return {tokens[eos_token]} if isinstance(eos_token, str) and eos_token in tokens else set()
