"""A router in the simulation: the duties of its scheduler clients around the real sessions and logs."""

from collections.abc import Callable, Sequence
from typing import cast

from protos.v1 import scheduler_pb2
from router import wire
from router.request_log import End as ChoiceEnd
from router.request_log import RequestLog
from router.scheduler_client import SchedulerClient
from router.scheduler_pool import SchedulerPool, placing_name
from router.scheduler_session import Event, Progressed, SchedulerSession, ServingChanged, TokenizerIdentity
from rpc.address import Address
from tests.simulation.links import End, Link
from tests.simulation.process import Process
from tests.simulation.scheduler_node import SchedulerNode

RECOVERY_TIMEOUT_SECONDS = 30.0
STALE_SECONDS = 0.05


class RouterNode:
    """One router process, which may crash and start again."""

    def __init__(
        self, process: Process, schedulers: Sequence[tuple[SchedulerNode, Link]], vocab_size: int
    ) -> None:
        """`schedulers`: one and its standbys, with the way to each."""
        self.process = process
        self._schedulers = schedulers
        self._vocab_size = vocab_size
        self._orphans: list[Callable[[], None]] = []
        self.start()

    @property
    def num_live(self) -> int:
        return sum(member.session.num_live for member in self._members)

    def start(self) -> None:
        """A new process."""
        self.process.start()
        name = f"{self.process.name}#{self.process.life}"
        self._members = [
            _Member(self.process, name, node, link, self._vocab_size) for node, link in self._schedulers
        ]
        # It asks nothing of its clients that these cannot tell.
        self._pool = SchedulerPool(cast("list[SchedulerClient]", self._members))
        for member in self._members:
            member.connect()

    def crash(self) -> None:
        """As by kill -9: its clients see their calls break."""
        self.process.crash()
        lost, self._orphans = self._orphans, []
        self._members = []
        for tell in lost:
            self.process.world.after(0.001, tell)

    # --- what clients ask -----------------------------------------------------------------------------

    def submit(
        self,
        log: RequestLog,
        *,
        wake: Callable[[], None],
        refused: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        """Takes a request in. `wake`: the log has news; `lost`: the router has crashed."""
        if not self.process.is_up:
            self.process.world.after(0.001, refused)
            return
        self._orphans.append(lost)
        self.process.act(lambda: self._submit(log, wake, refused, lost))

    def release(self, log: RequestLog, end: ChoiceEnd) -> None:
        """The call is over; what has not ended is given up."""
        self.process.act(lambda: self._release(log, end))

    def _submit(
        self,
        log: RequestLog,
        wake: Callable[[], None],
        refused: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        if self._pool.refusal is not None:
            self._orphans.remove(lost)
            refused()
            return
        name = placing_name(log.tenant, log.prompt_token_ids)
        self._pool.submit(self._pool.place(name), log, wake)

    def _release(self, log: RequestLog, end: ChoiceEnd) -> None:
        self._pool.release(log, end)

    def hold_up_streams(self, seconds: float) -> None:
        """What it sends on its present streams is held up for a while."""
        for member in self._members:
            member.hold_up_stream(seconds)

    def leave_streams(self) -> None:
        """Gives up every stream, for a new one."""
        for member in self._members:
            member.give_up_stream()


class _Member:
    """The stream to one scheduler: what `scheduler_client` is in the server."""

    def __init__(
        self, process: Process, router_id: str, scheduler: SchedulerNode, link: Link, vocab_size: int
    ) -> None:
        self.address = Address(scheduler.name)
        self.shard = "the only one"
        self.on_changed: Callable[[], None] = lambda: None
        self.session = SchedulerSession(
            router_id=router_id,
            tokenizer=TokenizerIdentity("", vocab_size),
            recovery_timeout_seconds=RECOVERY_TIMEOUT_SECONDS,
        )
        self._process = process
        self._rng = process.world.rng(f"{router_id} to {scheduler.name}")
        self._scheduler = scheduler
        self._link = link
        self._end: End | None = None
        self._wakes: dict[RequestLog, Callable[[], None]] = {}

    @property
    def term(self) -> int:
        return 0 if self.session.welcome is None else self.session.welcome.term

    @property
    def refusal(self) -> str | None:
        return self.session.refusal

    @property
    def is_lost(self) -> bool:
        return False  # there is no other shard to go to

    @property
    def requests(self) -> list[RequestLog]:
        return self.session.requests

    @property
    def num_live(self) -> int:
        return self.session.num_live

    def submit(self, log: RequestLog, wake: Callable[[], None]) -> None:
        self.session.submit(log, self._process.now)
        self._wakes[log] = wake
        self.pump()

    def release(self, log: RequestLog, end: ChoiceEnd) -> None:
        if self._wakes.pop(log, None) is not None:
            for choice in log.choices:
                self.session.cancel(choice.key, end, self._process.now)
            self.pump()

    def abandon(self, log: RequestLog) -> Callable[[], None]:
        self._process.world.note(self._process.name, f"{log.request_id} leaves {self.address.target}")
        self.session.abandon(log)
        self.pump()
        return self._wakes.pop(log)

    def connect(self) -> None:
        """A new stream, until it ends."""
        end = self._end = self._link.connect(self._scheduler.accept)
        connection = self.session.connected()

        def receive(proto: scheduler_pb2.SchedulerMessage) -> None:
            message = wire.scheduler_message(proto)
            assert message is not None
            events = self.session.receive(connection, message, self._process.now)
            self._dispatch(events)
            self.pump()

        end.on_message = receive
        end.on_end = self._disconnected
        self.pump()

    def hold_up_stream(self, seconds: float) -> None:
        if self._end is not None:
            self._end.peer.hold_up(seconds)

    def give_up_stream(self) -> None:
        """Leaves the stream for a new one; what is under way on it comes all the same, for a moment."""
        end = self._end
        if end is None:
            return
        self._process.after(STALE_SECONDS, end.close)
        end.on_end = lambda _: None
        self._disconnected("it was left")

    def _disconnected(self, status: str) -> None:
        self._end = None
        now = self._process.now
        self._dispatch(self.session.disconnected(f"it cannot be reached ({status})", now))
        self._process.after(self._rng.uniform(0.005, 0.05), self.connect)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Progressed(request):
                    if request in self._wakes:
                        self._wakes[request]()
                case ServingChanged():
                    self.on_changed()

    def pump(self) -> None:
        """Sends what the session has to say."""
        while self._end is not None and (message := self.session.next_message(self._process.now)) is not None:
            self._end.send(wire.router_message(message))
