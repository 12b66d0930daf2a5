"""How an executor must choose tokens and end sequences: filters, seeds, end tokens, and what may be offered.

Nothing is known of the model, nor of how an executor draws. So what is asked holds for every right one: at
temperature 100 nearly all tokens are nearly alike, and draws from many seeds that all come out the same, or
never, show a rule that is not kept. The chance that a right executor fails is far below one in a million.

Must not know: our scheduler, our executor, how a verdict is reported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chairlift.checking import (
    LENGTH,
    STOP,
    Skipped,
    Subject,
    expect_finished,
    expect_tokens,
    greedy,
    need,
    offers,
    prompt_of,
    require,
    sampled_run,
)
from chairlift.step_driver import Epoch, Stream
from protos.v1 import common_pb2, executor_pb2

HOT: Final = 100.0
COLD: Final = 1e-6
PROMPT_TOKENS: Final = 4
_NUM_SEEDS: Final = 16
_NUM_TOSSES: Final = 48
_MIN_VOCABULARY: Final = 16
_MAX_DRAWN: Final = 600
_LONGEST_COMPUTED: Final = 4096
_CLOSE: Final = 1e-3
# Each pair is one seed to somebody who loses bits, or the sign.
_SEEDS_ALIKE: Final = ((1, -1), (1, 2**32 + 1), (2**53, 2**53 + 1), (2**63 - 1, -(2**63)))


def hot(max_tokens: int, seed: int, **options: Any) -> common_pb2.SamplingParams:
    """Nearly any token, past the model's own end tokens unless told otherwise."""
    given = {"temperature": HOT, "ignore_eos": True} | options
    return common_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, **given)


def need_choice(epoch: Epoch, *, num_tokens: int = PROMPT_TOKENS + 2) -> None:
    """Skip unless there are tokens to choose from, and room for short prompts."""
    need(epoch, num_tokens=num_tokens)
    if epoch.capacity.vocab_size < _MIN_VOCABULARY:
        raise Skipped(f"needs {_MIN_VOCABULARY} token ids; vocab_size is {epoch.capacity.vocab_size}")


class Draws:
    """First tokens after one prompt, many at once, in blocks that are given back each time."""

    def __init__(self, epoch: Epoch, stream: Stream, token_ids: Sequence[int]) -> None:
        self._epoch, self._stream, self._token_ids = epoch, stream, token_ids
        capacity = epoch.capacity
        at_once = min(capacity.max_num_seqs, capacity.max_num_batched_tokens // len(token_ids), 8)
        self._tables = [epoch.blocks_for(len(token_ids) + 1) for _ in range(at_once)]

    async def tokens(
        self, samplings: Iterable[common_pb2.SamplingParams], *, num_prompt_tokens: int | None = None
    ) -> list[int]:
        """The token that each of these options gives; each of them ends its sequence."""
        drawn = await self.ends(samplings, num_prompt_tokens=num_prompt_tokens)
        return [token_id for token_id, _ in drawn]

    async def ends(
        self, samplings: Iterable[common_pb2.SamplingParams], *, num_prompt_tokens: int | None = None
    ) -> list[tuple[int, executor_pb2.FinishedSequence]]:
        """The same, with the end of each."""
        left, drawn = list(samplings), list[tuple[int, executor_pb2.FinishedSequence]]()
        while left:
            together, left = left[: len(self._tables)], left[len(self._tables) :]
            news = [
                self._epoch.new(
                    self._token_ids, sampling, num_prompt_tokens=num_prompt_tokens, block_ids=table
                )
                for sampling, table in zip(together, self._tables, strict=False)
            ]
            rows = {new.seq_id: len(self._token_ids) for new in news}
            result = await self._stream.step(self._epoch.plan(rows, admit=news))
            tokens = expect_tokens(result, dict.fromkeys(rows, 1))
            finished = {each.seq_id: each for each in result.finished}
            require(
                sorted(finished) == sorted(rows) and len(result.finished) == len(rows),
                f"step {result.step_id} finished {[each.seq_id for each in result.finished]}; by max_tokens "
                f"it should be {list(rows)}",
            )
            drawn += [(tokens[seq_id][0], finished[seq_id]) for seq_id in rows]
        return drawn


# --- temperature, filters, seeds --------------------------------------------------------------------


async def temperature_is_heeded(subject: Subject) -> None:
    """A temperature of 100 draws many tokens, one of nearly 0 the most likely."""
    epoch = await subject.open()
    need_choice(epoch)
    async with epoch.stream() as stream:
        found = await _same_as_greedy(epoch, stream, {"temperature": COLD})
        draws = Draws(epoch, stream, prompt_of(epoch, PROMPT_TOKENS))
        drawn = await draws.tokens(hot(1, seed) for seed in range(_NUM_SEEDS))
    require(found, f"at temperature {COLD:g} tokens were chosen that are not the most likely")
    require(len(set(drawn)) > 1, f"at temperature {HOT:g} {_NUM_SEEDS} seeds all drew {drawn[0]}")


async def top_k_is_kept(subject: Subject) -> None:
    """top_k 1 leaves the most likely token, 2 leaves two, which are both drawn."""
    epoch = await subject.open()
    need_choice(epoch)
    async with epoch.stream() as stream:
        found = await _same_as_greedy(epoch, stream, {"top_k": 1})
        draws = Draws(epoch, stream, prompt_of(epoch, PROMPT_TOKENS))
        drawn = await draws.tokens(hot(1, seed, top_k=2) for seed in range(_NUM_TOSSES))
    require(found, "with top_k 1 tokens were chosen that are not the most likely")
    num_drawn = len(set(drawn))
    require(
        num_drawn == 2,  # noqa: PLR2004 - two are left
        f"with top_k 2 {_NUM_TOSSES} seeds drew {num_drawn} different tokens; it leaves two, nearly alike",
    )


async def top_p_is_kept(subject: Subject) -> None:
    """A tiny top_p leaves the most likely token."""
    epoch = await subject.open()
    need_choice(epoch)
    async with epoch.stream() as stream:
        found = await _same_as_greedy(epoch, stream, {"top_p": 1e-9})
    require(found, "with top_p 1e-9 tokens were chosen that are not the most likely")


async def min_p_is_kept(subject: Subject) -> None:
    """min_p 1 leaves the most likely token."""
    epoch = await subject.open()
    need_choice(epoch)
    async with epoch.stream() as stream:
        found = await _same_as_greedy(epoch, stream, {"min_p": 1.0})
    require(found, "with min_p 1 tokens were chosen that are not the most likely")


async def _same_as_greedy(epoch: Epoch, stream: Stream, options: Mapping[str, float]) -> bool:
    """Whether hot draws with these options give what greedy does, whatever their seed.

    After one of three prompts: where the two most likely tokens tie, who comes first is the executor's own.
    """
    for salt in range(3):
        draws = Draws(epoch, stream, prompt_of(epoch, PROMPT_TOKENS, salt=salt))
        likeliest = await draws.tokens([greedy(1)])
        drawn = await draws.tokens(hot(1, seed, **options) for seed in range(_NUM_SEEDS))
        if set(drawn) == set(likeliest):
            return True
    return False


async def seeds_tell_draws_apart(subject: Subject) -> None:
    """Other seeds draw other tokens, whichever of their 64 bits differ, and the same seed the same."""
    epoch = await subject.open()
    need_choice(epoch)
    num_tokens = 8
    prompt = prompt_of(epoch, PROMPT_TOKENS)
    block_ids = epoch.blocks_for(len(prompt) + num_tokens)
    async with epoch.stream() as stream:

        async def drawn(seed: int) -> list[int]:
            return await sampled_run(epoch, stream, prompt, hot(num_tokens, seed), block_ids=block_ids)

        for one, other in _SEEDS_ALIKE:
            first, second = await drawn(one), await drawn(other)
            require(first != second, f"the seeds {one} and {other} both drew {first}")
            if epoch.capacity.row_invariant:
                again = await drawn(one)
                require(first == again, f"the seed {one} drew {first}, and then {again}")


async def draws_follow_the_output(subject: Subject) -> None:
    """A draw is of the token's place in the output: a resumed sequence goes on with the same draws."""
    epoch = await subject.open()
    need_choice(epoch, num_tokens=PROMPT_TOKENS + 3)
    prompt = prompt_of(epoch, PROMPT_TOKENS)
    async with epoch.stream() as stream:
        unbroken = await sampled_run(epoch, stream, prompt, hot(6, 5))
        new = epoch.new(prompt + unbroken[:3], hot(6, 5), num_prompt_tokens=len(prompt))
        result = await stream.step(epoch.plan({new.seq_id: len(new.token_ids)}, admit=[new]))
        resumed = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
        for _ in range(2):
            result = await stream.step(epoch.plan({new.seq_id: 1}))
            resumed += expect_tokens(result, {new.seq_id: 1})[new.seq_id]
        draws = Draws(epoch, stream, prompt)
        seeds = range(_NUM_SEEDS)
        first_drawn = await draws.tokens(hot(1, seed) for seed in seeds)
        third_drawn = await draws.tokens((hot(3, seed) for seed in seeds), num_prompt_tokens=len(prompt) - 2)
    if epoch.capacity.row_invariant:
        require(
            resumed == unbroken[3:], f"resumed, the sequence drew {resumed}; unbroken it drew {unbroken[3:]}"
        )
    require(
        first_drawn != third_drawn,
        f"after the same tokens {_NUM_SEEDS} seeds drew the same as first and as third token of an output",
    )


# --- ends -------------------------------------------------------------------------------------------


async def end_tokens_end(subject: Subject) -> None:
    """An end token ends with STOP, is held back before min_tokens, and with ignore_eos ends nothing."""
    epoch = await subject.open()
    need_choice(epoch)
    ends, capacity = set(epoch.capacity.eos_token_ids), epoch.capacity
    if not ends:
        raise Skipped("the executor names no end tokens")
    first_end = min(ends)
    other = next(token_id for token_id in range(capacity.vocab_size) if token_id not in ends)
    forced: dict[str, Any] = {}
    allowed: dict[str, Any] = {}
    if "token_lists" in capacity.features:
        forced, allowed = {"allowed_token_ids": [first_end]}, {"allowed_token_ids": [first_end, other]}
    elif "logit_bias" in capacity.features:
        forced = allowed = {"logit_bias": {first_end: 100.0}, "temperature": 0.0}
    has_ended = has_been_ignored = False
    async with epoch.stream() as stream:
        draws = Draws(epoch, stream, prompt_of(epoch, PROMPT_TOKENS))
        for first in range(0, _MAX_DRAWN, _NUM_SEEDS):
            seeds = range(first, first + _NUM_SEEDS)
            for token_id, end in await draws.ends(hot(1, seed, ignore_eos=False, **forced) for seed in seeds):
                has_ended |= token_id in ends
                expected = (STOP, token_id) if token_id in ends else (LENGTH, 0)
                require(
                    (end.reason, end.matched_token_id) == expected,
                    f"{token_id} came and {end.reason, end.matched_token_id} was told (reason, matched); it "
                    f"should be {expected}: the end tokens are {sorted(ends)}",
                )
            for token_id, end in await draws.ends(hot(1, seed, **forced) for seed in seeds):
                has_been_ignored |= token_id in ends
                require(end.reason == LENGTH, f"with ignore_eos {token_id} ended its sequence with STOP")
            held = await draws.tokens(
                hot(1, seed, ignore_eos=False, min_tokens=1, **allowed) for seed in seeds
            )
            require(not ends & set(held), f"an end token came before min_tokens were out: {held}")
            if has_ended and has_been_ignored:
                return
    raise Skipped(f"no end token came among {_MAX_DRAWN} tokens, and none can be forced")


async def longest_sequence_ends(subject: Subject) -> None:
    """A sequence of max_seq_len tokens ends with LENGTH, whatever max_tokens says."""
    epoch = await subject.open()
    capacity = epoch.capacity
    longest, most = capacity.max_seq_len, capacity.num_blocks * capacity.block_size
    if longest > min(most, _LONGEST_COMPUTED):
        raise Skipped(
            f"max_seq_len is {longest}; the blocks hold {most} tokens, and at most {_LONGEST_COMPUTED} are "
            "computed here"
        )
    new = epoch.new(prompt_of(epoch, longest - 2), greedy(8), block_ids=epoch.blocks_for(longest))
    admit, left = [new], longest - 2
    async with epoch.stream() as stream:
        while left:
            count = min(left, capacity.max_num_batched_tokens)
            result = await stream.step(epoch.plan({new.seq_id: count}, admit=admit))
            admit, left = [], left - count
        require(not result.finished, "the sequence ended a token before max_seq_len")
        result = await stream.step(epoch.plan({new.seq_id: 1}))
    expect_finished(result, new.seq_id, LENGTH)


# --- what may be offered ----------------------------------------------------------------------------

# An option of each feature, at a value that asks for something.
_ASKING: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "logprobs": [{"logprobs": 1}],
    "prompt_logprobs": [{"prompt_logprobs": 1}],
    "penalties": [{"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}],
    "logit_bias": [{"logit_bias": {1: 1.0}}],
    "token_lists": [{"allowed_token_ids": [1]}, {"banned_token_ids": [1]}],
    "constraints": [
        {"json_schema": "{}"},
        {"regex": "a"},
        {"choice": common_pb2.Choices(values=["a"])},
        {
            "json_or_tagged": common_pb2.JsonOrTagged(
                json_schema="{}", tags=[common_pb2.Tagged(begin="<", json_schema="{}", end=">")]
            )
        },
    ],
}


async def options_not_offered_are_refused(subject: Subject) -> None:
    """An option that the executor does not offer is its row's error, and is not ignored."""
    epoch = await subject.open()
    need(epoch, num_tokens=PROMPT_TOKENS)
    missing = [options for feature, options in _ASKING.items() if feature not in epoch.capacity.features]
    prompt = prompt_of(epoch, PROMPT_TOKENS)
    block_ids = epoch.blocks_for(PROMPT_TOKENS + 2)
    async with epoch.stream() as stream:
        for options in (options for of_feature in missing for options in of_feature):
            new = epoch.new(prompt, hot(2, 1, ignore_eos=False, **options), block_ids=block_ids)
            result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
            named = [error.seq_id for error in result.errors]
            (name,) = options
            require(named == [new.seq_id], f"{name} is of a feature that is not offered, and is no error")
            require(not result.token_ids, f"{name} is of a feature that is not offered, and a token came")


async def logprobs_are_of_the_raw_distribution(subject: Subject) -> None:
    """With the feature "logprobs", they are those before temperature and bias, and as many as asked."""
    epoch = await subject.open()
    need_choice(epoch)
    offers(epoch, "logprobs")
    wanted = min(5, epoch.capacity.vocab_size)
    has_bias = "logit_bias" in epoch.capacity.features
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": HOT}]
    ways += [{"temperature": 0.0, "logit_bias": {1: 100.0}}] if has_bias else []
    reports: list[common_pb2.TokenLogprobs] = []
    async with epoch.stream() as stream:
        for options in ways:
            sampling = hot(1, 1, logprobs=wanted, **options)
            reports.append(await _report(epoch, stream, prompt_of(epoch, PROMPT_TOKENS), sampling))
    for report in reports:
        told, values = len(report.top_token_ids), list(report.top_logprobs)
        require(told == len(values), f"{told} alternatives have {len(values)} log-probabilities")
        held = sum(math.exp(value) for value in values)
        require(
            told == wanted or (told < wanted and held > 1 - _CLOSE),
            f"{wanted} alternatives were asked for and {told} came, of a probability of {held:g} in all",
        )
        require(values == sorted(values, reverse=True), f"the most likely do not come first: {values}")
        listed = dict(zip(report.top_token_ids, values, strict=True))
        require(
            abs(listed.get(report.token_id, report.logprob) - report.logprob) < _CLOSE,
            f"token {report.token_id} has {report.logprob}, and {listed} among the alternatives",
        )
    firsts = [list(report.top_logprobs) for report in reports]
    for values in firsts[1:]:
        is_same = len(values) == len(firsts[0]) and all(
            abs(one - other) < _CLOSE for one, other in zip(values, firsts[0], strict=True)
        )
        require(is_same, f"temperature or bias changed log-probabilities from {firsts[0]} to {values}")


async def penalties_weigh(subject: Subject) -> None:
    """With "penalties", "logit_bias" and "logprobs", each penalty weighs what it should, as it should."""
    epoch = await subject.open()
    need_choice(epoch)
    for feature in ("penalties", "logit_bias", "logprobs"):
        offers(epoch, feature)
    prompt = prompt_of(epoch, PROMPT_TOKENS)
    said, unsaid = [token_id for token_id in range(_MIN_VOCABULARY) if token_id not in prompt][:2]
    known = [*prompt, said, said]
    async with epoch.stream() as stream:
        chances = [await _chance(epoch, stream, known, token_id) for token_id in (said, unsaid)]
        # What was said leads by 1, and both lead all others.
        gap = chances[0] - chances[1]
        bias = {said: min(100.0, 101.0 - gap), unsaid: min(100.0, 99.0 + gap)}
        draws = Draws(epoch, stream, known)
        for num_output, penalties, chosen, sentence in (
            (2, {}, said, "what leads by 1 is not chosen"),
            (2, {"presence_penalty": 2.0}, unsaid, "a presence_penalty of 2 does not weigh"),
            (2, {"presence_penalty": 0.7}, said, "presence_penalty counts a token twice"),
            (0, {"presence_penalty": 2.0}, said, "presence_penalty counts the prompt"),
            (2, {"frequency_penalty": 0.7}, unsaid, "frequency_penalty counts a token once that came twice"),
            (1, {"frequency_penalty": 0.7}, said, "frequency_penalty counts the prompt"),
            (2, {"repetition_penalty": 2.0}, unsaid, "a repetition_penalty of 2 does not weigh"),
            (0, {"repetition_penalty": 2.0}, unsaid, "repetition_penalty does not count the prompt"),
        ):
            sampling = hot(num_output + 1, 1, temperature=0.0, logit_bias=bias, **penalties)
            (token_id,) = await draws.tokens([sampling], num_prompt_tokens=len(known) - num_output)
            require(token_id == chosen, f"{sentence}: {token_id} was chosen, not {chosen}")


async def _report(
    epoch: Epoch, stream: Stream, token_ids: Sequence[int], sampling: common_pb2.SamplingParams
) -> common_pb2.TokenLogprobs:
    """Log-probabilities of the one token after these."""
    new = epoch.new(token_ids, sampling)
    result = await stream.step(epoch.plan({new.seq_id: len(token_ids)}, admit=[new]))
    expect_tokens(result, {new.seq_id: 1})
    reports = [report for row in result.logprobs for report in row.tokens]
    require(len(reports) == 1, f"one token was sampled and {len(reports)} have log-probabilities")
    return reports[0]


async def _chance(epoch: Epoch, stream: Stream, token_ids: Sequence[int], token_id: int) -> float:
    """The log-probability of this token after those; a bias makes it the one that is chosen."""
    sampling = hot(1, 1, temperature=0.0, logprobs=0, logit_bias={token_id: 100.0})
    report = await _report(epoch, stream, token_ids, sampling)
    require(report.token_id == token_id, f"token {token_id} had a bias of 100; {report.token_id} was chosen")
    return report.logprob
