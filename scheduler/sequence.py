"""One sequence: its request, how far it is, what it holds, and how it ended.

Prefill and decode are not states. A sequence has tokens that are known and tokens that are computed; the work
left is the difference, and the scheduler gives out tokens until computed catches up with known.

Pure: knows nothing of executors, routers or wires, and has no clock.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from scheduler.explain import TimeLine
from scheduler.lookup import Guesses
from scheduler.tenants import Tenant
from scheduler.token_ids import TokenIds


class FinishReason(IntEnum):
    """Why a sequence ended; the values are those of the contract."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    DEADLINE = 4
    ERROR = 5


class StatusCode(IntEnum):
    """The gRPC status codes that the scheduler uses, as numbers: it does not know gRPC."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Event(Enum):
    """What moves a sequence from one state to the next."""

    ADMIT = "admit"
    PREEMPT = "preempt"  # also: its executor was lost
    FINISH = "finish"  # reported by the executor, STOP or LENGTH
    ABORT = "abort"  # cancelled, orphaned too long, or the router matched a stop string
    EXPIRE = "expire"  # the deadline has passed
    FAIL = "fail"  # its row cannot be computed


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.FINISH): State.FINISHED,  # resubmitted with ids that already end it
    (State.WAITING, Event.ABORT): State.FINISHED,
    (State.WAITING, Event.EXPIRE): State.FINISHED,
    (State.WAITING, Event.FAIL): State.FINISHED,
    (State.RUNNING, Event.PREEMPT): State.WAITING,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.ABORT): State.FINISHED,
    (State.RUNNING, Event.EXPIRE): State.FINISHED,
    (State.RUNNING, Event.FAIL): State.FINISHED,
}


class IllegalTransitionError(RuntimeError):
    """A sequence was asked to do what its state does not allow: our bug, never the client's."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, fixed for life (but see its deadline, which a new call of its client may change).

    The scheduler reads only the few sampling parameters it needs; all of them travel on in `sampling` unread,
    so that a new option needs no new scheduler.
    """

    key: bytes  # 16 bytes, durable across streams and schedulers
    request_id: str
    prompt_token_ids: TokenIds
    sampling: bytes  # encoded, passed on to the executor unchanged
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    sample_index: int = 0
    group: int = 0
    priority: int = 0  # lower is served first
    tenant: str = ""
    cache_salt: str = ""
    body_digest: bytes = b""
    deadline: float | None = None  # seconds on the scheduler's clock
    arrival: float = 0.0  # seconds on the scheduler's clock; earlier by what it waited at other schedulers
    accepted_before: bool = False
    want_logprobs: bool = False
    want_prompt_logprobs: bool = False
    needs: frozenset[str] = frozenset()  # abilities that an executor may lack (`Capacity.features`)
    traceparent: str = ""  # names the span that the request is part of; opaque

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end its output, for a model with these end tokens."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_token_ids


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended."""

    reason: FinishReason
    matched_token_id: int | None = None
    message: str = ""  # with ERROR and DEADLINE: a sentence for the client
    status_code: StatusCode = StatusCode.OK
    retry_after_seconds: float | None = None

    @classmethod
    def past_deadline(cls) -> "Finish":
        """The deadline of its call has passed."""
        message = "the deadline of the call has passed"
        return cls(FinishReason.DEADLINE, message=message, status_code=StatusCode.DEADLINE_EXCEEDED)

    @classmethod
    def failed(cls, status_code: StatusCode, message: str) -> "Finish":
        """It cannot go on; `message`: a sentence for the client."""
        return cls(FinishReason.ERROR, message=message, status_code=status_code)


@dataclass(frozen=True, slots=True)
class Follower:
    """A waiting sequence whose first `num_tokens` tokens (whole blocks) another one computes, or will."""

    seq: "Sequence"
    num_tokens: int


@dataclass(slots=True)
class FollowerLine:
    """Followers, of one tenant in one class, of sequences that went: they now follow the first of them.

    `heap` has them in order of service: rank, order, tokens, sequence. They share no more than `most_tokens`
    with that first one, as far as is known.
    """

    heap: list[tuple[tuple[object, ...], int, int, "Sequence"]]
    most_tokens: int

    def take_served(self, num_tokens: int) -> list["Sequence"]:
        """Removes and returns those for which this many tokens are enough."""
        if self.most_tokens <= num_tokens:
            served, self.heap = [seq for *_, seq in self.heap], []
            return served
        served = [seq for _, _, wanted, seq in self.heap if wanted <= num_tokens]
        if served:
            self.heap = [item for item in self.heap if item[2] > num_tokens]
            heapq.heapify(self.heap)
        return served


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress.

    `token_ids` holds the known tokens, prompt and output. `num_computable_tokens` counts those that the next
    step may compute: it is ahead of the known ones by one for each step in flight that samples, and never
    reaches `max_len`, since the last token is sampled but never fed. While a step with its draft tokens is in
    flight nobody knows how far that will bring it: until then nothing of it may be computed.
    """

    request: Request
    tenant: Tenant
    token_ids: TokenIds
    num_prompt_tokens: int
    max_len: int  # prompt + max_tokens
    order: int  # submission counter: breaks ties

    # Of the core: how far it is, and what it holds.
    state: State = State.WAITING
    num_computable_tokens: int = 0
    num_computed_tokens: int = 0  # steps in flight included
    seq_id: int = 0  # names this admission; 0 while waiting
    executor_id: str = ""
    block_table: list[int] = field(default_factory=list)
    num_slots: int = 0  # tokens the block table has room for
    waiting_since: float = 0.0  # its arrival, or when it last lost its seat
    only_at: frozenset[str] | None = None  # executors that can ever compute it; None: all attached ones
    importance: float = 0.0  # while it runs: its priority, or better during a turn won by age
    latest_start: float = float("inf")  # to be in time, as estimated when it began to wait or got a deadline
    has_started: bool = False  # was admitted at least once
    is_prefilling: bool = False  # was admitted and has produced no token since
    is_recovering: bool = False  # its executor was lost or drained; has produced no token since
    is_padding: bool = False  # holds a finished member's seat in a padded request-level batch
    num_tokens_at_admission: int = 0
    num_preemptions: int = 0  # for lack of blocks
    num_displacements: int = 0  # for a more important sequence
    num_cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    num_wasted_tokens: int = 0  # computed, never delivered
    num_resumed_tokens: int = 0  # output tokens it was submitted with: these have no logprobs here
    finish: Finish | None = None
    orphaned_until: float | None = None
    forget_at: float | None = None

    # Of `results`.
    logprobs: list[object] | None = None  # opaque, one for each output token computed here
    prompt_logprobs: list[object] | None = None  # opaque, one for each prompt token from the second on

    # Of `prefix_cache`.
    block_keys: list[bytes] = field(default_factory=list)  # names of its full blocks' content, as far as made
    keys_block_size: int = 0  # block size that `block_keys` are for
    other_block_keys: dict[int, list[bytes]] | None = None  # the same for other block sizes
    num_registered_blocks: int = 0  # of its block table, from the start: found, or entered in the index
    followers: list["Follower"] = field(default_factory=list)  # wait for what it computes, or will
    inherited: FollowerLine | None = None  # and those that followed one that went

    # Of `drafting`.
    guesses: Guesses | None = None  # what its next tokens may be; None where nothing is guessed

    # Of `inquiry`.
    num_proven_tokens: int = 0  # computed without harm when an executor last died under it
    num_tokens_at_crash: int = 0  # the same plus those that were being computed

    # For those who report on it: `explain`, `router_session`, `traces`.
    time_line: TimeLine | None = None
    attachment: object | None = None  # the router session's own record of the reader
    traceparent: str = ""  # sent to executors: its own span if it has one, else its request's

    @classmethod
    def of(cls, request: Request, tenant: Tenant, output_token_ids: TokenIds, order: int) -> "Sequence":
        """A waiting sequence that continues after `output_token_ids`."""
        token_ids = request.prompt_token_ids + output_token_ids
        num_prompt_tokens = len(request.prompt_token_ids)
        seq = cls(
            request, tenant, token_ids, num_prompt_tokens, num_prompt_tokens + request.max_tokens, order
        )
        seq.num_resumed_tokens = len(output_token_ids)
        seq.waiting_since = request.arrival
        seq.logprobs = [] if request.want_logprobs else None
        seq.prompt_logprobs = [] if request.want_prompt_logprobs else None
        seq.traceparent = request.traceparent
        seq.forget_computed()
        return seq

    def move(self, event: Event) -> None:
        """Moves along the table of transitions. Raises IllegalTransitionError for a pair that it lacks."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransitionError(
                f"sequence {self.seq_id} is {self.state.value}, cannot {event.value}"
            )
        self.state = target

    def take_followers(self) -> list["Follower"]:
        """Removes and returns all its followers."""
        taken, self.followers = self.followers, []
        if self.inherited is not None:
            most = self.inherited.most_tokens
            taken += [Follower(seq, min(num_tokens, most)) for _, _, num_tokens, seq in self.inherited.heap]
            self.inherited = None
        return taken

    def forget_computed(self) -> None:
        """Starts over from the known ids: nothing is computed, nothing is in flight."""
        self.num_computed_tokens = 0
        self.num_computable_tokens = min(len(self.token_ids), self.max_len - 1)

    def give_up_seat(self) -> None:
        """It holds nothing on any executor."""
        self.seq_id = 0
        self.executor_id = ""
        self.block_table = []
        self.num_slots = 0

    def settle_draft(self) -> None:
        """The step with its draft tokens was answered: all it knows but the newest token is computed."""
        self.num_computed_tokens = len(self.token_ids) - 1
        self.num_computable_tokens = min(len(self.token_ids), self.max_len - 1)

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_logprobs_from(self) -> int | None:
        """Position of the first prompt token whose log-probability is still wanted; None if there is none."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) + 1 >= self.num_prompt_tokens:
            return None
        return len(self.prompt_logprobs) + 1

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens may come from the cache: not the last one, nor any that log-probabilities need.

        A token's distribution is computed with the token before it.
        """
        first_wanted = self.prompt_logprobs_from
        return len(self.token_ids) - 1 if first_wanted is None else first_wanted - 1

    @property
    def needs_block(self) -> bool:
        """Whether the one token it has to compute next has no slot."""
        position = self.num_computed_tokens
        return position == self.num_slots and self.num_computable_tokens - position == 1

    @property
    def has_progressed(self) -> bool:
        """Whether it has produced a token since its last admission."""
        return len(self.token_ids) > self.num_tokens_at_admission

    def output_token_ids(self, start: int = 0) -> TokenIds:
        """Output ids, from index `start` on."""
        return self.token_ids[self.num_prompt_tokens + start :]


def end_of_output(
    request: Request, output_token_ids: TokenIds, eos_token_ids: frozenset[int]
) -> Finish | None:
    """How these output ids already end the request, or None when it goes on.

    The executor decides about ends while it generates; this is for a request that comes back with its ids.
    """
    if not output_token_ids:
        return None
    last = output_token_ids[-1]
    # Whatever `min_tokens` says: a constraint that allows nothing else may end it earlier.
    if last in request.end_token_ids(eos_token_ids):
        return Finish(FinishReason.STOP, matched_token_id=last)
    if len(output_token_ids) >= request.max_tokens:
        return Finish(FinishReason.LENGTH)
    return None
