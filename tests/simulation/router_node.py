"""A router in the simulation: the duties of its scheduler client around the real session and request logs."""

from collections.abc import Callable

from protos.v1 import scheduler_pb2
from router import wire
from router.request_log import End as ChoiceEnd
from router.request_log import RequestLog
from router.scheduler_session import Event, Progressed, SchedulerSession, TokenizerIdentity
from tests.simulation.links import End, Link
from tests.simulation.scheduler_node import SchedulerNode
from tests.simulation.world import World

RECOVERY_TIMEOUT_SECONDS = 30.0


class RouterNode:
    """One router process, which never dies."""

    def __init__(
        self, world: World, name: str, scheduler: SchedulerNode, link: Link, vocab_size: int
    ) -> None:
        self.name = name
        self.session = SchedulerSession(
            router_id=name,
            tokenizer=TokenizerIdentity("", vocab_size),
            recovery_timeout_seconds=RECOVERY_TIMEOUT_SECONDS,
        )
        self._world = world
        self._rng = world.rng(name)
        self._scheduler = scheduler
        self._link = link
        self._wakes: dict[RequestLog, Callable[[], None]] = {}
        self._end: End | None = None
        self._connect()

    def submit(self, log: RequestLog, wake: Callable[[], None]) -> bool:
        """Takes a request in, unless the session refuses; `wake` is called when the log has news."""
        if self.session.refusal is not None:
            return False
        self.session.submit(log, self._world.now)
        log.accepted = True
        self._wakes[log] = wake
        self._pump()
        return True

    def release(self, log: RequestLog, end: ChoiceEnd) -> None:
        """The call is over; what has not ended is given up."""
        for choice in log.choices:
            self.session.cancel(choice.key, end, self._world.now)
        del self._wakes[log]
        self._pump()

    def _connect(self) -> None:
        end = self._end = self._link.connect(self._scheduler.accept)
        connection = self.session.connected()

        def receive(proto: scheduler_pb2.SchedulerMessage) -> None:
            message = wire.scheduler_message(proto)
            assert message is not None
            self._dispatch(self.session.receive(connection, message, self._world.now))
            self._pump()

        end.on_message = receive
        end.on_end = self._disconnected
        self._pump()

    def _disconnected(self, status: str) -> None:
        self._end = None
        self._dispatch(self.session.disconnected(f"it cannot be reached ({status})", self._world.now))
        self._world.after(self._rng.uniform(0.005, 0.05), self._connect)

    def _pump(self) -> None:
        while self._end is not None and (message := self.session.next_message(self._world.now)) is not None:
            self._end.send(wire.router_message(message))

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Progressed) and event.request in self._wakes:
                self._wakes[event.request]()
