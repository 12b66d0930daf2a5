"""Files that a command writes when it is done: a path it cannot write is refused before the work begins."""

import argparse
import os
from pathlib import Path


def to_write(text: str) -> Path:
    """The path of a file that can be written, as far as can be seen."""
    if text == "-":
        raise argparse.ArgumentTypeError("it is '-', and must be a file: nothing is written to stdout")
    path = Path(text)
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"it is {text!r}, which is a folder, and must be a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"it is {text!r}, and there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"it is {text!r}, which may not be written")
    return path
