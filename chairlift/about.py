"""What `--help` says about a command: the module docstring, so that help and docstring cannot disagree."""


def about(docstring: str | None) -> str:
    """What stands behind the command's name, as sentences; empty where Python drops docstrings (-OO)."""
    told = (docstring or "").partition(": ")[2]
    return told[:1].upper() + told[1:]
