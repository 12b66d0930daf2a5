"""The scheduler in the simulation: the duties of its loop, servicer and leadership around the real cores.

A result or a router's message that does not fit is a broken law here, so it raises, unless its executor lied.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from protos.v1 import executor_pb2, scheduler_pb2
from scheduler import audit, rehearsal, wire
from scheduler.core import SchedulerCore
from scheduler.door import RefusedError
from scheduler.executor_session import SessionBrokenError, check_ids
from scheduler.executor_state import ExecutorState
from scheduler.lease import Lease, Record, Role
from scheduler.parts import PartAssembler
from scheduler.plan import BatchPlan, Capacity
from scheduler.plan_builder import PlanBuilder
from scheduler.policy import Limits
from scheduler.promise import Promise
from scheduler.router_session import RouterSession, session_of, superseded, touch
from scheduler.sequence import Event, Finish, FinishReason, Sequence, StatusCode
from tests.simulation.executor_node import ExecutorNode
from tests.simulation.ledger import Bout, Ledger
from tests.simulation.links import UNAVAILABLE, End, Link
from tests.simulation.process import Process

RETRY_SECONDS = 0.05
REATTACH_SECONDS = 1.0
STEP_TIMEOUT_SECONDS = 0.3
READING_SECONDS = 0.01
MIN_LOOK_SECONDS = 0.005
MAX_FENCED_SECONDS = 0.4
ACTS_A_CHECK = 5
HELD, NOT_OPEN, ABORTED = "PERMISSION_DENIED", "FAILED_PRECONDITION", "ABORTED"
IN_USE_ELSEWHERE = Finish(FinishReason.ERROR, status_code=StatusCode.ALREADY_EXISTS)


class SharedLease:
    """The lease file as schedulers share it: one record, locked by a life of a process."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.record: Record | None = None
        self.leaders: dict[int, str] = {}  # by term
        self._owner: tuple[Process, int] | None = None

    @property
    def is_free(self) -> bool:
        return self._owner is None or not self._owner[0].is_up or self._owner[0].life != self._owner[1]

    def is_mine(self, process: Process) -> bool:
        return self._owner == (process, process.life)

    def claim(self, process: Process, record: Record) -> None:
        """Law: no term is led at twice."""
        assert record.term not in self.leaders, f"{process.name} leads at term {record.term} like another"
        self.leaders[record.term] = process.name
        self.record, self._owner = record, (process, process.life)

    def let_go(self, process: Process) -> None:
        if self.is_mine(process):
            self._owner = None


class WatchedCore(SchedulerCore):
    """The core, with the laws that only show between its calls."""

    def watch(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.bout: Bout | None = None  # in which an executor answered that is about to be lost
        self._given_up: dict[tuple[str, int, int], int] = {}  # executor, epoch, seq_id: newest plan then

    def preempt(self, state: ExecutorState, seq: Sequence, why: str) -> None:
        assert not state.session.unanswered, f"{seq.request.request_id} is preempted with a result out"
        self._ledger.num_preemptions[seq.token_ids[0]] += 1
        super().preempt(state, seq, why)

    def detach(self, executor_id: str, now: float, *, is_crash: bool = False) -> list[Sequence]:
        state = self.executors[executor_id]
        if is_crash:
            for seq in state.running.values():
                planned = sum(
                    count
                    for plan in state.session.unanswered
                    for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True)
                    if seq_id == seq.seq_id
                )
                if planned:
                    end = seq.num_computed_tokens
                    self._ledger.hit(seq.token_ids[0], end - planned, end, self.bout)
        return super().detach(executor_id, now, is_crash=is_crash)

    def _end_running(self, state: ExecutorState, seq: Sequence, finish: Finish, event: Event) -> None:
        if event in {Event.ABORT, Event.EXPIRE}:
            session = state.session
            self._given_up[state.executor_id, session.epoch, seq.seq_id] = session.last_step_id
        super()._end_running(state, seq, finish, event)

    def _plan(self, state: ExecutorState, builder: PlanBuilder) -> BatchPlan | None:
        plan = super()._plan(state, builder)
        if plan is not None:
            self._check_given_up(state, plan)
        return plan

    def _check_given_up(self, state: ExecutorState, plan: BatchPlan) -> None:
        """Law: whatever is given up is released within window + 1 plans, and computed no more."""
        for (executor_id, epoch, seq_id), last_step_id in list(self._given_up.items()):
            if executor_id != state.executor_id:
                continue
            if epoch != plan.epoch or seq_id in plan.released_seq_ids:
                del self._given_up[executor_id, epoch, seq_id]
            if epoch == plan.epoch:
                assert seq_id not in plan.seq_ids, f"sequence {seq_id} was given up and has a row"
            if (executor_id, epoch, seq_id) in self._given_up:
                assert plan.step_id <= last_step_id + state.session.window + 1, (
                    f"sequence {seq_id} was given up after plan {last_step_id} and is not released yet"
                )


class SchedulerNode:
    """One scheduler process, which may crash and start again under its name."""

    def __init__(
        self,
        process: Process,
        limits: Limits,
        executors: Seq[tuple[ExecutorNode, Link]],
        lease: SharedLease | None,
        ledger: Ledger,
    ) -> None:
        """`executors`: with the way to each. With a lease it leads or stands by."""
        self._ledger = ledger
        self.process = process
        self.name = process.name
        self.world = process.world
        self._limits = limits
        self._executors = executors
        self._shared = lease
        self._num_acts_checked = 0
        process.on_clock_jump = self._clock_jumped
        self.start()

    @property
    def now(self) -> float:
        return self.process.now

    @property
    def is_leading(self) -> bool:
        return self.process.is_up and (self._lease is None or self._lease.role is Role.LEADING)

    @property
    def is_serving(self) -> bool:
        return self.is_leading and bool(self.core.executors)

    # --- the process --------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, which remembers nothing."""
        self.process.start()
        self.core = WatchedCore(self._limits, padding_sampling=wire.padding_sampling())
        self.core.watch(self._ledger)
        self.capacity: Capacity | None = None
        self.term = 0
        self.num_step_downs = 0
        self._routers: dict[RouterSession, _RouterStream] = {}
        self._timer_at: float | None = None
        self._peers: list[_ExecutorPeer] = []
        self._lease = None if self._shared is None else Lease(self.name, self._shared.seconds)
        if self._lease is None:
            self._lead()
        else:
            self._look()

    def crash(self) -> None:
        """As by kill -9."""
        self.process.crash()

    def accept(self, end: End) -> None:
        """A router connects."""
        _RouterStream(self, end)

    def check_laws(self) -> None:
        """What must hold after whatever it did: looked at now and then, for what is broken stays so."""
        if self.process.is_up and self.process.num_acts >= self._num_acts_checked + ACTS_A_CHECK:
            self._num_acts_checked = self.process.num_acts
            audit.check(self.core)

    # --- leading and standing by ----------------------------------------------------------------------

    def _look(self) -> None:
        lease, shared = self._lease, self._shared
        assert lease is not None
        assert shared is not None
        claim = lease.look(shared.record, self.now, is_free=shared.is_free)
        if claim is None:
            self.process.after(lease.look_seconds, self._look)
            return
        shared.claim(self.process, claim.record)
        lease.claimed(claim)
        self.world.note(self.name, f"leads at term {lease.term}")
        self._lead()
        self.process.after(lease.beat_seconds, self._beat)

    def _beat(self) -> None:
        lease, shared = self._lease, self._shared
        assert lease is not None
        assert shared is not None
        if lease.role is not Role.LEADING:
            return
        record = lease.beat(self.now, is_mine=shared.is_mine(self.process))
        if record is None:
            self._step_down("another one has the lease")
        else:
            shared.record = record
            self.process.after(lease.beat_seconds, self._beat)

    def fenced(self) -> None:
        """An executor says that another scheduler holds it."""
        assert self._lease is not None, "a scheduler without a rival is told that there is one"
        if self._lease.role is Role.LEADING:
            # The term that the executor's refusal carries; here nobody but those of the lease gives terms.
            self._lease.fenced(self._lease.term, self.now)
            self._step_down("an executor is another's")

    def _lead(self) -> None:
        self._peers = [
            _ExecutorPeer(self, node, link, 0 if self._lease is None else self._lease.term)
            for node, link in self._executors
        ]
        for peer in self._peers:
            peer.open()

    def _step_down(self, why: str) -> None:
        assert self._lease is not None
        assert self._shared is not None
        self.world.note(self.name, f"steps down: {why}")
        for peer in self._peers:
            peer.leave()
        self._peers = []
        self._shared.let_go(self.process)
        self.num_step_downs += 1
        for key in list(self.core.sequences):
            self.core.cancel(key, FinishReason.ABORT, self.now)
        self.serving_changed()
        self.process.after(self._lease.look_seconds, self._look)

    # --- what the shell does between the calls of the core ------------------------------------------------

    def join(self, session: RouterSession, stream: "_RouterStream") -> None:
        over = superseded(session, self._routers)
        self._routers[session] = stream
        for older in over:
            older.is_superseded = True
            self._routers[older].flush()

    def leave(self, session: RouterSession) -> None:
        if session in self._routers:
            del self._routers[session]
            for seq in session.close():
                self.core.orphan(seq, self.now)
            self.changed()

    def deliver(self, sequences: Iterable[Sequence]) -> None:
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

    def _clock_jumped(self) -> None:
        self._timer_at = None
        self._arm_timer()
        for peer in self._peers:
            peer.look_at_steps()

    def _arm_timer(self) -> None:
        due = self.core.next_timer
        if due is None or (self._timer_at is not None and self._timer_at <= due):
            return
        self._timer_at = due
        self.process.after(max(0.0, due - self.now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = None
        ended = self.core.expire(self.now)
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
        self._num_step_downs = 0
        self._told: bool | None = None
        end.on_message = self._receive
        end.on_end = self._ended

    def _ended(self, _: str) -> None:
        if self._session is not None:
            self._scheduler.leave(self._session)

    def _receive(self, message: scheduler_pb2.RouterMessage) -> None:
        scheduler = self._scheduler
        if self._session is not None and self._session.is_superseded:
            return
        match message.WhichOneof("message"):
            case "hello":
                self._session = RouterSession(message.hello.router_id, message.hello.stream)
                scheduler.join(self._session, self)
            case "submit":
                self._submit(message.submit)
            case "cancel":
                self._cancel(message.cancel)
            case "ack":
                assert self._session is not None
                for seq in self._session.acked(message.ack.message_id):
                    scheduler.core.forget(seq)
        self.flush()

    def _cancel(self, message: scheduler_pb2.Cancel) -> None:
        session, scheduler = self._session, self._scheduler
        assert session is not None
        for handle in self._parts.give_up(message.key):
            session.refuse(handle, Finish(FinishReason.ABORT))
        live = scheduler.core.sequences.get(message.key)
        reader = None if live is None else session_of(live)
        if reader is not None and reader.router_id != session.router_id:
            return  # another router goes on with it
        seq = scheduler.core.cancel(message.key, wire.cancel_reason(message.reason), scheduler.now)
        if seq is not None:
            scheduler.deliver([seq])
            scheduler.changed()

    def _submit(self, message: scheduler_pb2.Submit) -> None:
        session, scheduler = self._session, self._scheduler
        assert session is not None
        token_ids = array("I", message.prompt_token_ids)
        if message.HasField("part"):
            part = message.part
            whole = self._parts.add(message.handle, part.index, part.count, message, message.key, token_ids)
            if whole is None:
                return
            message, token_ids = whole
        request = wire.request_of(message, token_ids, scheduler.now)
        received = array("I", message.output_token_ids)
        live = scheduler.core.sequences.get(request.key)
        reader = None if live is None else session_of(live)
        if reader is not None and reader.router_id != session.router_id and not request.accepted_before:
            session.refuse(message.handle, IN_USE_ELSEWHERE)
            return
        try:
            seq = scheduler.core.submit(request, received, now=scheduler.now)
        except RefusedError as error:
            finish = Finish(FinishReason.ERROR, message=error.message, status_code=error.status_code)
            session.refuse(message.handle, finish)
            return
        if live is not None and live is not seq:
            scheduler.deliver([live])
        name = f"{request.request_id}/{request.sample_index}"
        scheduler.world.note(scheduler.name, f"{name} comes with {len(received)} ids")
        session.attach(message.handle, seq, len(received))
        scheduler.changed()

    def flush(self) -> None:
        """Sends what is owed."""
        session, scheduler = self._session, self._scheduler
        if session is None or not self._end.is_open:
            return
        if session.is_superseded:
            self._end.close(ABORTED)
            scheduler.leave(session)
            return
        if self._is_welcomed and self._num_step_downs != scheduler.num_step_downs:
            self._end.close(UNAVAILABLE)
            scheduler.leave(session)
            return
        if not self._is_welcomed and scheduler.is_serving and scheduler.capacity is not None:
            self._is_welcomed = True
            self._num_step_downs = scheduler.num_step_downs
            core = scheduler.core
            promise = Promise.of(scheduler.capacity, core.max_total_tokens, core.features)
            self._end.send(wire.welcome_message(scheduler.name, scheduler.term, promise))
        if self._told != scheduler.is_serving:
            self._told = scheduler.is_serving
            self._end.send(wire.serving_message(scheduler.is_serving, "" if self._told else "no executor"))
        while (output := session.take(scheduler.now)) is not None:
            self._end.send(wire.output_message(output, 0))


class _ExecutorPeer:
    """One executor as the scheduler drives it: open, send plans, apply results, come back after a break."""

    def __init__(self, scheduler: SchedulerNode, node: ExecutorNode, link: Link, term: int) -> None:
        self._scheduler = scheduler
        self._node = node
        self._link = link
        self._term = term
        self._is_over = False  # the scheduler leads no longer
        self._end: End | None = None
        self._broken_since: float | None = None
        self._num_late = 0  # epochs in a row whose first step was late
        self._look_at: float | None = None  # when to look again whether a step is late
        self._plans_at: float | None = None  # when to ask again for a plan
        self._is_doubted = False  # it answered wrongly, and has not rehearsed well since
        self._rehearsing: SchedulerCore | None = None
        self._num_fenced = 0

    def open(self) -> None:
        """Takes the executor over, sooner or later."""
        if self._is_over:
            return
        request = executor_pb2.OpenRequest(
            scheduler_id=self._scheduler.name, term=self._term, protocol_revision=wire.PROTOCOL_REVISION
        )
        self._link.call(request, self._node.open, self._opened, self._open_failed)

    def leave(self) -> None:
        """Lets it go: another scheduler drives it."""
        self._is_over = True
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._node.name in self._scheduler.core.executors:
            self._scheduler.core.detach(self._node.name, self._scheduler.now)

    def _open_failed(self, status: str) -> None:
        if self._is_over:
            return
        if status == HELD:
            self._scheduler.fenced()
        self._scheduler.process.after(RETRY_SECONDS, self.open)

    def _opened(self, response: executor_pb2.OpenResponse) -> None:
        if self._is_over:
            return
        scheduler = self._scheduler
        self._broken_since = self._look_at = None
        if self._is_doubted:
            self._rehearse(response)
            return
        scheduler.capacity = wire.capacity_of(response)
        scheduler.term = max(scheduler.term, response.term)
        misfits = scheduler.core.attach(self._node.name, response.epoch, scheduler.capacity, scheduler.now)
        scheduler.serving_changed()
        scheduler.deliver(misfits)
        self._connect()

    def _rehearse(self, response: executor_pb2.OpenResponse) -> None:
        """It is given a request that nobody asked for."""
        core, now, capacity = SchedulerCore(), self._scheduler.now, wire.capacity_of(response)
        core.attach(self._node.name, response.epoch, capacity, now)
        count = rehearsal.num_tokens(core.max_total_tokens)
        core.submit(rehearsal.request(capacity, count, wire.greedy_sampling(count)), now=now)
        self._rehearsing = core
        self._scheduler.world.note(self._scheduler.name, f"has {self._node.name} rehearse")
        self._connect()

    def _rehearsed(self, core: SchedulerCore) -> None:
        assert self._end is not None
        self._end.close()
        self._end = self._rehearsing = None
        (seq,) = core.sequences.values()
        assert rehearsal.fault_of(seq) is None
        self._is_doubted, self._num_fenced = False, 0
        self.open()

    @property
    def _core(self) -> SchedulerCore:
        return self._scheduler.core if self._rehearsing is None else self._rehearsing

    def _connect(self) -> None:
        """A stream for the present epoch; what was not answered goes out first, byte for byte."""
        if self._is_over:
            return
        end = self._end = self._link.connect(self._node.accept)
        end.on_message = self._receive
        end.on_end = self._stream_ended
        state = self._state
        state.is_away = not self._node.process.is_up  # the connection tells
        state.clock.resumed(self._scheduler.now)
        for plan in state.session.resend():
            self._scheduler.world.note(self._scheduler.name, f"sends step {plan.step_id} again")
            end.send(wire.plan_message(plan))
        self.send_plans()

    @property
    def _state(self) -> ExecutorState:
        return self._core.executors[self._node.name]

    def send_plans(self) -> None:
        """As many as the core has and the window lets through; none to who is not there."""
        if self._end is None or self._state.is_away:
            return
        scheduler = self._scheduler
        while (plan := self._core.schedule(self._node.name, scheduler.now)) is not None:
            self._end.send(wire.plan_message(plan))
        state = self._state
        for look_at in (state.look_again_at, state.held_until):
            if look_at is not None:
                self._plan_again_at(max(look_at, scheduler.now + MIN_LOOK_SECONDS))
        self.look_at_steps()

    def _plan_again_at(self, when: float) -> None:
        now = self._scheduler.now
        if self._plans_at is None or not now < self._plans_at <= when:
            self._plans_at = when
            self._scheduler.process.after(when - now, self.send_plans)

    def look_at_steps(self) -> None:
        """Sees to it that a step that is late is noticed; a result may be here and not be read yet."""
        scheduler = self._scheduler
        if self._end is None:
            return
        state = self._state
        late_at = state.clock.late_at(STEP_TIMEOUT_SECONDS * 2.0**self._num_late)
        if late_at is None:
            return
        if scheduler.now >= late_at:
            step = state.session.epoch, state.session.unanswered[0].step_id
            scheduler.process.after(READING_SECONDS, lambda: self._give_up_late(step))
        elif self._look_at is None or not scheduler.now < self._look_at <= late_at:
            self._look_at = late_at
            scheduler.process.after(late_at - scheduler.now, self.look_at_steps)

    def _give_up_late(self, step: tuple[int, int]) -> None:
        if self._end is None:
            return
        session = self._state.session
        if not session.unanswered or (session.epoch, session.unanswered[0].step_id) != step:
            return
        self._num_late = 0 if session.acked_step_id else min(self._num_late + 1, 8)
        self._scheduler.world.note(
            self._scheduler.name, f"gives {self._node.name} up: step {step[1]} is late"
        )
        self._end.close()
        self._end = None
        self._lose(is_crash=True)

    def _receive(self, message: executor_pb2.StepResult) -> None:
        self._broken_since = None
        result, core, session = wire.result_of(message), self._core, self._state.session
        due = session.epoch, session.acked_step_id + 1
        try:
            check_ids(result, session.next_unanswered, self._state.capacity)
            outcome = core.update(self._node.name, result, self._scheduler.now)
        except SessionBrokenError as error:
            self._give_up_lying(due, error)
            return
        if core is self._rehearsing:
            if core.is_idle:
                self._rehearsed(core)
            else:
                self.send_plans()
            return
        self._scheduler.deliver(outcome.progressed)
        self._scheduler.deliver(outcome.ended)
        self._scheduler.changed()

    def _give_up_lying(self, step: tuple[int, int], error: SessionBrokenError) -> None:
        assert step in self._node.lies, f"what is right does not fit: {error}"
        bout = self._node.lies[step]
        self._scheduler.world.note(self._scheduler.name, f"gives {self._node.name} up: {error}")
        assert self._end is not None
        self._end.close()
        self._end = None
        self._is_doubted = True
        self._lose(is_crash=True, bout=None if bout is None else (self._node.name, bout))

    def _stream_ended(self, status: str) -> None:
        if self._is_over:
            return
        scheduler = self._scheduler
        self._end = None
        self._state.is_away = True
        if status == UNAVAILABLE:
            self._broken_since = scheduler.now if self._broken_since is None else self._broken_since
            if not self._state.is_draining and scheduler.now - self._broken_since < REATTACH_SECONDS:
                scheduler.process.after(RETRY_SECONDS / 4, self._connect)
                return
        assert status in {UNAVAILABLE, NOT_OPEN, HELD}, f"the executor ended the stream: {status}"
        if status == HELD:
            scheduler.fenced()
            return
        self._lose(is_crash=not self._state.is_draining)

    def _lose(self, *, is_crash: bool, bout: Bout | None = None) -> None:
        scheduler = self._scheduler
        if self._rehearsing is not None:
            self._rehearsing = None
            scheduler.world.note(scheduler.name, f"fences {self._node.name}")
            scheduler.process.after(min(MAX_FENCED_SECONDS, RETRY_SECONDS * 2.0**self._num_fenced), self.open)
            self._num_fenced += 1
            return
        scheduler.core.bout = bout
        scheduler.world.note(scheduler.name, f"has lost {self._node.name}")
        ended = scheduler.core.detach(self._node.name, scheduler.now, is_crash=is_crash)
        scheduler.serving_changed()
        scheduler.deliver(ended)
        scheduler.changed()
        self.open()
