"""When to retry, and after how long. Pure: time and randomness come in as arguments.

UNAVAILABLE may always be tried again; RESOURCE_EXHAUSTED when the server says after how long (RetryInfo). The
server's word goes before our own guess. Whoever gets anything new starts afresh.

A router may not have noticed that our connection is gone when we come back on another: it takes our own
request for somebody's who uses the same id (ALREADY_EXISTS). That is asked again until it must have noticed.
"""

import math

import grpc

from rpc.channel import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS
from rpc.errors import RequestError

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_LONGEST_DELAY_WHILE_HELD_SECONDS = 1.0
_HELD_SECONDS = KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS + 5  # it notices in the first two, and lets go


class Patience:
    """How often one call may still be tried; `deadline` is on the caller's clock, None for none."""

    def __init__(self, max_retries: int, deadline: float | None) -> None:
        self._max_retries = max_retries
        self._deadline = deadline
        self._num_retries = 0
        self._lost_at = -math.inf

    def remaining_seconds(self, now: float) -> float | None:
        """Time left, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def renew(self) -> None:
        """Something new has come."""
        self._num_retries = 0

    def delay_after(self, refusal: RequestError, now: float, chance: float) -> float | None:
        """Seconds to wait before asking again, None when it makes no sense. `chance` is from 0 to 1."""
        if refusal.code is grpc.StatusCode.UNAVAILABLE:
            self._lost_at = now
        told = refusal.retry_after_seconds
        may_retry = refusal.code is grpc.StatusCode.UNAVAILABLE or (
            refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED and told is not None
        )
        seconds_since_lost = now - self._lost_at
        is_held = refusal.code is grpc.StatusCode.ALREADY_EXISTS and seconds_since_lost < _HELD_SECONDS
        if is_held:  # by ourselves; no try of those that are counted
            guess = min(max(_FIRST_DELAY_SECONDS, seconds_since_lost), _LONGEST_DELAY_WHILE_HELD_SECONDS)
        elif may_retry and self._num_retries < self._max_retries:
            guess = min(_FIRST_DELAY_SECONDS * 2**self._num_retries, _LONGEST_DELAY_SECONDS)
        else:
            return None
        # Spread out, so that all who were refused together do not come back together.
        delay = guess * (0.5 + chance / 2) if told is None else told * (1 + chance / 4)
        if self._deadline is not None and now + delay >= self._deadline:
            return None
        self._num_retries += not is_held
        return delay
