"""How long a step will take: a line fitted to the steps that were measured.

    duration ≈ base + per_token · num_tokens          microseconds

Least squares with exponential forgetting, so that it follows a machine whose speed drifts. Pure.
"""

_FORGET = 0.98  # weight kept by the past at each new step: about fifty steps of memory
_MIN_WEIGHT = 3.0  # steps before a prediction is worth anything


class StepTimeModel:
    """Predicts the duration of a step from its number of tokens."""

    __slots__ = ("_w", "_wt", "_wtt", "_wtu", "_wu")

    def __init__(self) -> None:
        self._w = self._wt = self._wtt = self._wu = self._wtu = 0.0

    def observe(self, num_tokens: int, duration_us: float) -> None:
        """Learns from one step."""
        self._w = self._w * _FORGET + 1
        self._wt = self._wt * _FORGET + num_tokens
        self._wtt = self._wtt * _FORGET + num_tokens * num_tokens
        self._wu = self._wu * _FORGET + duration_us
        self._wtu = self._wtu * _FORGET + num_tokens * duration_us

    @property
    def line(self) -> tuple[float, float] | None:
        """(base, per token) in microseconds, both >= 0; None before anything is known."""
        if self._w < _MIN_WEIGHT:
            return None
        variance = self._w * self._wtt - self._wt * self._wt
        if variance <= 1e-9 * self._w * self._wtt:  # all steps alike: blame it all on the tokens
            return (0.0, self._wu / self._wt) if self._wt else (self._wu / self._w, 0.0)
        per_token = max(0.0, (self._w * self._wtu - self._wt * self._wu) / variance)
        base = (self._wu - per_token * self._wt) / self._w
        if base < 0:
            return 0.0, self._wtu / self._wtt  # the best line through the origin
        return base, per_token

    def predict_us(self, num_tokens: int) -> float | None:
        """Expected duration of a step of `num_tokens`, microseconds."""
        line = self.line
        return None if line is None else line[0] + line[1] * num_tokens

    def tokens_within(self, limit_us: float) -> int | None:
        """Most tokens whose step is expected to stay within `limit_us`; None when nothing limits it."""
        line = self.line
        if line is None or line[1] == 0:
            return None
        return max(0, int((limit_us - line[0]) / line[1]))
