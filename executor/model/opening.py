"""Opens a model on disk, whichever of the two formats it has: a Hugging Face folder or a GGUF file."""

from pathlib import Path

from executor.model.checkpoint import Checkpoint
from executor.model.errors import ModelError
from executor.model.hugging_face import open_folder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, or a folder with one GGUF file. Raises `ModelError`."""
    if not path.exists():
        raise ModelError(
            f"--model is {path}, which does not exist: give a folder or a GGUF file "
            "(`chairlift pull smollm2` makes the folder models/smollm2)."
        )
    if path.is_dir():
        gguf_paths = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(gguf_paths) > 1:
            names = ", ".join(each.name for each in gguf_paths)
            raise ModelError(f"{path} holds {len(gguf_paths)} GGUF files ({names}): name the one to serve.")
        return _opened_gguf(gguf_paths[0], path) if gguf_paths else open_folder(path)
    if path.suffix == ".gguf":
        return _opened_gguf(path)
    raise ModelError(f"{path} is a file but no .gguf file: give a Hugging Face folder or a GGUF file.")


def _opened_gguf(path: Path, folder: Path | None = None) -> Checkpoint:
    # It has a package of its own, which nobody needs who serves a folder.
    from executor.model.gguf_file import open_gguf

    return open_gguf(path, None if folder is None else folder / "generation_config.json")
