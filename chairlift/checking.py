"""The words in which the checks of the step protocol are written: what a check gets, asks for and requires.

Must not know: our scheduler, our executor, how a verdict is reported.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from chairlift.step_driver import Ended, Epoch, ExecutorDriver, Failure, Stream, ended_by, tokens_by_sequence
from protos.v1 import common_pb2, executor_pb2

LENGTH: Final = common_pb2.FINISH_REASON_LENGTH
STOP: Final = common_pb2.FINISH_REASON_STOP
_FREE_AGAIN_SECONDS: Final = 5.0


class Skipped(Exception):  # noqa: N818 - no failure
    """The executor is too small, or does not offer what the check is about; the text says which."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The executor under test, and the names this run takes it over with."""

    driver: ExecutorDriver
    channel: grpc.aio.Channel
    scheduler_id: str
    rival_id: str
    timeout_seconds: float

    async def open(self) -> Epoch:
        """A fresh epoch, as soon as the executor has noticed that what a check before left is gone."""
        return await open_once_free(self, self.scheduler_id)


Check = Callable[[Subject], Awaitable[None]]


def require(holds: bool, sentence: str) -> None:  # noqa: FBT001 - an assertion that is a verdict
    """Raise Failure(sentence) unless `holds`."""
    if not holds:
        raise Failure(sentence)


def greedy(
    max_tokens: int, *, stop_token_ids: Sequence[int] = (), min_tokens: int = 0
) -> common_pb2.SamplingParams:
    """The most likely token each time, past the model's own end tokens."""
    return common_pb2.SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=True,
        stop_token_ids=stop_token_ids,
        seed=1,
    )


def prompt_of(epoch: Epoch, num_tokens: int, *, salt: int = 0) -> list[int]:
    """Small ids that any vocabulary has, not all the same."""
    return [(3 + 5 * salt + 7 * i) % min(epoch.capacity.vocab_size, 64) for i in range(num_tokens)]


def need(epoch: Epoch, *, num_seqs: int = 1, num_tokens: int = 1, window: int = 1) -> None:
    """Skip unless the executor takes this much."""
    capacity = epoch.capacity
    if capacity.max_num_seqs < num_seqs:
        raise Skipped(f"needs {num_seqs} sequences at once; max_num_seqs is {capacity.max_num_seqs}")
    if capacity.max_num_batched_tokens < num_tokens:
        raise Skipped(
            f"needs {num_tokens} tokens a step; the executor takes {capacity.max_num_batched_tokens}"
        )
    if capacity.max_window < window:
        raise Skipped(f"needs a window of {window}; max_window is {capacity.max_window}")


def offers(epoch: Epoch, feature: str) -> None:
    """Skip unless the executor offers it."""
    if feature not in epoch.capacity.features:
        raise Skipped(f'the executor does not offer "{feature}"')


def expect_tokens(result: executor_pb2.StepResult, expected: dict[int, int]) -> dict[int, list[int]]:
    """The result's tokens, once it is sure that `expected` rows, in that order, sampled that many each."""
    tokens = tokens_by_sequence(result)
    found = {seq_id: len(ids) for seq_id, ids in tokens.items()}
    require(
        list(found.items()) == list(expected.items()),
        f"step {result.step_id} sampled {found} (tokens of each seq_id); in order it should be {expected}",
    )
    require(
        not result.errors, f"step {result.step_id} has errors: {[error.message for error in result.errors]}"
    )
    return tokens


def expect_finished(
    result: executor_pb2.StepResult, seq_id: int, reason: int, matched: int | None = None
) -> None:
    """Check that just this sequence ended here, for this reason."""
    found = [
        (e.seq_id, e.reason, e.matched_token_id if e.HasField("matched_token_id") else None)
        for e in result.finished
    ]
    require(
        found == [(seq_id, reason, matched)],
        f"step {result.step_id} finished {found} (seq_id, reason, matched); "
        f"it should be {[(seq_id, reason, matched)]}",
    )


def expect_end(ended: Ended, code: grpc.StatusCode, why: str) -> None:
    """Check how a stream ended."""
    require(ended.code is code, f"{why}: the stream ended with {ended}; it should be {code.name}")


async def greedy_run(epoch: Epoch, stream: Stream, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model says after a prompt, with one sequence alone, window 1."""
    new = epoch.new(prompt, greedy(num_tokens))
    result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
    output = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
    while len(output) < num_tokens:
        require(not result.finished, f"the sequence ended after {len(output)} of {num_tokens} tokens")
        result = await stream.step(epoch.plan({new.seq_id: 1}))
        output += expect_tokens(result, {new.seq_id: 1})[new.seq_id]
    expect_finished(result, new.seq_id, LENGTH)
    return output


async def ended_run(
    epoch: Epoch,
    stream: Stream,
    prompt: Sequence[int],
    sampling: common_pb2.SamplingParams,
    *,
    block_ids: Sequence[int] | None = None,
) -> tuple[list[int], executor_pb2.FinishedSequence]:
    """What comes after a prompt with these options, and its end, with one sequence alone."""
    new = epoch.new(prompt, sampling, block_ids=block_ids)
    result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
    output = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
    while not result.finished:
        require(len(output) < sampling.max_tokens, f"max_tokens is {sampling.max_tokens}, and no end came")
        result = await stream.step(epoch.plan({new.seq_id: 1}))
        output += expect_tokens(result, {new.seq_id: 1})[new.seq_id]
    (finished,) = result.finished
    require(finished.seq_id == new.seq_id, f"sequence {finished.seq_id} ended; {new.seq_id} is the only one")
    is_at_length = len(output) == sampling.max_tokens
    require(
        is_at_length or finished.reason == STOP,
        f"the sequence ended by its length after {len(output)} of {sampling.max_tokens} tokens",
    )
    return output, finished


async def sampled_run(
    epoch: Epoch,
    stream: Stream,
    prompt: Sequence[int],
    sampling: common_pb2.SamplingParams,
    *,
    block_ids: Sequence[int] | None = None,
) -> list[int]:
    """What comes after a prompt with these options, to its end, with one sequence alone."""
    output, _ = await ended_run(epoch, stream, prompt, sampling, block_ids=block_ids)
    return output


async def open_once_free(subject: Subject, scheduler_id: str) -> Epoch:
    """Open with term 0 as soon as the executor has noticed that the holder's stream is gone."""
    now = asyncio.get_running_loop().time
    deadline = now() + min(subject.timeout_seconds, _FREE_AGAIN_SECONDS)
    while True:
        try:
            return await subject.driver.open(scheduler_id)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            if now() > deadline:
                raise Failure(
                    f"no stream is left, and Open with term 0 is still refused ({ended_by(error)})"
                ) from error
        await asyncio.sleep(0.05)
