"""A router in the simulation: the duties of its scheduler clients around the real sessions and logs."""

from collections.abc import Callable, Sequence

from protos.v1 import scheduler_pb2
from router import wire
from router.request_log import End as ChoiceEnd
from router.request_log import RequestLog
from router.scheduler_session import Event, Progressed, SchedulerSession, TokenizerIdentity
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
        self._wakes: dict[RequestLog, Callable[[], None]] = {}
        self._holders: dict[RequestLog, _Member] = {}
        self._orphans: list[Callable[[], None]] = []
        self.start()

    @property
    def num_live(self) -> int:
        return sum(member.session.num_live for member in self._members)

    def start(self) -> None:
        """A new process."""
        self.process.start()
        name = f"{self.process.name}#{self.process.life}"
        self._members = [_Member(self, name, node, link, self._vocab_size) for node, link in self._schedulers]
        for member in self._members:
            member.connect()

    def crash(self) -> None:
        """As by kill -9: its clients see their calls break."""
        self.process.crash()
        lost, self._orphans = self._orphans, []
        self._wakes, self._holders, self._members = {}, {}, []
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
        leader = self._leader
        if leader is None:
            self._orphans.remove(lost)
            refused()
            return
        self._wakes[log] = wake
        self._holders[log] = leader
        leader.submit(log)

    def _release(self, log: RequestLog, end: ChoiceEnd) -> None:
        if log in self._wakes:
            del self._wakes[log]
            self._holders.pop(log).release(log, end)

    def leave_streams(self) -> None:
        """Gives up every stream, for a new one."""
        for member in self._members:
            member.give_up_stream()

    # --- which scheduler ------------------------------------------------------------------------------

    @property
    def _leader(self) -> "_Member | None":
        """Of those that serve, the one of the highest term."""
        serving = [member for member in self._members if member.session.refusal is None]
        return max(serving, key=lambda member: member.term, default=None)

    def dispatch(self, events: list[Event]) -> None:
        """Tells clients, and brings requests that wait elsewhere to the scheduler that leads."""
        for event in events:
            if isinstance(event, Progressed) and event.request in self._wakes:
                self._wakes[event.request]()
        leader = self._leader
        if leader is None:
            return
        for log, holder in list(self._holders.items()):
            if holder is not leader:
                self.process.world.note(self.process.name, f"{log.request_id} moves to {leader.name}")
                holder.session.abandon(log)
                holder.pump()
                self._holders[log] = leader
                leader.submit(log)


class _Member:
    """The stream to one scheduler."""

    def __init__(
        self, router: RouterNode, router_id: str, scheduler: SchedulerNode, link: Link, vocab_size: int
    ) -> None:
        self.name = scheduler.name
        self.session = SchedulerSession(
            router_id=router_id,
            tokenizer=TokenizerIdentity("", vocab_size),
            recovery_timeout_seconds=RECOVERY_TIMEOUT_SECONDS,
        )
        self._router = router
        self._process = router.process
        self._rng = router.process.world.rng(f"{router_id} to {self.name}")
        self._scheduler = scheduler
        self._link = link
        self._end: End | None = None

    @property
    def term(self) -> int:
        return 0 if self.session.welcome is None else self.session.welcome.term

    def submit(self, log: RequestLog) -> None:
        self.session.submit(log, self._process.now)
        self.pump()

    def release(self, log: RequestLog, end: ChoiceEnd) -> None:
        for choice in log.choices:
            self.session.cancel(choice.key, end, self._process.now)
        self.pump()

    def connect(self) -> None:
        """A new stream, until it ends."""
        end = self._end = self._link.connect(self._scheduler.accept)
        connection = self.session.connected()

        def receive(proto: scheduler_pb2.SchedulerMessage) -> None:
            message = wire.scheduler_message(proto)
            assert message is not None
            events = self.session.receive(connection, message, self._process.now)
            self._router.dispatch(events)
            self.pump()

        end.on_message = receive
        end.on_end = self._disconnected
        self.pump()

    def give_up_stream(self) -> None:
        """Leaves the stream for a new one; what is on its way comes all the same, for a moment."""
        end = self._end
        if end is None:
            return
        self._process.after(STALE_SECONDS, end.close)
        end.on_end = lambda _: None
        self._disconnected("it was left")

    def _disconnected(self, status: str) -> None:
        self._end = None
        now = self._process.now
        self._router.dispatch(self.session.disconnected(f"it cannot be reached ({status})", now))
        self._process.after(self._rng.uniform(0.005, 0.05), self.connect)

    def pump(self) -> None:
        """Sends what the session has to say."""
        while self._end is not None and (message := self.session.next_message(self._process.now)) is not None:
            self._end.send(wire.router_message(message))
