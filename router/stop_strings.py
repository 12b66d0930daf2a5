"""Cuts a text, as it comes, at the first place where a stop string completes.

The result is what one gets by taking the whole text and reading it from the left until any stop is complete.
When several complete with the same character, the longest counts: it begins first, and no part of a stop may
reach the client. Held back is the longest suffix that is the beginning of some stop, and no more.

An Aho-Corasick automaton (Aho and Corasick, 1975): one table of all stops, each character of the text is
read once, whatever the stops look like. Pure: it knows characters, and must not know tokens.
"""

from collections import deque
from functools import lru_cache
from typing import NamedTuple

ROOT = 0
# The largest that a client can ask for takes about a megabyte, and milliseconds to build.
_MAX_TABLES = 32


class Pushed(NamedTuple):
    """Text that is certain to belong to the answer, and the stop that ended it, if one has."""

    text: str
    matched: str | None


class StopStrings:
    """The stop strings of one sequence, and how far the text matches them.

    `stops` are non-empty strings; none at all is allowed. With `include` the matched stop stays in the text.
    Nothing is pushed after a match.
    """

    __slots__ = ("_held", "_include", "_matched", "_node", "_table")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._table = _table(stops)
        self._include = include
        self._node = ROOT
        self._held = ""
        self._matched = False

    def push(self, text: str) -> Pushed:
        """Take in more text; returns what is certain of it, up to the first match."""
        assert not self._matched, "text was pushed after a stop string had matched"
        table, node = self._table, self._node
        if node == ROOT and table.first_characters.isdisjoint(text):
            return Pushed(text, None)  # the common case, at the speed of a set
        num_held = len(self._held)
        text = self._held + text
        for end in range(num_held + 1, len(text) + 1):
            node = table.step(node, text[end - 1])
            stop = table.stop[node]
            if stop is not None:
                self._matched = True
                self._held = ""
                return Pushed(text[: end if self._include else end - len(stop)], stop)
        self._node = node
        certain = len(text) - table.depth[node]
        self._held = text[certain:]
        return Pushed(text[:certain], None)

    def flush(self) -> str:
        """The text has ended without a match; returns what was held back."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=_MAX_TABLES)
def _table(stops: tuple[str, ...]) -> "_Table":
    """Built once for all choices of a request; and programs send the same stops with each request."""
    return _Table(stops)


class _Table:
    """The automaton: a tree of all stops' beginnings, each node with its longest proper suffix in the tree.

    `depth[node]` is the length of the beginning it stands for; `stop[node]` the longest stop that ends there;
    `first_characters` are those that lead away from the root.
    Size and building time are linear in the stops' characters.
    """

    __slots__ = ("_children", "_suffix", "depth", "first_characters", "stop")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._suffix = [ROOT]
        self.depth = [0]
        self.stop: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self.first_characters = frozenset(self._children[ROOT])

    def step(self, node: int, char: str) -> int:
        """The node after reading `char`. Over a whole text, suffixes are followed less often than read."""
        children = self._children
        while char not in children[node]:
            if node == ROOT:
                return ROOT
            node = self._suffix[node]
        return children[node][char]

    def _insert(self, stop: str) -> None:
        node = ROOT
        for char in stop:
            child = self._children[node].setdefault(char, len(self._children))
            if child == len(self._children):
                self._children.append({})
                self._suffix.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.stop.append(None)
            node = child
        self.stop[node] = stop

    def _link(self) -> None:
        """Set suffixes breadth first: a suffix is shorter, so its own suffix and stop are set before."""
        queue = deque(self._children[ROOT].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._suffix[child] = self.step(self._suffix[node], char)
                if self.stop[child] is None:
                    self.stop[child] = self.stop[self._suffix[child]]
                queue.append(child)
