"""Fetches models from the Hugging Face hub to this machine, for `chairlift pull ORG/NAME`.

The hub's own library moves the bytes, into its own cache, which other programs share: it resumes, checks
hashes, knows tokens and mirrors, and takes what is in the cache alone under HF_HUB_OFFLINE=1. The library is
an optional extra. This room must not know where models are kept.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from rpc.errors import StartError

PART = r"[\w][\w.-]*"
NAME = re.compile(rf"(?P<repository>{PART}/{PART})(?:/(?P<file>(?:{PART}/)*{PART}\.gguf))?")
WANTED = ["*.json", "*.safetensors", "*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*"]
UNWANTED = ["*/*", "consolidated*"]
"""Files in folders are other formats; `consolidated` are the same weights in Mistral's own format."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of safetensors, or one GGUF file in a repository of several."""

    repository: str
    """ORG/NAME"""
    file: str | None
    """A path within the repository."""

    @property
    def name(self) -> str:
        """What it is called once it is here."""
        return Path(self.file or self.repository).name.removesuffix(".gguf")


def parse(model: str) -> HubModel | None:
    """ORG/NAME, or ORG/NAME/FILE.gguf; None when `model` is no such name."""
    match = NAME.fullmatch(model)
    return None if match is None else HubModel(match["repository"], match["file"])


def fetch(model: HubModel, *, shows_progress: bool) -> Path:
    """Bring the model into the hub's cache: its folder, or its GGUF file there. Raises StartError."""
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise StartError(
            f"{model.repository} is a name of the Hugging Face hub, and its library is not installed: "
            "pip install 'chairlift[hub]'"
        ) from error
    if not shows_progress:
        disable_progress_bars()
    try:
        if model.file is not None:
            return Path(huggingface_hub.hf_hub_download(model.repository, model.file))
        folder = Path(
            huggingface_hub.snapshot_download(
                model.repository, allow_patterns=WANTED, ignore_patterns=UNWANTED
            )
        )
    except (OSError, ValueError) as error:  # what the library raises for the network, the cache and the name
        reason = " ".join(str(error).split())
        raise StartError(f"{model.repository} could not be fetched from the hub: {reason}") from error
    if not any(folder.glob("*.safetensors")):
        raise StartError(
            f"{model.repository} has no .safetensors files; for a GGUF file of it, write "
            f"{model.repository}/FILE.gguf"
        )
    return folder
