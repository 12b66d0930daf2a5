"""What `--help` says of a command: the opening of its module, so that both are true or neither is."""


def about(docstring: str | None) -> str:
    """What stands behind the command's name, as sentences; empty where Python drops docstrings (-OO)."""
    told = (docstring or "").partition(": ")[2]
    return told[:1].upper() + told[1:]
