"""The version of this distribution."""

import importlib.metadata
from functools import cache


@cache
def version() -> str:
    """As it was installed; "source" for a tree that was not."""
    try:
        return importlib.metadata.version("chairlift")
    except importlib.metadata.PackageNotFoundError:
        return "source"
