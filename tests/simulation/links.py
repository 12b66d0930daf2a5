"""What lies between two processes: streams and calls that take time, and break.

A stream is one gRPC call: its messages arrive in order, each after a delay of its own. It ends by the word of
one side, which comes behind the messages, or is cut: what is under way is lost, and each side learns of it in
its own time, so for a while one of them still believes in it. Messages cross as bytes. What may come twice by
the contract sometimes does; a unary call may be lost on the way there or back, or arrive twice.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos.v1 import executor_pb2, scheduler_pb2
from tests.simulation.process import Process

M = TypeVar("M", bound=Message)
UNAVAILABLE = "UNAVAILABLE"
CALL_TIMEOUT_SECONDS = 0.5
_MAY_COME_TWICE = (executor_pb2.BatchPlan, executor_pb2.StepResult)


class RefusedError(Exception):
    """A node does not take a call; its text is the status."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long a message takes, seconds."""

    least: float
    most: float

    def draw(self, rng: random.Random) -> float:
        return self.least + (self.most - self.least) * rng.random()


class End:
    """One side of a stream, as its node holds it."""

    __slots__ = (
        "_arrivals",
        "_life",
        "_link",
        "_process",
        "is_cut",
        "is_open",
        "on_end",
        "on_message",
        "peer",
    )

    def __init__(self, link: "Link", process: Process) -> None:
        self.peer: End
        self.is_open = True
        """Whether this side believes in the stream."""
        self.is_cut = False
        """Whether it is broken, and this side does not know yet."""
        self.on_message: Callable[[Any], None] = _ignore
        self.on_end: Callable[[str], None] = _ignore
        self._link = link
        self._process = process
        self._life = process.life
        self._arrivals = 0.0  # nothing more arrives at this end before that

    def send(self, message: Message) -> None:
        """To the other side; whether it arrives is another matter."""
        data = message.SerializeToString(deterministic=True)
        kind, peer = type(message), self.peer
        peer.arrive(lambda: peer.on_message(kind.FromString(data)))
        if self._link.doubles(message):
            peer.arrive(lambda: peer.on_message(kind.FromString(data)))

    def close(self, status: str = "OK") -> None:
        """Ends the stream from this side; the other one learns the status after all that was sent before."""
        if self.is_open:
            self.is_open = False
            peer = self.peer
            peer.arrive(lambda: peer.ended(status))

    def arrive(self, action: Callable[[], None]) -> None:
        """Does `action` here when its time has come, if the stream still lives then."""
        world = self._link.world
        self._arrivals = max(self._arrivals, world.now + self._link.draw_delay())

        def act() -> None:
            if self.is_open and not self.is_cut:
                action()

        world.at(self._arrivals, lambda: self._process.act(act, self._life))

    def hold_up(self, seconds: float) -> None:
        """What is sent to this side from now on arrives later: something was lost on the way."""
        self._arrivals = max(self._arrivals, self._link.world.now + seconds)

    def ended(self, status: str) -> None:
        """The stream is over, and this side learns it now."""
        if self.is_open:
            self.is_open = False
            self._link.world.note(self._process.name, f"stream of {self._link.name} ended: {status}")
            self.on_end(status)

    def cut(self) -> None:
        """What is under way to this side is lost; it learns so a little later."""
        self.is_cut = True
        self._link.world.after(
            self._link.draw_delay(), lambda: self._process.act(lambda: self.ended(UNAVAILABLE), self._life)
        )


def _ignore(_: object) -> None:
    """Nobody listens yet."""


class Link:
    """The way from a client process to a server process."""

    def __init__(
        self, client: Process, server: Process, delay: Delay, *, doubled: float = 0.0, lost: float = 0.0
    ) -> None:
        """`doubled`: share of messages that come twice, where that may be; `lost`: share of calls lost."""
        self.world = client.world
        self.name = f"{client.name} to {server.name}"
        self._client = client
        self._server = server
        self._delay = delay
        self._doubled = doubled
        self._lost = lost
        self._slow_until = 0.0
        self._rng = self.world.rng(f"link {self.name}")
        self._ends: list[End] = []  # of streams that were not cut
        client.links.append(self)
        server.links.append(self)

    def draw_delay(self) -> float:
        slow = 20.0 if self.world.now < self._slow_until else 1.0
        return self._delay.draw(self._rng) * slow

    def doubles(self, message: Message) -> bool:
        """Whether this message is to come twice."""
        if not self._doubled:
            return False
        may = isinstance(message, _MAY_COME_TWICE) or (
            isinstance(message, scheduler_pb2.SchedulerMessage) and message.HasField("step_output")
        )
        return may and self._rng.random() < self._doubled

    def slow_down(self, seconds: float) -> None:
        """Everything takes long for a while."""
        self.world.note(self.name, "is slow")
        self._slow_until = self.world.now + seconds

    def connect(self, accept: Callable[[End], None]) -> End:
        """A new stream; the server's node gets its end in `accept`, which may raise RefusedError."""
        client, server = End(self, self._client), End(self, self._server)
        client.peer, server.peer = server, client
        self._ends = [end for end in self._ends if end.is_open or end.peer.is_open]
        self._ends += [client, server]

        def arrive() -> None:
            try:
                accept(server)
            except RefusedError as refusal:
                server.close(str(refusal))

        if self._server.is_up:
            server.arrive(arrive)
        else:
            client.arrive(lambda: client.ended(UNAVAILABLE))
        return client

    def call(
        self,
        request: M,
        handle: Callable[[M], Message],
        on_answer: Callable[[Any], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """A unary call: `handle` runs at the server and may raise RefusedError."""
        finish = self._once_at_client()

        def arrive() -> None:
            try:
                answer = handle(type(request).FromString(request.SerializeToString()))
            except RefusedError as refusal:
                status = str(refusal)
                finish(lambda: on_failure(status))
            else:
                if self._rng.random() >= self._lost:
                    finish(lambda: on_answer(answer))

        if not self._server.is_up:
            finish(lambda: on_failure(UNAVAILABLE))
        life = self._server.life
        for _ in range(1 + (self._rng.random() < self._doubled)):
            if self._rng.random() >= self._lost:
                self.world.after(self.draw_delay(), lambda: self._server.act(arrive, life))
        self.world.after(CALL_TIMEOUT_SECONDS, lambda: finish(lambda: on_failure(UNAVAILABLE)))

    def _once_at_client(self) -> Callable[[Callable[[], None]], None]:
        """Takes what is to be done at the client when an answer is there; the first one counts."""
        life = self._client.life
        is_over = False

        def finish(action: Callable[[], None]) -> None:
            def act() -> None:
                nonlocal is_over
                if not is_over:
                    is_over = True
                    action()

            self.world.after(self.draw_delay(), lambda: self._client.act(act, life))

        return finish

    def cut(self) -> None:
        """Breaks every stream: what is under way is lost, each side learns it in its own time."""
        broken = [end for end in self._ends if end.is_open and not end.is_cut]
        if broken:
            self.world.note(self.name, "is cut")
            for end in broken:
                end.cut()
        self._ends = []
