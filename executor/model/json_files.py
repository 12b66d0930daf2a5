"""Reads the JSON files that lie beside weights. Knows no format of weights."""

import json
from pathlib import Path
from typing import Any

from executor.model.errors import ModelError


def eos_token_ids(path: Path) -> set[int]:
    """The ids under `eos_token_id` in `path`: none, one number, or a list. No file has none.

    Raises `ModelError`.
    """
    value = optional_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of token ids.")
    return set(ids)


def optional_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file. Raises `ModelError`."""
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `ModelError`."""
    if not path.exists():
        raise ModelError(f"{path} does not exist: {path.parent} is not a Hugging Face model folder.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value
