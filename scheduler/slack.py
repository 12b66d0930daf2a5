"""When a waiting sequence must start in order to finish by its deadline, and how long it takes at least.

Both follow from the measured step times (`step_time`), from how long answers are (`forecast`), and from how
much of its prompt is cached. Pure.
"""

from collections.abc import Callable, Mapping

from scheduler.executor_state import ExecutorState
from scheduler.forecast import LengthModel
from scheduler.sequence import Sequence
from scheduler.waiting import Policy

# Half of all answers are longer than expected: begun without a margin, these end late and make others late.
# 1.5 did best of 1, 1.5, 2 and 3 on the Azure conversation trace (docs/results.md).
SERVICE_MARGIN = 1.5

NumCached = Callable[[ExecutorState], int]  # tokens that need no computing there


class Slack:
    """Reads executors and lengths, changes nothing."""

    __slots__ = ("_executors", "_lengths", "_policy")

    def __init__(self, policy: Policy, executors: Mapping[str, ExecutorState], lengths: LengthModel) -> None:
        self._policy = policy
        self._executors = executors
        self._lengths = lengths

    def latest_start(self, seq: Sequence) -> float:
        """When `seq` must start to finish in time; infinity without a deadline, or under another policy.

        Cached tokens count only as far as block names have been made: for a new sequence, not before its
        turn.
        """
        return self._latest_start(seq, lambda state: state.cache.num_found(seq))

    def latest_start_at_best(self, seq: Sequence) -> float:
        """When it must start if all of its prefix that may be cached is."""
        return self._latest_start(seq, lambda state: state.cache.num_found_at_most(seq))

    def least_service(self, seq: Sequence) -> float:
        """Seconds that `seq` will take at least: for one token, with everything cached that may be."""
        return self._service(seq, 1, lambda state: state.cache.num_found_at_most(seq))

    def _latest_start(self, seq: Sequence, num_cached: NumCached) -> float:
        deadline = seq.request.deadline
        if deadline is None or self._policy is not Policy.DEADLINE:
            return float("inf")
        num_new_tokens = self._lengths.remaining(seq.num_output_tokens, seq.request.max_tokens)
        return deadline - SERVICE_MARGIN * self._service(seq, num_new_tokens, num_cached)

    def _service(self, seq: Sequence, num_new_tokens: int, num_cached: NumCached) -> float:
        """Seconds until `seq`, once it runs, has produced this many more tokens, by the measured step times.

        0 while nothing was measured.
        """
        times = []
        for state in self._executors.values():
            line = state.step_time.line
            if line is not None:
                base, per_token = line
                width = max(1, len(state.running))
                decoding = num_new_tokens * (base + width * per_token)
                times.append(((len(seq.token_ids) - num_cached(state)) * per_token + decoding) / 1e6)
        return min(times, default=0.0)
