"""What a model on disk offers, whatever its format.

Its shape, its end tokens, its vocabulary, its tensors under Hugging Face names, and its tokenizer's
fingerprint. Knows neither how a file is read (`opening` finds who reads it) nor how a tensor is used.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from executor.model.config import ModelConfig
from executor.model.errors import ModelError
from executor.model.quantized import QuantizedMatrix
from executor.model.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: str
    """As the file calls it: BF16, F32, Q4_1, …"""
    read_part: Callable[[slice, slice], Tensor]
    """Reads rows and columns of it (a vector has rows alone) in a floating point type.

    It reads no more of the file than these need. Raises `ModelError`."""
    whole: "StoredTensor | None" = None
    """What this is a part of, where it is one."""
    read_blocks: Callable[[slice, slice], QuantizedMatrix | None] | None = None
    """Reads rows and columns of a matrix in the codes in which it is stored, where these have that form.

    None where the columns begin or end within a block, or float16 cannot hold a scale."""

    def read(self) -> Tensor:
        """All of it. Raises `ModelError`."""
        return self.read_part(slice(None), slice(None))

    def ends(self, count: int) -> Tensor:
        """The first and the last `count` numbers, row after row; all of them twice where there are fewer."""
        num_rows = -(-count // math.prod(self.shape[1:]))
        first = self.read_part(slice(num_rows), slice(None)).reshape(-1)
        last = self.read_part(slice(max(0, self.shape[0] - num_rows), None), slice(None)).reshape(-1)
        return torch.cat([first[:count], last[-count:]])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, opened: all that is known without reading the tensors."""

    path: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    """Sorted union of what all files of the model call an end token."""
    token_texts: tuple[str, ...]
    """Text of each token in id order, ids without a token left out; empty when there is no tokenizer."""
    token_bytes: TokenBytes | None
    """What its tokens stand for within a text; None when there is no tokenizer, or none of a known family."""
    tensors: Mapping[str, StoredTensor]
    """Under Hugging Face names (`model.layers.0.mlp.up_proj.weight`), in their layout."""


def checked_eos_ids(eos_ids: set[int], vocab_size: int, path: Path) -> tuple[int, ...]:
    """`eos_ids` sorted. Raises `ModelError` for one that is no token."""
    for token_id in sorted(eos_ids):
        if not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{path}: end token id {token_id} is outside of the vocabulary of {vocab_size} tokens."
            )
    return tuple(sorted(eos_ids))


def tokenizer_fingerprint(token_texts: tuple[str, ...]) -> str:
    """SHA-256 (hex) over each token's text in id order, each ended by a zero byte; "" without a tokenizer."""
    if not token_texts:
        return ""
    digest = hashlib.sha256()
    for text in token_texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
