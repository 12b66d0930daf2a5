"""When a prediction that refuses requests is put to the test. Pure.

What is refused is never computed, so it never shows that the prediction was wrong. Once in a minute of
refusing, one is taken in all the same: at worst it ends by its deadline, behind all that can be done in time.
"""

_SECONDS = 60.0


class Doubt:
    """In a prediction by which requests are refused."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None  # the first refusal since it was last put to the test

    def may_refuse(self, now: float) -> bool:
        """Whether it may refuse one now; else this one is the test."""
        if self._since is None:
            self._since = now
        elif now >= self._since + _SECONDS:
            self._since = None
        return self._since is not None
