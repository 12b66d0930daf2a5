"""The text of one sequence: ids in, text that will not change out, cut at the first stop string.

Ids are taken in one at a time, so the text after n ids is a function of those ids and the stops alone,
however the ids arrive: a stream that is resumed runs its ids from the first again and holds back the same.
Pure; it must not know where ids come from or where text goes.
"""

from collections.abc import Iterable
from typing import NamedTuple

from router.detokenizer import Detokenizer
from router.stop_strings import StopStrings


class Piece(NamedTuple):
    """What some ids brought.

    `num_tokens` of them were taken in: all, or up to and including the one whose text completed the stop
    string `matched`; the ids after that one are not part of the answer.
    """

    text: str
    num_tokens: int
    matched: str | None


class TextStream:
    """One sequence's detokenizer and stop strings, in line. Nothing is pushed after a match."""

    __slots__ = ("_detokenizer", "_stops", "matched")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.matched: str | None = None
        """The stop string that has completed, be it in `push` or in `finish`."""

    def push(self, token_ids: Iterable[int]) -> Piece:
        """Take in the next ids, up to a match; returns the text that is now certain.

        It serves tests: the router's loop over ids is `request_log`'s, which has more to do for each.
        """
        texts = []
        num_tokens = 0
        for token_id in token_ids:
            num_tokens += 1
            texts.append(self.push_one(token_id))
            if self.matched is not None:
                break
        return Piece("".join(texts), num_tokens, self.matched)

    def push_one(self, token_id: int) -> str:
        """Take in the next id; returns the text that is now certain. This is done for every token."""
        text, self.matched = self._stops.push(self._detokenizer.push((token_id,)))
        return text

    def finish(self) -> str:
        """The sequence has ended; returns the text held back, once.

        A character left half, or bytes held until their run ends, become text only here, and may complete a
        stop string: `matched` says so.
        """
        if self.matched is not None:
            return ""
        pushed = self._stops.push(self._detokenizer.flush())
        self.matched = pushed.matched
        return pushed.text + self._stops.flush()
