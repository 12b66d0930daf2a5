"""A scheduler in small that guesses: it drives a runner through the real table, step by step.

Whoever calls it decides in each step what each sequence computes, and which draft tokens it has.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from executor.device import Runner
from executor.plan import BatchPlan, FinishedSequence, NewSequence, SamplingParams, TokenLogprobs
from executor.sequences import SequenceTable
from executor.work import EpochWork


@dataclass(slots=True)
class Told:
    """One sequence, as the scheduler sees it, and all that it was told of it."""

    new: NewSequence
    token_ids: list[int]
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishedSequence | str | None = None
    """How it ended; the sentence of its error."""
    num_steps: int = 0

    @property
    def output(self) -> list[int]:
        """What it has said so far."""
        return self.token_ids[self.new.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def answer(self) -> tuple[Any, ...]:
        """What may not depend on the guesses, every float of it."""
        return self.output, self.logprobs, self.prompt_logprobs, self.end


Decide = Callable[[Told], tuple[int, list[int]]]
"""How many known tokens its row computes (0 for no row), and the draft tokens after them."""


def without_guesses(told: Told) -> tuple[int, list[int]]:
    """A row of all that is left."""
    return told.num_left, []


def new(seq_id: int, prompt: Iterable[int], params: SamplingParams, blocks: Iterable[int]) -> NewSequence:
    """A sequence from its first token on."""
    token_ids = tuple(prompt)
    wanted_from = None if params.prompt_logprobs is None or len(token_ids) < 2 else 1
    return NewSequence(seq_id, token_ids, len(token_ids), 0, tuple(blocks), params, (), wanted_from)


def run(
    runner: Runner, admitted: list[NewSequence], decide: Decide = without_guesses, *, max_seq_len: int = 512
) -> list[Told]:
    """Runs all of them to their ends, beside each other, in a new epoch."""
    table = SequenceTable(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_seq_len=max_seq_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        takes_draft_tokens=True,
        matcher_of=runner.matcher_of,
    )
    work = EpochWork(runner, table)
    everyone = {each.seq_id: Told(each, list(each.token_ids)) for each in admitted}
    step_id = 0
    while live := [told for told in everyone.values() if told.end is None]:
        rows: dict[int, tuple[Told, int, list[int]]] = {}
        for told in live:
            num_tokens, draft = decide(told)
            if num_tokens:
                rows[told.new.seq_id] = (told, num_tokens, draft)
        step_id += 1
        _step(
            work,
            BatchPlan(
                epoch=1,
                step_id=step_id,
                acked_step_id=step_id - 1,
                admitted=tuple(admitted) if step_id == 1 else (),
                seq_ids=tuple(rows),
                num_tokens=tuple(num_tokens + len(draft) for _, num_tokens, draft in rows.values()),
                positions_sum=sum(told.num_computed for told, _, _ in rows.values()),
                draft_tokens=tuple((seq_id, tuple(draft)) for seq_id, (_, _, draft) in rows.items() if draft),
            ),
            everyone,
            rows,
        )
    return list(everyone.values())


def _step(
    work: EpochWork,
    plan: BatchPlan,
    everyone: dict[int, Told],
    rows: dict[int, tuple[Told, int, list[int]]],
) -> None:
    result, _ = work.execute(plan)
    for told, num_tokens, _ in rows.values():
        told.num_computed += num_tokens
        told.num_steps += 1
    start = 0
    for seq_id, count in zip(result.seq_ids, result.num_sampled, strict=True):
        told, _, draft = rows[seq_id]
        ids = list(result.token_ids[start : start + count])
        start += count
        assert ids[:-1] == draft[: count - 1], "a token is after one that was not guessed"
        told.token_ids += ids
        told.num_computed += max(0, count - 1)
    for seq_id, chances in result.logprobs:
        everyone[seq_id].logprobs.append(chances)
    for stretch in result.prompt_logprobs:
        told = everyone[stretch.seq_id]
        assert stretch.first_position == 1 + len(told.prompt_logprobs)
        told.prompt_logprobs += stretch.tokens
    for ended in result.finished:
        everyone[ended.seq_id].end = ended
    for error in result.errors:
        everyone[error.seq_id].end = error.message
