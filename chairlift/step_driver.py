"""The scheduler's half of the step protocol in small, to drive an executor by hand.

Plans are built one at a time and may be wrong on purpose. Knows the contract alone: nothing here comes from
our scheduler or executor, so that it can judge both.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote

import grpc

from protos.v1 import common_pb2, executor_pb2, executor_pb2_grpc

PROTOCOL_REVISION: Final = 1
_EARLY_REFUSAL_SECONDS: Final = 0.25
_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class Failure(Exception):  # noqa: N818 - a verdict on the executor, not a failure of the driver
    """The executor did not do what the protocol asks; the text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended. `held_by` and `held_at` are the holder and term named in its trailers, if any."""

    code: grpc.StatusCode
    details: str
    held_by: str = ""
    held_at: str = ""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}" if self.details else self.code.name


def ended_by(error: grpc.aio.AioRpcError) -> Ended:
    """What the call that raised `error` ended with."""
    trailers: Any = error.trailing_metadata() or ()
    named = {key: value for key, value in trailers if isinstance(value, str)}
    return Ended(
        error.code(),
        error.details() or "",
        unquote(named.get("chairlift-scheduler-id", "")),
        named.get("chairlift-term", ""),
    )


class ExecutorDriver:
    """One executor, seen through its channel. Every wait ends in a Failure after `timeout_seconds`."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        self._stub: Any = executor_pb2_grpc.ExecutorStub(channel)
        self._timeout_seconds = timeout_seconds

    async def open(self, scheduler_id: str, *, term: int = 0) -> "Epoch":
        """Take the executor over. Raises AioRpcError as the call does."""
        request = executor_pb2.OpenRequest(
            scheduler_id=scheduler_id, term=term, protocol_revision=PROTOCOL_REVISION
        )
        capacity = await self._stub.Open(request, timeout=self._timeout_seconds)
        return Epoch(self._stub, capacity, timeout_seconds=self._timeout_seconds)

    async def open_refused(self, scheduler_id: str, *, term: int = 0) -> Ended:
        """Try to take the executor over and be refused. Raises Failure when it is granted."""
        try:
            epoch = await self.open(scheduler_id, term=term)
        except grpc.aio.AioRpcError as error:
            return ended_by(error)
        raise Failure(f"Open with term {term} was granted at term {epoch.capacity.term}; it must be refused")


@dataclass(slots=True)
class _Belief:
    """What the scheduler believes of one sequence; `num_known` may run ahead of the ids it has seen."""

    num_known: int
    num_computed: int


class Epoch:
    """One epoch, as its scheduler sees it: ids, blocks and positions are counted here.

    Every block is handed out once, so that sequences never share one unless told to.
    """

    def __init__(self, stub: Any, capacity: executor_pb2.OpenResponse, *, timeout_seconds: float) -> None:
        self.capacity = capacity
        self._stub = stub
        self._timeout_seconds = timeout_seconds
        self._beliefs: dict[int, _Belief] = {}
        self._num_plans = 0
        self._applied_step_id = 0
        self._next_seq_id = 1
        self._next_block_id = 0
        self._drafted: dict[int, set[int]] = {}

    def stream(self) -> "Stream":
        """A new Execute stream."""
        return Stream(self, self._stub.Execute(), timeout_seconds=self._timeout_seconds)

    def blocks(self, count: int) -> list[int]:
        """Fresh block ids. Raises Failure when the executor has too few for the checks."""
        first, self._next_block_id = self._next_block_id, self._next_block_id + count
        if self._next_block_id > self.capacity.num_blocks:
            raise Failure(f"the executor has {self.capacity.num_blocks} blocks; the checks need more")
        return list(range(first, self._next_block_id))

    def blocks_for(self, num_tokens: int) -> list[int]:
        """Fresh blocks for a sequence of `num_tokens`."""
        return self.blocks(-(-num_tokens // self.capacity.block_size))

    def new(
        self,
        token_ids: Sequence[int],
        sampling: common_pb2.SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        num_computed_tokens: int = 0,
        block_ids: Sequence[int] | None = None,
    ) -> executor_pb2.NewSequence:
        """A sequence to admit, with blocks for all it may become unless `block_ids` are given."""
        seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        self._beliefs[seq_id] = _Belief(len(token_ids), num_computed_tokens)
        return executor_pb2.NewSequence(
            seq_id=seq_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            block_ids=self.blocks_for(len(token_ids) + sampling.max_tokens)
            if block_ids is None
            else block_ids,
            sampling=sampling,
        )

    def plan(
        self,
        rows: Mapping[int, int] | None = None,
        *,
        admit: Sequence[executor_pb2.NewSequence] = (),
        release: Sequence[int] = (),
        grow: Mapping[int, Sequence[int]] | None = None,
        guess: Mapping[int, Sequence[int]] | None = None,
        acked_step_id: int | None = None,
    ) -> executor_pb2.BatchPlan:
        """The next plan: `rows` maps sequences to tokens, `grow` to new blocks. Belief moves with it.

        `guess` maps sequences to draft tokens, which are computed after the tokens of `rows`.
        """
        rows, grow, guess = rows or {}, grow or {}, guess or {}
        self._num_plans += 1
        positions_sum = sum(self._beliefs[seq_id].num_computed for seq_id in rows)
        for seq_id, num_tokens in rows.items():
            belief = self._beliefs[seq_id]
            belief.num_computed += num_tokens
            if belief.num_computed == belief.num_known:
                belief.num_known += 1  # the row samples, whether or not its id is known here yet
        self._drafted[self._num_plans] = set(guess)
        return executor_pb2.BatchPlan(
            epoch=self.capacity.epoch,
            step_id=self._num_plans,
            acked_step_id=self._applied_step_id if acked_step_id is None else acked_step_id,
            released_seq_ids=release,
            admitted=admit,
            seq_ids=rows.keys(),
            num_tokens=[count + len(guess.get(seq_id, ())) for seq_id, count in rows.items()],
            grown_seq_ids=grow.keys(),
            num_new_blocks=[len(block_ids) for block_ids in grow.values()],
            new_block_ids=[block_id for block_ids in grow.values() for block_id in block_ids],
            positions_sum=positions_sum,
            draft_tokens=[
                executor_pb2.DraftTokens(seq_id=seq_id, token_ids=ids) for seq_id, ids in guess.items()
            ],
        )

    def applied(self, result: executor_pb2.StepResult) -> None:
        """Take a result in; the plans from here on acknowledge it."""
        self._applied_step_id = max(self._applied_step_id, result.step_id)
        drafted = self._drafted.pop(result.step_id, set())
        for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
            if seq_id in drafted and count > 1:  # as many guesses as came before the last were right
                self._beliefs[seq_id].num_computed += count - 1
                self._beliefs[seq_id].num_known += count - 1


class Stream:
    """One Execute stream. Left without an end, it is cancelled, as a broken connection would do."""

    def __init__(self, epoch: Epoch, call: Any, *, timeout_seconds: float) -> None:
        self._epoch = epoch
        self._call = call
        self._timeout_seconds = timeout_seconds
        self._expected_step_ids: deque[int] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def send(self, plan: executor_pb2.BatchPlan) -> None:
        """Send a plan; its result is expected after those of the plans before."""
        self._expected_step_ids.append(plan.step_id)
        try:
            await self._call.write(plan)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise Failure(
                f"the stream had ended when step {plan.step_id} was sent ({await self.end()})"
            ) from None

    async def result(self) -> executor_pb2.StepResult:
        """The next result, taken in by the epoch. Raises Failure when it is late, ill-formed or another's."""
        step_id = self._expected_step_ids.popleft()
        try:
            result = await asyncio.wait_for(self._call.read(), self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise Failure(
                f"the stream ended ({ended_by(error)}) in place of the result of step {step_id}"
            ) from error
        except TimeoutError:
            raise Failure(f"step {step_id} had no result within {self._timeout_seconds:g} s") from None
        if result is _EOF:
            raise Failure(f"the stream ended in place of the result of step {step_id}")
        if result is None:  # how grpc tells of bytes that it cannot parse
            raise Failure(f"what came for step {step_id} is no StepResult")
        _check_form(result, self._epoch.capacity.epoch, step_id)
        self._epoch.applied(result)
        return result  # type: ignore[no-any-return]  # the stub is untyped in its asyncio half

    async def step(self, plan: executor_pb2.BatchPlan) -> executor_pb2.StepResult:
        """Send a plan and wait for its result."""
        await self.send(plan)
        return await self.result()

    async def done_writing(self) -> None:
        """Send no more plans."""
        await self._call.done_writing()

    async def refusal(self, plan: executor_pb2.BatchPlan) -> Ended:
        """How the executor ends a stream whose first plan it must refuse, at that plan or before it.

        The plan goes out when the stream has not ended by itself for a moment: to write while the call ends
        would lose the status (grpc/grpc#36066).
        """
        ending = asyncio.ensure_future(self.end())
        await asyncio.wait([ending], timeout=_EARLY_REFUSAL_SECONDS)
        if not ending.done():
            await self._call.write(plan)
        return await ending

    async def end(self) -> Ended:
        """How the executor ends the stream. Raises Failure when it sends a result instead, or nothing."""
        answer = await self._result_or_end("the stream was still open after {:g} s; it must end")
        if not isinstance(answer, Ended):
            raise Failure(f"a result of step {answer.step_id} came where the stream must end")
        return answer

    async def result_or_end(self) -> executor_pb2.StepResult | Ended:
        """The next result, whatever is in it, or how the executor ends the stream instead."""
        return await self._result_or_end("nothing came within {:g} s")

    async def _result_or_end(self, late: str) -> executor_pb2.StepResult | Ended:
        try:
            message = await asyncio.wait_for(self._call.read(), self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            return ended_by(error)
        except TimeoutError:
            raise Failure(late.format(self._timeout_seconds)) from None
        if message is None:  # how grpc tells of bytes that it cannot parse
            raise Failure("what came is no StepResult")
        if message is _EOF:
            return Ended(await self._call.code(), await self._call.details() or "")
        return message  # type: ignore[no-any-return]  # the stub is untyped in its asyncio half


def _check_form(result: executor_pb2.StepResult, epoch: int, step_id: int) -> None:
    if result.epoch != epoch:
        raise Failure(f"the result of step {step_id} carries epoch {result.epoch}; the plan's was {epoch}")
    if result.step_id != step_id:
        raise Failure(f"a result of step {result.step_id} came where that of step {step_id} was due")
    if len(result.seq_ids) != len(result.num_sampled):
        raise Failure(
            f"in step {step_id} seq_ids has {len(result.seq_ids)} entries; "
            f"num_sampled has {len(result.num_sampled)}"
        )
    if sum(result.num_sampled) != len(result.token_ids):
        raise Failure(
            f"in step {step_id} num_sampled adds up to {sum(result.num_sampled)}; "
            f"there are {len(result.token_ids)} token_ids"
        )


def tokens_by_sequence(result: executor_pb2.StepResult) -> dict[int, list[int]]:
    """What each row of a result sampled, in the result's order."""
    tokens: dict[int, list[int]] = {}
    start = 0
    for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
        tokens[seq_id] = list(result.token_ids[start : start + count])
        start += count
    return tokens
