"""What the tests of loading share."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.attention.base import AttentionSpec
from executor.attention.reference import ReferenceAttention
from executor.model import ModelError
from executor.model.checkpoint import Checkpoint
from executor.model.opening import open_checkpoint
from executor.model.weights import ModelWeights, load_weights
from executor.operations.plain import PlainOperations


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of the JSON object in `path`; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not None}))


def weights(path: Path) -> ModelWeights:
    return weights_of(open_checkpoint(path))


def weights_of(checkpoint: Checkpoint) -> ModelWeights:
    cpu = torch.device("cpu")
    spec = AttentionSpec(cpu, torch.float32, 4, 2, 16, block_size=16, scale=0.25)
    return load_weights(checkpoint, torch.float32, cpu, PlainOperations(ReferenceAttention(spec)))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as raised:
        weights(path)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence
