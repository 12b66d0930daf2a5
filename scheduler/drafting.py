"""Decides when it pays to send guesses as draft tokens, and how many.

A step takes as long as its weights take to be read, and then some for each token (`step_time`). A batch of
few rows leaves the rest of the machine idle: there a token that is guessed right is nearly free, and in a
full batch it is dear. So a row gets draft tokens while what it wins is worth more than what it spends:

    right · (time of the step / its tokens)  >  tried · (time of a token)

Guesses have a second price. They continue what is known, so the plan that has them must wait for all results,
and the executor waits for the plan. No plan is sent behind it: it could have no rows of those that guess, and
the batch would fall into two that take turns. Guesses are scored whether they are sent or not (`lookup`), so
it is known beforehand whether both prices are worth paying: until they are, nothing is sent. Pure.
"""

from collections.abc import Iterable, Mapping

from scheduler.lookup import Guesses
from scheduler.sequence import Sequence, State
from scheduler.step_time import Line
from scheduler.token_ids import NO_IDS, TokenIds

DRAFT_TOKENS = "draft_tokens"
"""Feature of an executor that takes them. No request asks for it."""
MAX_ROWS = 16
"""In a larger batch nothing is guessed: it hardly pays, and the search takes its time in each step."""
_WAY_SECONDS = 1e-3  # from a result to the next step, as long as that was not measured


class Drafting:
    """What is guessed at one executor."""

    __slots__ = ("_most", "waits")

    def __init__(self, most: int) -> None:
        """`most`: draft tokens of a row."""
        self._most = most
        self.waits = False
        """Whether plans are to wait for all results, so that they can have draft tokens."""

    def learn(
        self,
        running: Mapping[int, Sequence],
        progressed: Iterable[Sequence],
        line: Line | None,
        way_seconds: float | None,
    ) -> None:
        """A result came: scores the guesses of those that have `progressed`, and decides whether to wait.

        `line` and `way_seconds` (from a result to the next step) are what was measured; None: nothing yet.
        """
        self.waits = False
        if len(running) > MAX_ROWS:
            return
        for seq in progressed:
            if seq.state is State.RUNNING and not seq.is_padding:
                if seq.guesses is None:
                    seq.guesses = Guesses(self._most)
                seq.guesses.learn(seq.token_ids)
        if line is None or not running:
            return
        # Prompts in progress share the next step, and leave few tokens of it to guesses.
        num_tokens = sum(
            max(1, seq.num_computable_tokens - seq.num_computed_tokens) for seq in running.values()
        )
        known = [seq.guesses for seq in running.values() if seq.guesses is not None]
        gain_us = sum(max(0.0, _gain_us(guesses, num_tokens, line)) for guesses in known)
        self.waits = gain_us > 1e6 * (_WAY_SECONDS if way_seconds is None else way_seconds)

    def guess(self, seq: Sequence, num_tokens: int, line: Line | None) -> TokenIds:
        """What `seq`, all of whose tokens are known, is guessed to say next; none if that does not pay.

        `num_tokens` are those of the step so far.
        """
        if line is None or seq.guesses is None:
            return NO_IDS
        pays = _gain_us(seq.guesses, num_tokens, line) > 0
        return seq.guesses.rest(seq.token_ids) if pays else NO_IDS


def _gain_us(guesses: Guesses, num_tokens: int, line: Line) -> float:
    """Microseconds that a step of `num_tokens` is expected to win by draft tokens like the newest guesses."""
    base_us, per_token_us = line
    worth_us = base_us / num_tokens + per_token_us
    return guesses.right * worth_us - guesses.tried * per_token_us
