"""The scheduler in the simulation: the duties of its loop and servicer around the real core and sessions.

A result or a router's message that does not fit is a broken law here, so it raises.
"""

from array import array
from collections.abc import Iterable, Sequence

from protos.v1 import executor_pb2, scheduler_pb2
from scheduler import audit, wire
from scheduler import core as scheduler_core
from scheduler.parts import PartAssembler
from scheduler.plan import Capacity
from scheduler.policy import Limits
from scheduler.router_session import RouterSession, touch
from scheduler.sequence import Finish, FinishReason
from scheduler.sequence import Sequence as Seq
from tests.simulation.executor_node import ExecutorNode
from tests.simulation.links import UNAVAILABLE, End, Link, RefusedError
from tests.simulation.world import World

RETRY_SECONDS = 0.05
REATTACH_SECONDS = 1.0


class SchedulerNode:
    """One scheduler process, which may crash and start again under its name."""

    def __init__(
        self, world: World, name: str, limits: Limits, executors: Sequence[tuple[ExecutorNode, Link]]
    ) -> None:
        """`executors` are its own, with the way to each."""
        self.name = name
        self.world = world
        self.links = [link for _, link in executors]
        """Ways to it and from it; they break when it crashes."""
        self.is_up = False
        self._limits = limits
        self._executors = executors
        self.start()

    @property
    def is_serving(self) -> bool:
        return bool(self.core.executors)

    # --- the process --------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, which remembers nothing."""
        assert not self.is_up
        self.world.note(self.name, "starts")
        self.is_up = True
        self.core = scheduler_core.SchedulerCore(self._limits, padding_sampling=wire.padding_sampling())
        self.capacity: Capacity | None = None
        self._routers: dict[RouterSession, _RouterStream] = {}
        self._timer_at: float | None = None
        self._peers = [_ExecutorPeer(self, node, link) for node, link in self._executors]
        for peer in self._peers:
            peer.open()

    def crash(self) -> None:
        """As by kill -9."""
        self.world.note(self.name, "crashes")
        self.is_up = False
        for peer in self._peers:
            peer.is_over = True
        self._peers = []
        for link in self.links:
            link.cut()

    def accept(self, end: End) -> None:
        """A router connects."""
        if not self.is_up:
            raise RefusedError(UNAVAILABLE)
        _RouterStream(self, end)

    def check_laws(self) -> None:
        """What must hold after every event."""
        audit.check(self.core)

    # --- what the shell does between the calls of the core ------------------------------------------------

    def join(self, session: RouterSession, stream: "_RouterStream") -> None:
        self._routers[session] = stream

    def leave(self, session: RouterSession) -> None:
        if session not in self._routers:
            return  # of a process that is gone
        del self._routers[session]
        for seq in session.close():
            self.core.orphan(seq, self.world.now)
        self.changed()

    def deliver(self, sequences: Iterable[Seq]) -> None:
        """These have news for their routers."""
        for session in dict.fromkeys(map(touch, sequences)):
            if session is not None:
                self._routers[session].flush()

    def changed(self) -> None:
        """Executors may have work, and a timer may have moved."""
        for peer in self._peers:
            peer.send_plans()
        self._arm_timer()

    def serving_changed(self) -> None:
        for stream in list(self._routers.values()):
            stream.flush()

    def _arm_timer(self) -> None:
        due = self.core.next_timer
        if due is None or (self._timer_at is not None and self._timer_at <= due):
            return
        self._timer_at = due
        core = self.core

        def ring() -> None:
            if core is self.core and self.is_up:
                self._on_timer()

        self.world.after(max(0.0, due - self.world.now), ring)

    def _on_timer(self) -> None:
        self._timer_at = None
        ended = self.core.expire(self.world.now)
        if ended:
            names = [seq.request.request_id for seq in ended]
            self.world.note(self.name, f"time is over for {names}")
        self.deliver(ended)
        self.changed()


class _RouterStream:
    """One Connect stream: what `scheduler.servicer` does for it."""

    def __init__(self, scheduler: SchedulerNode, end: End) -> None:
        self._scheduler = scheduler
        self._end = end
        self._session: RouterSession | None = None
        self._parts: PartAssembler[scheduler_pb2.Submit] = PartAssembler()
        self._is_welcomed = False
        self._told: bool | None = None
        end.on_message = self._receive
        end.on_end = self._ended

    def _ended(self, _: str) -> None:
        if self._session is not None:
            self._scheduler.leave(self._session)

    def _receive(self, message: scheduler_pb2.RouterMessage) -> None:
        core, now = self._scheduler.core, self._scheduler.world.now
        match message.WhichOneof("message"):
            case "hello":
                self._session = RouterSession(message.hello.router_id)
                self._scheduler.join(self._session, self)
            case "submit":
                self._submit(message.submit)
            case "cancel":
                assert self._session is not None
                for handle in self._parts.give_up(message.cancel.key):
                    self._session.refuse(handle, Finish(FinishReason.ABORT))
                seq = core.cancel(message.cancel.key, wire.cancel_reason(message.cancel.reason), now)
                if seq is not None:
                    self._scheduler.deliver([seq])
                    self._scheduler.changed()
            case "ack":
                assert self._session is not None
                for seq in self._session.acked(message.ack.message_id):
                    core.forget(seq)
        self.flush()

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        assert self._session is not None
        world = self._scheduler.world
        token_ids = array("I", message.prompt_token_ids)
        if message.HasField("part"):
            part = message.part
            whole = self._parts.add(message.handle, part.index, part.count, message, message.key, token_ids)
            if whole is None:
                return
            message, token_ids = whole
        request = wire.request_of(message, token_ids, world.now)
        received = array("I", message.output_token_ids)
        try:
            seq = self._scheduler.core.submit(request, received, now=world.now)
        except scheduler_core.RefusedError as error:
            finish = Finish(FinishReason.ERROR, message=error.message, status_code=error.status_code)
            self._session.refuse(message.handle, finish)
            return
        world.note(
            self._scheduler.name,
            f"{request.request_id}/{request.sample_index} comes with {len(received)} ids",
        )
        self._session.attach(message.handle, seq, len(received))
        self._scheduler.changed()

    def flush(self) -> None:
        """Sends what is owed."""
        session, scheduler = self._session, self._scheduler
        if session is None or not self._end.is_open:
            return
        if not self._is_welcomed and scheduler.is_serving and scheduler.capacity is not None:
            self._is_welcomed = True
            core, capacity = scheduler.core, scheduler.capacity
            self._end.send(
                wire.welcome_message(scheduler.name, 1, core.max_total_tokens, capacity, core.features)
            )
        if self._told != scheduler.is_serving:
            self._told = scheduler.is_serving
            self._end.send(wire.serving_message(scheduler.is_serving, "" if self._told else "no executor"))
        while (output := session.take(scheduler.world.now)) is not None:
            self._end.send(wire.output_message(output, 0))


class _ExecutorPeer:
    """One executor as the scheduler drives it: open, send plans, apply results, come back after a break."""

    def __init__(self, scheduler: SchedulerNode, node: ExecutorNode, link: Link) -> None:
        self._scheduler = scheduler
        self._node = node
        self._link = link
        self.is_over = False
        """The scheduler's process that held it is gone."""
        self._end: End | None = None
        self._broken_since: float | None = None

    def open(self) -> None:
        """Takes the executor over, sooner or later."""
        if self.is_over:
            return
        request = executor_pb2.OpenRequest(
            scheduler_id=self._scheduler.name, protocol_revision=wire.PROTOCOL_REVISION
        )
        self._link.call(request, self._node.open, self._opened, self._open_failed)

    def _open_failed(self, _: str) -> None:
        self._scheduler.world.after(RETRY_SECONDS, self.open)

    def _opened(self, response: executor_pb2.OpenResponse) -> None:
        if self.is_over:
            return
        scheduler = self._scheduler
        scheduler.capacity = wire.capacity_of(response)
        misfits = scheduler.core.attach(
            self._node.name, response.epoch, scheduler.capacity, scheduler.world.now
        )
        self._broken_since = None
        scheduler.serving_changed()
        scheduler.deliver(misfits)
        self._connect()

    def _connect(self) -> None:
        """A stream for the present epoch; what was not answered goes out first, byte for byte."""
        if self.is_over:
            return
        end = self._end = self._link.connect(self._node.accept)
        end.on_message = self._receive
        end.on_end = self._stream_ended
        session = self._scheduler.core.executors[self._node.name].session
        for plan in session.resend():
            self._scheduler.world.note(self._scheduler.name, f"sends step {plan.step_id} again")
            end.send(wire.plan_message(plan))
        self.send_plans()

    def send_plans(self) -> None:
        """As many as the core has and the window lets through."""
        core, world = self._scheduler.core, self._scheduler.world
        while self._end is not None and (plan := core.schedule(self._node.name, world.now)) is not None:
            self._end.send(wire.plan_message(plan))

    def _receive(self, message: executor_pb2.StepResult) -> None:
        self._broken_since = None
        outcome = self._scheduler.core.update(
            self._node.name, wire.result_of(message), self._scheduler.world.now
        )
        self._scheduler.deliver(outcome.progressed)
        self._scheduler.deliver(outcome.ended)
        self._scheduler.changed()

    def _stream_ended(self, status: str) -> None:
        if self.is_over:
            return
        world = self._scheduler.world
        self._end = None
        if status == UNAVAILABLE:
            self._broken_since = world.now if self._broken_since is None else self._broken_since
            if world.now - self._broken_since < REATTACH_SECONDS:
                world.after(RETRY_SECONDS / 4, self._connect)
                return
        assert status in {UNAVAILABLE, "FAILED_PRECONDITION"}, f"the executor ended the stream: {status}"
        world.note(self._scheduler.name, f"has lost {self._node.name}")
        self._scheduler.core.detach(self._node.name, world.now)
        self._scheduler.serving_changed()
        self._scheduler.changed()
        self.open()
