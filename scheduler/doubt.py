"""Tests, now and then, a prediction by which requests are refused. Pure.

A refused request is never computed, so it never shows that the prediction was wrong. Therefore one is taken
in after each minute of refusing: at worst it ends by its deadline, behind all that can be done in time.
"""

_SECONDS = 60.0


class Doubt:
    """Doubt in a prediction by which requests are refused."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None  # the first refusal since the last test

    def may_refuse(self, now: float) -> bool:
        """Whether it may refuse a request now; if not, this one is the test."""
        if self._since is None:
            self._since = now
        elif now >= self._since + _SECONDS:
            self._since = None
        return self._since is not None
