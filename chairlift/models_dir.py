"""Where pulled models are kept, and what `--model NAME` means there. For all who serve a model.

It must not know: how a model comes there.
"""

import os
from pathlib import Path

from chairlift import hub
from chairlift.built_in import BUILT_IN
from rpc.errors import StartError

MANIFEST = "SHA256SUMS"
"""Stands in the folder of each model that is whole."""


def default_models_dir() -> Path:
    """Where models are kept: $CHAIRLIFT_MODELS_DIR, else `models` in the working directory."""
    return Path(os.environ.get("CHAIRLIFT_MODELS_DIR") or "models")


def resolve(model: str, models_dir: Path) -> Path:
    """What `--model` means: a path that exists, else a model pulled under that name.

    Raises StartError when it is neither, or when its pull was interrupted.
    """
    path = Path(model)
    if model and path.exists():
        return path
    pulled = models_dir / model
    flag = _models_dir_flag(models_dir)
    if not model or not pulled.is_dir():
        present = sorted(path.parent.name for path in models_dir.glob(f"*/{MANIFEST}"))
        there = f" (there is {', '.join(present)})" if present else ""
        fetchable = model if model in BUILT_IN or hub.parse(model) else "smollm2"
        raise StartError(
            f"--model: {model!r} is neither a path that exists nor a model in {models_dir}/{there}; "
            f"to fetch one: chairlift pull {fetchable}{flag}"
        )
    if any(pulled.glob("*.part")) or not any(pulled.iterdir()):
        raise StartError(
            f"--model: {pulled} is not complete, its pull was interrupted; "
            f"to go on: chairlift pull {model}{flag}"
        )
    return pulled


def _models_dir_flag(models_dir: Path) -> str:
    return "" if models_dir == default_models_dir() else f" --models-dir {models_dir}"
