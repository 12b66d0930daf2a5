"""Numbers in flags. A wrong one is refused with a sentence; argparse by itself would name our functions."""

import argparse

MOST = 1e12
"""Below it a float is finite, and each whole number has one of its own."""


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a whole number") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a number") from None


def whole(text: str) -> int:
    """A whole number, at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """A whole number, at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a whole number, at least {least}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MOST:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a number above 0")
    return value


def positives(text: str) -> list[float]:
    """Numbers above 0, separated by commas; each once, in ascending order."""
    return sorted({positive(part) for part in text.split(",")})
