"""An executor in the simulation: the real session and sequence table, a scripted model, virtual step times.

A plan that does not fit is a broken law here, so it raises instead of ending the epoch. Requests are known by
the first id of their prompts.
"""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import accumulate

from executor import wire
from executor.device import StepTimings
from executor.plan import DRAFT_TOKENS, BatchPlan
from executor.sequences import SequenceTable
from executor.session import Answer, Held, NotOpen, Run, Session, Superseded
from executor.work import EpochWork
from protos.v1 import common_pb2, executor_pb2
from tests.rig.scripted_executor import Script, ScriptedRunner
from tests.simulation.links import End, RefusedError
from tests.simulation.process import Process

FIRST_ID_OF_NOBODY = 250  # prompts of clients begin with less, a rehearsal's does not
_STATUS = {Held: "PERMISSION_DENIED", NotOpen: "FAILED_PRECONDITION", Superseded: "ABORTED"}


class ExecutorNode:
    """One executor process, which may crash and start again."""

    def __init__(
        self, process: Process, script: Script, deadly: Mapping[int, int], unfit: Mapping[int, int]
    ) -> None:
        """`deadly`: it dies of computing these positions of these requests; `unfit`: it answers wrongly."""
        self.process = process
        self.name = process.name
        self.work: EpochWork | None = None
        self.num_steps = 0
        self.num_deaths = 0
        """Of what it computed."""
        self.num_computed: Counter[int] = Counter()
        """Tokens, by request, in all its lives."""
        self.lies: dict[tuple[int, int], int | None] = {}
        """Steps (epoch, step_id) that it answered wrongly; in which bout, if not for what it computed."""
        self.num_bouts = 0
        self._lied: dict[int, int | None] = {}  # the same by epoch, of those with a client's row
        self._deadly = deadly
        self._unfit = unfit
        self._slow_until = self._lies_until = 0.0
        self._world = process.world
        self._script = script
        self._rng = self._world.rng(self.name)
        self._lie_rng = self._world.rng(f"lies of {self.name}")
        self._seen: dict[tuple[int, int], bytes] = {}
        self._ran: set[tuple[int, int]] = set()
        self.start()

    @property
    def num_held(self) -> int:
        """Sequences and ghosts it still remembers."""
        return 0 if self.work is None else self.work.table.num_sequences + self.work.table.num_ghosts

    # --- the process --------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, empty."""
        self.process.start()
        self._terms: dict[int, int] = {}  # by epoch
        self._holders: dict[int, str] = {}  # by term
        self._seq_ids: set[tuple[int, int]] = set()  # epoch, seq_id
        self._runner = ScriptedRunner(self._script)
        self._session: Session[executor_pb2.StepResult] = Session(self._script.window)
        self._ends: dict[int, End] = {}
        self._device: deque[tuple[EpochWork, BatchPlan]] = deque()
        self._reached: dict[int, tuple[int, int]] = {}  # request and next position, by seq_id
        self._leaves_at: float | None = None

    def slow_down(self, seconds: float, factor: float) -> None:
        """Steps that begin in this time take so many times as long."""
        self._world.note(self.name, f"is {factor:.0f} times slower for {seconds * 1000:.0f} ms")
        self._slow_until, self._slow_factor = self._world.now + seconds, factor

    def lie(self, seconds: float) -> None:
        """Whatever it answers in this time does not fit, also after a restart."""
        self._world.note(self.name, f"answers wrongly for {seconds * 1000:.0f} ms")
        self.num_bouts += self._world.now >= self._lies_until
        self._lies_until = max(self._lies_until, self._world.now + seconds)

    @property
    def is_draining(self) -> bool:
        """Whether it tells that it will leave."""
        return self._leaves_at is not None

    def drain(self, seconds: float) -> None:
        """It tells from now on that it leaves in so long."""
        self._world.note(self.name, f"drains, and leaves in {seconds * 1000:.0f} ms")
        self._leaves_at = self._world.now + seconds

    @property
    def num_lies(self) -> Counter[bool]:
        """Epochs that it broke by answering clients' requests wrongly, by whether it did so in a bout."""
        return Counter(bout is not None for bout in self._lied.values())

    def crash(self) -> None:
        """As by kill -9."""
        self._retire()
        self.process.crash()

    def _retire(self) -> None:
        if self.work is not None:
            self.work.is_over = True
            self.work = None

    # --- the protocol -------------------------------------------------------------------------------

    def open(self, request: executor_pb2.OpenRequest) -> executor_pb2.OpenResponse:
        """The call Open."""
        past_epoch, epoch = self._session.epoch, self._rng.getrandbits(63) + 1
        try:
            term = self._session.open(request.scheduler_id, request.term, epoch)
        except Held:
            raise RefusedError(_STATUS[Held]) from None
        self._world.note(self.name, f"opened by {request.scheduler_id}, term {term}")
        self._check_term(request.scheduler_id, term)
        self._terms[epoch] = term
        self._retire()
        self._reached = {}
        if past_epoch is not None:
            status = _STATUS[type(self._session.refusal(past_epoch))]
            for end in self._ends.values():
                end.close(status)
            self._ends.clear()
        self.work = EpochWork(
            self._runner,
            SequenceTable(
                num_blocks=self._script.num_blocks,
                block_size=self._script.block_size,
                max_num_seqs=self._script.max_num_seqs,
                max_num_batched_tokens=self._script.max_num_batched_tokens,
                max_seq_len=self._script.max_seq_len,
                vocab_size=self._script.vocab_size,
                eos_token_ids=self._script.eos_token_ids,
                takes_draft_tokens=DRAFT_TOKENS in self._script.features,
            ),
        )
        return wire.open_response(
            self._runner,
            epoch=epoch,
            instance_id=self.name,
            term=term,
            max_num_seqs=self._script.max_num_seqs,
            max_num_batched_tokens=self._script.max_num_batched_tokens,
            max_window=self._script.window,
        )

    def accept(self, end: End) -> None:
        """A new stream Execute."""
        stream = self._session.attach()
        session = self._session

        def on_end(_: str) -> None:
            session.detach(stream)
            if session is self._session:
                self._ends.pop(stream, None)

        self._ends[stream] = end
        end.on_message = lambda message: self._receive(stream, end, message)
        end.on_end = on_end

    def _receive(self, stream: int, end: End, message: executor_pb2.BatchPlan) -> None:
        self._check_resent(message)
        plan = wire.plan_from_proto(message)
        before = self._session.current_stream
        try:
            action = self._session.receive(stream, plan)
        except (Held, NotOpen, Superseded) as refusal:
            end.close(_STATUS[type(refusal)])
            self._ends.pop(stream, None)
            self._session.detach(stream)
            return
        if before is not None and before != stream:
            self._ends.pop(before).close(_STATUS[Superseded])
        match action:
            case Answer(result):
                self._world.note(self.name, f"step {plan.step_id} is answered again")
                end.send(result)
            case Run():
                assert self.work is not None
                self._check_new(plan)
                self._device.append((self.work, plan))
                if len(self._device) == 1:
                    self._begin_step()

    def _check_resent(self, message: executor_pb2.BatchPlan) -> None:
        """Law: a plan that comes again comes byte for byte."""
        data = message.SerializeToString(deterministic=True)
        first = self._seen.setdefault((message.epoch, message.step_id), data)
        assert first == data, f"step {message.step_id} came again and differs"

    def _check_term(self, scheduler_id: str, term: int) -> None:
        """Law: terms only rise, and none has two holders."""
        assert term >= max(self._terms.values(), default=0), f"{self.name} went back to term {term}"
        holder = self._holders.setdefault(term, scheduler_id)
        assert holder == scheduler_id, f"{holder} and {scheduler_id} both hold {self.name} at term {term}"

    def _check_new(self, plan: BatchPlan) -> None:
        """Laws: no step runs twice, none of an older term, and no seq_id is used twice in an epoch."""
        step = (plan.epoch, plan.step_id)
        assert step not in self._ran, f"step {plan.step_id} runs a second time"
        self._ran.add(step)
        term = self._terms.get(plan.epoch)
        assert term == max(self._terms.values()), f"a plan of term {term} runs, the newest is {self._terms}"
        for new in plan.admitted:
            named = (plan.epoch, new.seq_id)
            assert named not in self._seq_ids, f"seq_id {new.seq_id} is used a second time"
            self._seq_ids.add(named)

    # --- the device ---------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        _, plan = self._device[0]
        device = self._device
        seconds = self._rng.uniform(0.5, 1.5) * (0.004 + 0.0002 * sum(plan.num_tokens))
        if self._world.now < self._slow_until:
            seconds *= self._slow_factor

        def end_step() -> None:
            if device is self._device:  # else the process that began it is gone
                self._end_step(seconds)

        self.process.after(seconds, end_step)

    def _end_step(self, seconds: float) -> None:
        work, plan = self._device.popleft()
        if not work.is_over:
            reached = self._advance(plan)
            if _is_met(self._deadly, reached):
                self._world.note(self.name, f"dies of step {plan.step_id}")
                self.num_deaths += 1
                self.crash()
                self._world.after(self._rng.uniform(0.0, 0.3), self.start)
                return
            for new in plan.admitted:
                self._runner.admit(new)
            result, _ = work.execute(plan)
            for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
                request, begin = self._reached[seq_id]
                num_right = max(0, count - 1)
                self._reached[seq_id] = request, begin + num_right
                self.num_computed[request] += num_right
            self.num_steps += 1
            self._world.note(
                self.name,
                f"step {plan.step_id}: rows {_columns(plan.seq_ids, plan.num_tokens)}, ended "
                f"{[ended.seq_id for ended in result.finished]}, released {list(plan.released_seq_ids)}",
            )
            message = wire.result_to_proto(
                result,
                StepTimings(total_us=int(seconds * 1e6)),
                draining=self.is_draining,
                leaves_in_seconds=max(0.0, (self._leaves_at or 0.0) - self._world.now),
            )
            is_bout = self._world.now < self._lies_until
            if is_bout or _is_met(self._unfit, reached):
                self._spoil(message, plan, reached, self.num_bouts if is_bout else None)
            for stream in self._session.complete(plan.epoch, plan.step_id, message):
                self._ends[stream].send(message)
        if self._device:
            self._begin_step()

    def _advance(self, plan: BatchPlan) -> list[tuple[int, int, int]]:
        """Notes how far each row gets: its request, from which position to which."""
        for new in plan.admitted:
            self._reached[new.seq_id] = new.token_ids[0], new.num_computed_tokens
        reached, drafts = [], dict(plan.draft_tokens)
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            request, begin = self._reached[seq_id]
            known = count - len(drafts.get(seq_id, ()))
            self._reached[seq_id] = request, begin + known
            self.num_computed[request] += known
            reached.append((request, begin, begin + count))
        return reached

    def _spoil(
        self,
        message: executor_pb2.StepResult,
        plan: BatchPlan,
        reached: list[tuple[int, int, int]],
        bout: int | None,
    ) -> None:
        """Makes a result one that does not fit its plan."""
        lie = self._lie_rng.choice(_LIES if message.token_ids else _LIES[:-_NUM_LIES_ABOUT_IDS])
        self._world.note(self.name, f"answers step {plan.step_id} wrongly: {lie.__name__.strip('_')}")
        lie(message, self._script.vocab_size)
        self.lies[plan.epoch, plan.step_id] = bout
        if any(request < FIRST_ID_OF_NOBODY for request, _, _ in reached):
            self._lied.setdefault(plan.epoch, bout)


def _is_met(places: Mapping[int, int], reached: list[tuple[int, int, int]]) -> bool:
    """Whether one of the rows comes past its request's place."""
    return any(begin <= places.get(request, -1) < end for request, begin, end in reached)


# --- answers that do not fit ----------------------------------------------------------------------------


def _a_row_too_many(result: executor_pb2.StepResult, _: int) -> None:
    result.seq_ids.append(10**6)
    result.num_sampled.append(0)


def _an_id_too_many(result: executor_pb2.StepResult, _: int) -> None:
    result.token_ids.append(3)


def _another_step(result: executor_pb2.StepResult, _: int) -> None:
    result.step_id += 1


def _another_epoch(result: executor_pb2.StepResult, _: int) -> None:
    result.epoch += 1


def _no_such_id(result: executor_pb2.StepResult, vocab_size: int) -> None:
    result.token_ids[0] = vocab_size


def _an_end_of_nobody(result: executor_pb2.StepResult, _: int) -> None:
    result.finished.add(seq_id=10**6, reason=common_pb2.FINISH_REASON_STOP)


def _an_id_too_few(result: executor_pb2.StepResult, _: int) -> None:
    del result.token_ids[-1]


def _a_stop_at_no_end(result: executor_pb2.StepResult, _: int) -> None:
    """Everybody who goes on is said to stop with what was sampled; where nobody does, an id is missing."""
    ended = {finished.seq_id for finished in result.finished}
    ends = accumulate(result.num_sampled)
    going_on = [
        (seq_id, result.token_ids[end - 1])
        for seq_id, count, end in zip(result.seq_ids, result.num_sampled, ends, strict=True)
        if count and seq_id not in ended
    ]
    for seq_id, token_id in going_on:
        result.finished.add(seq_id=seq_id, reason=common_pb2.FINISH_REASON_STOP, matched_token_id=token_id)
    if not going_on:
        del result.token_ids[-1]


_LIES = (
    _a_row_too_many,
    _an_id_too_many,
    _another_step,
    _another_epoch,
    _an_end_of_nobody,
    _no_such_id,
    _an_id_too_few,
    _a_stop_at_no_end,
)
_NUM_LIES_ABOUT_IDS = 3  # the last of them: only where ids were sampled


def _columns(seq_ids: tuple[int, ...], num_tokens: tuple[int, ...]) -> str:
    return " ".join(f"{seq_id}:{count}" for seq_id, count in zip(seq_ids, num_tokens, strict=True))
