"""How an executor must take draft tokens: right ones in one step, wrong ones as if they had not come.

What a sequence says is learned from a run without draft tokens, and said again with some. Where an executor
is not row-invariant it may say something else beside draft tokens; then only what holds of whatever it says
is asked: its tokens are the draft tokens as far as those were right, and one more.

Must not know: our scheduler, our executor, how a verdict is reported.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chairlift.checking import (
    STOP,
    Skipped,
    Subject,
    greedy,
    need,
    offers,
    prompt_of,
    require,
)
from chairlift.sampling_checks import PROMPT_TOKENS, hot
from chairlift.step_driver import Epoch, Stream, tokens_by_sequence
from protos.v1 import common_pb2, executor_pb2

_NUM_DRAFTS: Final = 3
_NUM_OUTPUT: Final = 10

Guess = Callable[[Sequence[int]], Sequence[int]]
"""What is guessed to come after an output; may be more than fits."""


@dataclass(slots=True)
class Answer:
    """What a sequence said, in how many steps, with which log-probabilities, and its end."""

    tokens: list[int] = field(default_factory=list)
    num_steps: int = 0
    chances: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    end: executor_pb2.FinishedSequence | None = None

    @property
    def what_may_not_change(self) -> tuple[object, ...]:
        """All but the number of steps."""
        return self.tokens, self.chances, self.end and (self.end.reason, self.end.matched_token_id)


class _Speaking:
    """One prompt after which sequences are run, one after the other, in the same blocks."""

    def __init__(self, epoch: Epoch, stream: Stream) -> None:
        self._epoch, self._stream = epoch, stream
        self._prompt = prompt_of(epoch, PROMPT_TOKENS)
        self._block_ids = epoch.blocks_for(PROMPT_TOKENS + _NUM_OUTPUT)

    async def plainly(self) -> list[int]:
        """The likeliest tokens, one in each step."""
        told = await self.answer(greedy(_NUM_OUTPUT))
        num_told = len(told.tokens)
        require(num_told == _NUM_OUTPUT, f"{num_told} tokens came, max_tokens is {_NUM_OUTPUT}")
        return told.tokens

    async def answer(self, sampling: common_pb2.SamplingParams, guess: Guess = lambda _: ()) -> Answer:
        """What comes, with as many draft tokens in each step as were guessed and fit."""
        new = self._epoch.new(self._prompt, sampling, block_ids=self._block_ids)
        told, rows, admit = Answer(), {new.seq_id: PROMPT_TOKENS}, [new]
        while told.end is None:
            most = min(_NUM_DRAFTS, sampling.max_tokens - len(told.tokens) - 1)
            require(most >= 0, f"max_tokens is {sampling.max_tokens}, and no end came")
            draft = list(guess(told.tokens))[:most]
            plan = self._epoch.plan(rows, admit=admit, guess={new.seq_id: draft} if draft else {})
            self._take(await self._stream.step(plan), new, draft, told)
            rows, admit = {new.seq_id: 1}, []
        return told

    def _take(
        self,
        result: executor_pb2.StepResult,
        new: executor_pb2.NewSequence,
        draft: Sequence[int],
        told: Answer,
    ) -> None:
        errors = [error.message for error in result.errors]
        require(not errors, f"step {result.step_id} has errors: {errors}")
        named = list(result.seq_ids)
        require(named == [new.seq_id], f"step {result.step_id} tells of {named}, not of {[new.seq_id]}")
        told.num_steps += 1
        tokens = tokens_by_sequence(result)[new.seq_id]
        require(bool(tokens), f"step {result.step_id} sampled nothing after the last known token")
        num_right = len(tokens) - 1
        require(
            tokens[:-1] == list(draft[:num_right]),
            f"the draft tokens {draft} were checked, and {tokens} came: one is after a wrong guess",
        )
        ends = set(new.sampling.stop_token_ids)
        if len(told.tokens) + num_right > new.sampling.min_tokens:
            early = [token_id for token_id in tokens[:-1] if token_id in ends]
            require(not early, f"{early} end the sequence, and {tokens} came in one step")
        told.tokens += tokens
        told.end = next(iter(result.finished), None)
        require(
            told.end is not None or len(tokens) > len(draft) or tokens[-1] != draft[num_right],
            f"the draft tokens {draft} were right as far as {tokens}, and the next one was not sampled",
        )
        for row in result.logprobs:
            told.chances += row.tokens
        require(
            not new.sampling.HasField("logprobs") or len(told.chances) == len(told.tokens),
            f"{len(told.tokens)} tokens came, and {len(told.chances)} have log-probabilities",
        )


@contextlib.asynccontextmanager
async def _speaking_to(subject: Subject) -> AsyncIterator[tuple[_Speaking, executor_pb2.OpenResponse]]:
    """A fresh epoch of an executor that takes draft tokens, and what it can take."""
    epoch = await subject.open()
    offers(epoch, "draft_tokens")
    need(epoch, num_tokens=PROMPT_TOKENS + _NUM_DRAFTS)
    async with epoch.stream() as stream:
        yield _Speaking(epoch, stream), epoch.capacity


def _rightly(tokens: Sequence[int]) -> Guess:
    """What has been said before."""
    return lambda output: tokens[len(output) :]


def _wrongly(tokens: Sequence[int], vocab_size: int, *, every: int) -> Guess:
    """The same, with other ids at every so many places."""
    spoiled = [
        (token_id + 1) % vocab_size if place % every == every - 1 else token_id
        for place, token_id in enumerate(tokens)
    ]
    return lambda output: spoiled[len(output) :]


async def right_draft_tokens_are_taken(subject: Subject) -> None:
    """With the feature "draft_tokens", a step brings all that were right, and one token more."""
    async with _speaking_to(subject) as (speaking, capacity):
        plain = await speaking.plainly()
        guessed = await speaking.answer(greedy(_NUM_OUTPUT), _rightly(plain))
    if capacity.row_invariant:
        require(guessed.tokens == plain, f"right draft tokens changed {plain} into {guessed.tokens}")
        fewest = -(-_NUM_OUTPUT // (_NUM_DRAFTS + 1))
        require(
            guessed.num_steps == fewest,
            f"{_NUM_OUTPUT} tokens, of which {_NUM_DRAFTS} were guessed in each step, took "
            f"{guessed.num_steps} steps; it should be {fewest}",
        )


async def wrong_draft_tokens_are_forgotten(subject: Subject) -> None:
    """With "draft_tokens", a wrong one is the last to be checked, and leaves nothing behind."""
    async with _speaking_to(subject) as (speaking, capacity):
        plain = await speaking.plainly()
        for every in (1, 2, 3):
            guess = _wrongly(plain, capacity.vocab_size, every=every)
            guessed = await speaking.answer(greedy(_NUM_OUTPUT), guess)
            if capacity.row_invariant:
                require(guessed.tokens == plain, f"wrong draft tokens changed {plain} into {guessed.tokens}")


async def an_end_among_draft_tokens_ends(subject: Subject) -> None:
    """With "draft_tokens", a stop id among right ones ends the sequence there, as does its length."""
    async with _speaking_to(subject) as (speaking, capacity):
        plain = await speaking.plainly()
        for place in range(_NUM_DRAFTS + 1):
            stop_id = plain[place]
            expected = plain[: plain.index(stop_id) + 1]
            sampling = greedy(_NUM_OUTPUT, stop_token_ids=[stop_id])
            stopped = await speaking.answer(sampling, _rightly(plain))
            cut = await speaking.answer(greedy(place + 1), _rightly(plain))
            if not capacity.row_invariant:
                continue
            require(
                stopped.tokens == expected,
                f"the stop id {stop_id} was guessed, and {stopped.tokens} came; it should be {expected}",
            )
            end = stopped.end
            require(
                end is not None and (end.reason, end.matched_token_id) == (STOP, stop_id),
                f"the stop id {stop_id} was guessed and came, and its sequence ended with {end}",
            )
            require(cut.tokens == plain[: place + 1], f"max_tokens {place + 1} gave {cut.tokens}")


async def draft_tokens_change_no_choice(subject: Subject) -> None:
    """With "draft_tokens" and row_invariant, each token is chosen as in a step of its own."""
    async with _speaking_to(subject) as (speaking, capacity):
        if not capacity.row_invariant:
            raise Skipped("the executor does not claim row_invariant")
        stop_ids = await speaking.plainly()
        for sampling in _ways(capacity.features, stop_ids):
            plain = await speaking.answer(sampling)
            spoiled = (_wrongly(plain.tokens, capacity.vocab_size, every=every) for every in (2, 3))
            for guess in (_rightly(plain.tokens), *spoiled):
                guessed = await speaking.answer(sampling, guess)
                require(
                    guessed.what_may_not_change == plain.what_may_not_change,
                    f"with draft tokens came {guessed.what_may_not_change} (tokens, log-probabilities, end), "
                    f"without them {plain.what_may_not_change}",
                )


def _ways(offered: Collection[str], stop_ids: Sequence[int]) -> list[common_pb2.SamplingParams]:
    """Sampling in which the choice of a token depends on its place, or on the tokens before it."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0}]
    ways += [{"temperature": 0.0, "stop_token_ids": stop_ids, "min_tokens": 3}]
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    few = {"allowed_token_ids": [0, 1, 2, 3]}  # of which some are soon said twice
    of_features: list[tuple[set[str], dict[str, Any]]] = [
        ({"penalties"}, {"temperature": 0.0, **penalties}),
        ({"penalties", "token_lists"}, {"temperature": 0.0, **penalties, **few}),
        ({"token_lists"}, few),
        ({"logprobs"}, {"temperature": 0.0, "logprobs": 1}),
        ({"logit_bias"}, {"temperature": 0.0, "logit_bias": {1: 5.0}}),
    ]
    ways += [options for features, options in of_features if features <= set(offered)]
    return [hot(_NUM_OUTPUT, 3, **options) for options in ways]
