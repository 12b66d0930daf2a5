"""A runner as on a GPU, on the CPU: launched and collected, decode steps captured."""

from pathlib import Path
from typing import Any

import pytest

from executor import selection
from executor.runner import ModelRunner
from tests.rig.fake_device import FakeDevice


def load_late(
    path: Path, monkeypatch: pytest.MonkeyPatch, device: FakeDevice | None = None, **options: Any
) -> ModelRunner:
    """Load as on a GPU whose only back end is the one named `attention`, reference if none is."""
    accelerator = device or FakeDevice()
    monkeypatch.setattr(selection, "accelerator_of", lambda _: accelerator)
    wanted = {
        "dtype": "float32",
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "attention": "reference",
    }
    return ModelRunner.load(path, device="cpu", **(wanted | options))
