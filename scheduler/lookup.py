"""Guesses how a token log goes on: as it went on when it last ended as it does now (prompt lookup).

    log      … the cat sat on the mat . the cat sat
               └─────┬───┘ went on with: on the mat .

Texts repeat themselves and their prompts: names, quotations, code, the keys of JSON. Such a guess costs a
search in the log, and no second model. Whether guesses are any good differs from text to text, so each
sequence keeps score of its own. A guess can be scored without being sent: its tokens come anyway. Pure.

Source: A. Saxena, Prompt Lookup Decoding (2023); vLLM: ngram speculation.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler.token_ids import NO_IDS, TokenIds

LONGEST_MATCH = 4
"""Tokens at the end of the log that are looked for earlier in it; fewer where so many were not there."""
SHORTEST_MATCH = 2
MAX_SEARCHED = 32_768
"""Tokens from the end of the log that are searched, so that a search takes some ten microseconds."""
MAX_PLACES = 1024
"""Places that end in the log's last token and are looked at more closely, for the same reason."""
_NEWEST = 0.25  # weight of the newest guess in the score


def continuation(token_ids: TokenIds, count: int) -> TokenIds:
    """`count` ids that may come next; none where the log has never ended as it does now.

    A log that has begun to repeat itself is taken to go on so.
    """
    if not token_ids:
        return NO_IDS
    log = np.frombuffer(token_ids, dtype=np.uint32)[-MAX_SEARCHED:]
    # Places where what came before was like the end of the log, by one token more each time.
    places = np.flatnonzero(log[:-1] == log[-1])[-MAX_PLACES:]
    num_alike = min(1, len(places))
    while 0 < num_alike < LONGEST_MATCH:
        inside = places[places >= num_alike]
        longer = inside[log[inside - num_alike] == log[-1 - num_alike]] if inside.size else inside
        if not longer.size:
            break
        places, num_alike = longer, num_alike + 1
    if num_alike < SHORTEST_MATCH:
        return NO_IDS
    since = len(log) - 1 - int(places[-1])
    return (token_ids[-since:] * -(-count // since))[:count]


@dataclass(slots=True)
class Guesses:
    """The guess that one sequence's next tokens are measured by, and how good its guesses have been.

    `right` and `tried` are means over the newest guesses: tokens that were right, and tokens that there were.
    """

    max_length: int  # of a guess, in tokens
    length: int = 2  # of the next guess: longer after one that was right, shorter after one that was not
    right: float = 0.0
    tried: float = 0.0
    made_at: int = 0  # how long the log was
    ids: TokenIds = field(default_factory=lambda: NO_IDS)

    def __post_init__(self) -> None:
        self.length = min(self.length, self.max_length)

    def rest(self, log: TokenIds) -> TokenIds:
        """What the guess says of the tokens that come next."""
        return self.ids[len(log) - self.made_at :]

    def learn(self, log: TokenIds) -> None:
        """The log has grown. If that settles the guess, scores it and makes the next one."""
        came = log[self.made_at : self.made_at + len(self.ids)]
        pairs = enumerate(zip(self.ids, came, strict=False))
        num_right = next((i for i, (guessed, sampled) in pairs if guessed != sampled), len(came))
        if num_right == len(came) < len(self.ids):
            return  # right so far
        self.right += _NEWEST * (num_right - self.right)
        self.tried += _NEWEST * (len(self.ids) - self.tried)
        if self.ids:
            is_right = num_right == len(self.ids)
            self.length = min(self.max_length, self.length + 2) if is_right else max(1, self.length - 1)
        self.made_at, self.ids = len(log), continuation(log, self.length)
