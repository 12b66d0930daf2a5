"""What lies between two nodes: streams and calls that take time, and break.

A stream is one gRPC call: its messages arrive in order, each after a delay of its own. It ends by the word of
one side, which comes behind the messages, or is cut: what is under way is lost, and each side learns of it in
its own time, so for a while one of them still believes in it. Messages cross as bytes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from tests.simulation.world import World

M = TypeVar("M", bound=Message)
UNAVAILABLE = "UNAVAILABLE"


class RefusedError(Exception):
    """A node does not take a call; its text is the status."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long a message takes, seconds."""

    least: float
    most: float

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.least, self.most)


class End:
    """One side of a stream, as its node holds it."""

    def __init__(self, link: "Link", who: str) -> None:
        self.who = who
        self.peer: End
        self.is_open = True
        """Whether this side believes in the stream."""
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_end: Callable[[str], None] = lambda _: None
        self._link = link
        self._arrivals = 0.0  # nothing more arrives at this end before that

    def send(self, message: Message) -> None:
        """To the other side; whether it arrives is another matter."""
        data = message.SerializeToString(deterministic=True)
        kind = type(message)
        self.peer.arrive(lambda: self.peer.on_message(kind.FromString(data)))

    def close(self, status: str = "OK") -> None:
        """Ends the stream from this side; the other one learns the status after all that was sent before."""
        if self.is_open:
            self.is_open = False
            self.peer.arrive(lambda: self.peer.ended(status))
            self._link.forget(self)

    def arrive(self, action: Callable[[], None]) -> None:
        """Does `action` here when its time has come, if the stream still lives then."""
        world = self._link.world
        self._arrivals = max(self._arrivals, world.now + self._link.draw_delay())

        def act() -> None:
            if self.is_open and not self._link.is_cut(self):
                action()

        world.after(self._arrivals - world.now, act)

    def ended(self, status: str) -> None:
        """The stream is over, and this side learns it now."""
        if self.is_open:
            self.is_open = False
            self._link.forget(self)
            self._link.world.note(self.who, f"stream of {self._link.name} ended: {status}")
            self.on_end(status)


class Link:
    """The way from a client node to a server node."""

    def __init__(self, world: World, name: str, delay: Delay) -> None:
        self.world = world
        self.name = name
        self._delay = delay
        self._rng = world.rng(f"link {name}")
        self._alive: list[End] = []  # both ends of each stream that was neither closed nor cut
        self._cut: list[End] = []  # ends that do not know yet that their stream was cut

    def draw_delay(self) -> float:
        return self._delay.draw(self._rng)

    def connect(self, accept: Callable[[End], None]) -> End:
        """A new stream; the server's node gets its end in `accept`, which may raise RefusedError."""
        client, server = End(self, self.name.split(" ")[0]), End(self, self.name.split(" ")[-1])
        client.peer, server.peer = server, client
        self._alive += [client, server]

        def arrive() -> None:
            try:
                accept(server)
            except RefusedError as refusal:
                server.close(str(refusal))

        server.arrive(arrive)
        return client

    def call(
        self,
        request: M,
        handle: Callable[[M], Message],
        on_answer: Callable[[Any], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """A unary call: `handle` runs at the server and may raise RefusedError."""

        def arrive() -> None:
            try:
                answer = handle(type(request).FromString(request.SerializeToString()))
            except RefusedError as refusal:
                status = str(refusal)
                self.world.after(self.draw_delay(), lambda: on_failure(status))
            else:
                self.world.after(self.draw_delay(), lambda: on_answer(answer))

        self.world.after(self.draw_delay(), arrive)

    def cut(self) -> None:
        """Breaks every stream: what is under way is lost, each side learns it in its own time."""
        if not self._alive:
            return
        self.world.note(self.name, "is cut")
        for end in self._alive:
            self._cut.append(end)
            self.world.after(self.draw_delay(), partial(end.ended, UNAVAILABLE))
        self._alive = []

    def is_cut(self, end: End) -> bool:
        return end in self._cut

    def forget(self, end: End) -> None:
        """One side has left; its stream carries what was sent, and nothing new."""
        for ends in (self._alive, self._cut):
            if end in ends:
                ends.remove(end)
