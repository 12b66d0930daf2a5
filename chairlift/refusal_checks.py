"""Plans that an executor must refuse: each is wrong in one way, and ends the epoch with DATA_LOSS.

A plan is made right and then spoiled, so that nothing but the rule in question can be what is refused; where
a rule could hide behind `positions_sum`, the plan comes with each sum that somebody might believe in.

Must not know: our scheduler, our executor, how a verdict is reported.
"""

from collections.abc import Callable, Sequence
from typing import Final

import grpc

from chairlift.checking import (
    Skipped,
    Subject,
    expect_end,
    expect_tokens,
    greedy,
    need,
    offers,
    prompt_of,
    require,
)
from chairlift.step_driver import Epoch
from protos.v1 import executor_pb2

PROMPT_TOKENS: Final = 4
_MAX_OUTPUT: Final = 8

Spoil = Callable[[executor_pb2.BatchPlan], None]
Make = Callable[[Epoch, executor_pb2.NewSequence], executor_pb2.BatchPlan]


async def _expect_refused(subject: Subject, why: str, make: Make, *, num_steps: int = 1) -> None:
    """One sequence has run so many steps; the plan made then must end the epoch."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=2 * PROMPT_TOKENS)
    async with epoch.stream() as stream:
        running = epoch.new(prompt_of(epoch, PROMPT_TOKENS), greedy(_MAX_OUTPUT))
        plan = epoch.plan({running.seq_id: PROMPT_TOKENS}, admit=[running])
        expect_tokens(await stream.step(plan), {running.seq_id: 1})
        for _ in range(num_steps - 1):
            expect_tokens(await stream.step(epoch.plan({running.seq_id: 1})), {running.seq_id: 1})
        await stream.send(make(epoch, running))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, why)


def _spoiled(spoil: Spoil) -> Make:
    """The next plan of a sequence that runs, with one thing wrong."""

    def make(epoch: Epoch, running: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        plan = epoch.plan({running.seq_id: 1}, grow={running.seq_id: epoch.blocks(1)})
        spoil(plan)
        return plan

    return make


def _guessing(spoil: Spoil) -> Make:
    """The next plan of a sequence that runs, with two draft tokens, and one thing wrong."""

    def make(epoch: Epoch, running: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        plan = epoch.plan({running.seq_id: 1}, guess={running.seq_id: [1, 2]})
        spoil(plan)
        return plan

    return make


def _newcomer(spoil: Callable[[executor_pb2.NewSequence], None]) -> Make:
    """A plan that admits a sequence, with one thing wrong about that, and computes nothing."""

    def make(epoch: Epoch, _: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        new = epoch.new(prompt_of(epoch, PROMPT_TOKENS), greedy(_MAX_OUTPUT))
        spoil(new)
        return epoch.plan(admit=[new])

    return make


async def acknowledgements_name_results(subject: Subject) -> None:
    """acked_step_id never names a step without a result, and never falls; what it names is over."""
    epoch = await subject.open()

    def of_itself(plan: executor_pb2.BatchPlan) -> None:
        plan.acked_step_id = plan.step_id

    await _expect_refused(subject, "a plan acknowledged itself", _spoiled(of_itself))

    def again(epoch: Epoch, running: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        plan = epoch.plan({running.seq_id: 1})
        plan.step_id, plan.acked_step_id = 1, 0
        return plan

    await _expect_refused(subject, "an acknowledged plan came again", again, num_steps=2)
    if epoch.capacity.max_window > 2:  # noqa: PLR2004 - with less the window does not let it fall

        def earlier(plan: executor_pb2.BatchPlan) -> None:
            plan.acked_step_id = plan.step_id - 3

        await _expect_refused(subject, "acked_step_id fell", _spoiled(earlier), num_steps=3)


async def columns_fit(subject: Subject) -> None:
    """Columns of different lengths end the epoch."""

    def a_row_without_tokens(plan: executor_pb2.BatchPlan) -> None:
        del plan.num_tokens[:]

    def tokens_without_a_row(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens.append(1)

    def growth_without_a_number(plan: executor_pb2.BatchPlan) -> None:
        del plan.num_new_blocks[:], plan.new_block_ids[:]

    def a_number_without_growth(plan: executor_pb2.BatchPlan) -> None:
        plan.num_new_blocks.append(0)

    def a_block_too_few(plan: executor_pb2.BatchPlan) -> None:
        del plan.new_block_ids[:]

    def a_block_too_many(plan: executor_pb2.BatchPlan) -> None:
        plan.new_block_ids.append(plan.new_block_ids[0])

    for spoil, why in (
        (a_row_without_tokens, "there were fewer num_tokens than seq_ids"),
        (tokens_without_a_row, "there were more num_tokens than seq_ids"),
        (growth_without_a_number, "there were fewer num_new_blocks than grown_seq_ids"),
        (a_number_without_growth, "there were more num_new_blocks than grown_seq_ids"),
        (a_block_too_few, "there were fewer new_block_ids than num_new_blocks says"),
        (a_block_too_many, "there were more new_block_ids than num_new_blocks says"),
    ):
        await _expect_refused(subject, why, _spoiled(spoil))


async def rows_fit(subject: Subject) -> None:
    """A row of nothing, one past the known tokens, and two rows of one sequence end the epoch."""

    def of_nothing(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] = 0

    def past_the_known(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] = 2

    await _expect_refused(subject, "a row had no tokens", _spoiled(of_nothing))
    await _expect_refused(subject, "a row went past the known tokens", _spoiled(past_the_known))
    for position in (0, 1):

        def two(
            epoch: Epoch, _: executor_pb2.NewSequence, position: int = position
        ) -> executor_pb2.BatchPlan:
            new = epoch.new(prompt_of(epoch, PROMPT_TOKENS), greedy(4))
            plan = epoch.plan({new.seq_id: 1}, admit=[new])
            plan.seq_ids.append(new.seq_id)
            plan.num_tokens.append(1)
            plan.positions_sum = position
            return plan

        await _expect_refused(subject, "a sequence had two rows", two)


async def draft_tokens_not_offered_are_refused(subject: Subject) -> None:
    """Draft tokens that are not offered end the epoch: the row would have too few tokens."""
    if "draft_tokens" not in (await subject.open()).capacity.features:
        await _expect_refused(subject, "draft tokens are not offered", _guessing(lambda _: None))


async def entries_of_draft_tokens_fit(subject: Subject) -> None:
    """With the feature "draft_tokens", an entry that is empty, doubled or of no row ends the epoch."""
    epoch = await subject.open()
    offers(epoch, "draft_tokens")
    vocab_size = epoch.capacity.vocab_size

    def of_one_twice(plan: executor_pb2.BatchPlan) -> None:
        plan.draft_tokens.add().CopyFrom(plan.draft_tokens[0])

    def of_one_in_two_parts(plan: executor_pb2.BatchPlan) -> None:
        first, *others = plan.draft_tokens[0].token_ids
        plan.draft_tokens[0].token_ids[:] = [first]
        plan.draft_tokens.add(seq_id=plan.draft_tokens[0].seq_id, token_ids=others)

    def without_a_row(plan: executor_pb2.BatchPlan) -> None:
        del plan.seq_ids[:], plan.num_tokens[:]
        plan.positions_sum = 0

    def of_nobody(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] = 1
        plan.draft_tokens[0].seq_id += 1000

    def of_none(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] = 1
        del plan.draft_tokens[0].token_ids[:]

    def outside_the_vocabulary(plan: executor_pb2.BatchPlan) -> None:
        plan.draft_tokens[0].token_ids[-1] = vocab_size

    for spoil, why in (
        (of_one_twice, "a sequence had its draft tokens twice"),
        (of_one_in_two_parts, "a sequence had two entries of draft tokens"),
        (without_a_row, "draft tokens were of a sequence without a row"),
        (of_nobody, "draft tokens were of a sequence that is not known"),
        (of_none, "an entry had no draft tokens"),
        (outside_the_vocabulary, "a draft token was outside the vocabulary"),
    ):
        await _expect_refused(subject, why, _guessing(spoil))


async def draft_tokens_fit_their_row(subject: Subject) -> None:
    """With "draft_tokens", a row ends with the last one, and one token more may be sampled after it."""
    offers(await subject.open(), "draft_tokens")

    def before_the_last(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] -= 1

    def behind_the_last(plan: executor_pb2.BatchPlan) -> None:
        plan.num_tokens[0] += 1

    def too_many(plan: executor_pb2.BatchPlan) -> None:
        num_left = _MAX_OUTPUT - 1
        plan.num_tokens[0] = 1 + num_left
        plan.draft_tokens[0].token_ids[:] = [1] * num_left

    def in_a_chunk(epoch: Epoch, _: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        new = epoch.new(prompt_of(epoch, PROMPT_TOKENS), greedy(_MAX_OUTPUT))
        return epoch.plan({new.seq_id: PROMPT_TOKENS - 1}, admit=[new], guess={new.seq_id: [1]})

    for make, why in (
        (_guessing(before_the_last), "a row ended before its last draft token"),
        (_guessing(behind_the_last), "a row went past its last draft token"),
        (_guessing(too_many), "as many draft tokens came as the sequence may still sample"),
        (in_a_chunk, "draft tokens were of a row that does not reach the last known token"),
    ):
        await _expect_refused(subject, why, make)


async def draft_tokens_are_acknowledged_first(subject: Subject) -> None:
    """With the feature "draft_tokens", a row before their step is acknowledged ends the epoch."""
    epoch = await subject.open()
    offers(epoch, "draft_tokens")
    need(epoch, num_tokens=PROMPT_TOKENS + 1, window=2)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, PROMPT_TOKENS), greedy(_MAX_OUTPUT))
        await stream.step(epoch.plan({new.seq_id: PROMPT_TOKENS}, admit=[new], guess={new.seq_id: [1]}))
        await stream.send(epoch.plan({new.seq_id: 1}, acked_step_id=0))
        why = "a row came before the step with the sequence's draft tokens was acknowledged"
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, why)


async def unknown_sequences_are_refused(subject: Subject) -> None:
    """New blocks or a row of an unknown sequence end the epoch, also in the plan that releases it."""

    def blocks_of_nobody(epoch: Epoch, _: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        return epoch.plan(grow={1000: epoch.blocks(1)})

    await _expect_refused(subject, "new blocks were for a sequence that is not known", blocks_of_nobody)
    for position in (0, PROMPT_TOKENS):

        def released(
            epoch: Epoch, running: executor_pb2.NewSequence, position: int = position
        ) -> executor_pb2.BatchPlan:
            plan = epoch.plan({running.seq_id: 1}, release=[running.seq_id])
            plan.positions_sum = position
            return plan

        await _expect_refused(subject, "a row was of a sequence that the plan releases", released)


async def open_forgets_sequences(subject: Subject) -> None:
    """Open forgets every sequence: one of the epoch before is not known."""
    for position in (0, PROMPT_TOKENS):
        old = await subject.open()
        need(old, num_tokens=PROMPT_TOKENS)
        async with old.stream() as stream:
            new = old.new(prompt_of(old, PROMPT_TOKENS), greedy(_MAX_OUTPUT))
            await stream.step(old.plan({new.seq_id: PROMPT_TOKENS}, admit=[new]))
        epoch = await subject.open()
        async with epoch.stream() as stream:
            plan = epoch.plan()
            plan.seq_ids.append(new.seq_id)
            plan.num_tokens.append(1)
            plan.positions_sum = position
            await stream.send(plan)
            why = "a row was of a sequence of the epoch before"
            expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, why)


async def admissions_fit(subject: Subject) -> None:
    """A seq_id of 0, a prompt of no or too many tokens, and nothing left to compute end the epoch."""

    def without_id(new: executor_pb2.NewSequence) -> None:
        new.seq_id = 0

    def without_prompt(new: executor_pb2.NewSequence) -> None:
        new.num_prompt_tokens = 0

    def longer_prompt(new: executor_pb2.NewSequence) -> None:
        new.num_prompt_tokens = len(new.token_ids) + 1

    def all_computed(new: executor_pb2.NewSequence) -> None:
        new.num_computed_tokens = len(new.token_ids)

    for spoil, why in (
        (without_id, "a seq_id was 0"),
        (without_prompt, "num_prompt_tokens was 0"),
        (longer_prompt, "num_prompt_tokens was more than there are tokens"),
        (all_computed, "num_computed_tokens left nothing to compute"),
    ):
        await _expect_refused(subject, why, _newcomer(spoil))


async def prompt_logprobs_begin_where_they_can(subject: Subject) -> None:
    """With the feature "prompt_logprobs", one that asks for positions already computed ends the epoch."""
    offers(await subject.open(), "prompt_logprobs")

    def asks_too_late(new: executor_pb2.NewSequence) -> None:
        new.sampling.prompt_logprobs, new.prompt_logprobs_from, new.num_computed_tokens = 1, 2, 2

    await _expect_refused(subject, "prompt_logprobs_from was computed already", _newcomer(asks_too_late))


async def capacity_is_kept(subject: Subject) -> None:
    """More rows than max_num_seqs, or more tokens than max_num_batched_tokens, end the epoch."""
    capacity = (await subject.open()).capacity
    most_rows, most_tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
    if most_tokens > most_rows:

        def too_many_rows(epoch: Epoch, running: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
            return _crowd(epoch, running, [1] * most_rows)

        await _expect_refused(subject, f"a plan had {most_rows + 1} rows", too_many_rows)
    row = max(1, min(most_tokens, capacity.max_seq_len - 2))
    rest = most_tokens % row
    rows = [row] * (most_tokens // row) + ([rest] if rest else [])
    if len(rows) >= most_rows:
        raise Skipped(f"{most_tokens} tokens do not fit into {most_rows - 1} sequences of {row}")

    def too_many_tokens(epoch: Epoch, running: executor_pb2.NewSequence) -> executor_pb2.BatchPlan:
        return _crowd(epoch, running, rows)

    await _expect_refused(subject, f"a plan had {most_tokens + 1} tokens", too_many_tokens)


def _crowd(epoch: Epoch, running: executor_pb2.NewSequence, rows: Sequence[int]) -> executor_pb2.BatchPlan:
    """New sequences with these rows beside the one that runs. It is refused, so they may share a block."""
    news = [
        epoch.new(
            prompt_of(epoch, count + 1), greedy(1), block_ids=[0] * (count // epoch.capacity.block_size + 1)
        )
        for count in rows
    ]
    return epoch.plan(
        {running.seq_id: 1} | {new.seq_id: count for new, count in zip(news, rows, strict=True)}, admit=news
    )


async def too_long_a_sequence_is_not_computed(subject: Subject) -> None:
    """A sequence above max_seq_len is its row's error, or ends the epoch."""
    epoch = await subject.open()
    longest = epoch.capacity.max_seq_len
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, longest + 1), greedy(1), block_ids=[0])
        await stream.send(epoch.plan(admit=[new]))
        answer = await stream.result_or_end()
    if isinstance(answer, executor_pb2.StepResult):
        named = [error.seq_id for error in answer.errors]
        require(named == [new.seq_id], f"a sequence had {longest + 1} tokens, max_seq_len is {longest}")
    else:
        why = f"a sequence had {longest + 1} tokens, max_seq_len is {longest}"
        expect_end(answer, grpc.StatusCode.DATA_LOSS, why)
