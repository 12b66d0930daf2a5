"""Predicts how long a step will take: a line fitted to measured steps.

    duration ≈ base + per_token · num_tokens          microseconds

Least squares. The line goes through the mean of the newest steps (about fifty of them), so it follows a
machine whose speed drifts. The slope is forgotten only as fast as it can be learned anew, which takes spread:
how far a step is from that mean, compared with the steps remembered (directional forgetting: Cao and
Schwartz, 2000). A thousand steps that differ by less than a hundredth of the usual spread say nothing about
the cost of a token: they leave the slope as it is. Pure.
"""

import math

Line = tuple[float, float]
"""Duration of a step in microseconds: of one without tokens, and what each token adds."""

_FORGET = 0.98  # weight kept by the past at each new step: a memory of about fifty steps
_MIN_WEIGHT = 3.0  # steps before a prediction is worth anything
_LEAST_NEWS = 0.01**2  # in squares of the usual deviation: with less, a step teaches only the base
_MOST_NEWS = 4.0  # a step counts for at most this many of usual spread: one outlier must not decide


class StepTimeModel:
    """Predicts the duration of a step from its number of tokens."""

    __slots__ = ("_covariance", "_mean_tokens", "_mean_us", "_news", "_variance", "_weight")

    def __init__(self) -> None:
        self._weight = self._mean_tokens = self._mean_us = 0.0
        # Sums of squares and of products about the mean, and for how many steps of usual spread they stand.
        self._variance = self._covariance = self._news = 0.0

    def observe(self, num_tokens: int, duration_us: float) -> None:
        """Learns from one step."""
        self._weight = self._weight * _FORGET + 1
        off_tokens = num_tokens - self._mean_tokens
        off_us = duration_us - self._mean_us
        self._mean_tokens += off_tokens / self._weight
        self._mean_us += off_us / self._weight
        spread = off_tokens * off_tokens * (1 - 1 / self._weight)
        usual = self._variance / self._news if self._variance else spread
        news = min(_MOST_NEWS, spread / usual) if usual else 0.0
        if news < _LEAST_NEWS:
            return
        kept = _FORGET**news
        self._news = self._news * kept + news
        self._variance = self._variance * kept + spread
        self._covariance = self._covariance * kept + off_tokens * off_us * (1 - 1 / self._weight)

    @property
    def line(self) -> Line | None:
        """Both its numbers are >= 0; None while too little is known."""
        if self._weight < _MIN_WEIGHT:
            return None
        most = self._mean_us / self._mean_tokens if self._mean_tokens else 0.0
        # If no two steps ever differed, the tokens are assumed to cost all of it.
        slope = self._covariance / self._variance if self._variance else math.inf
        if slope >= most:
            return (0.0, most) if most else (self._mean_us, 0.0)
        per_token = max(0.0, slope)
        return self._mean_us - per_token * self._mean_tokens, per_token

    def predict_us(self, num_tokens: int) -> float | None:
        """Expected duration of a step of `num_tokens`, in microseconds; None while too little is known."""
        line = self.line
        return None if line is None else line[0] + line[1] * num_tokens

    def tokens_within(self, limit_us: float) -> int | None:
        """Most tokens whose step is expected to stay within `limit_us`; None if nothing limits them."""
        line = self.line
        if line is None or line[1] == 0:
            return None
        return max(0, int((limit_us - line[0]) / line[1]))
