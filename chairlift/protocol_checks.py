"""What the step protocol (docs/protocol.md) requires of an executor, as a list of checks.

Works on any model: prompts are small ids, stop ids are learned from a first greedy run. Each check opens an
epoch of its own and knows nothing of the others; its docstring is the sentence reported when it passes. Plans
that must be refused are in `refusal_checks`, how a token is chosen in `sampling_checks`, and what guesses may
and may not change in `draft_checks`.

Must not know: our scheduler, our executor, how a verdict is reported.
"""

from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift import draft_checks, refusal_checks, sampling_checks
from chairlift.checking import (
    LENGTH,
    STOP,
    Check,
    Skipped,
    Subject,
    expect_end,
    expect_finished,
    expect_tokens,
    greedy,
    greedy_run,
    need,
    offers,
    open_once_free,
    prompt_of,
    require,
    sampled_run,
)
from chairlift.step_driver import Ended, Epoch, Failure, ended_by, tokens_by_sequence

SERVICE_NAME: Final = "chairlift.v1.Executor"


# --- the checks -------------------------------------------------------------------------------------


async def capacity_is_told(subject: Subject) -> None:
    """Open tells an epoch, a term and a capacity that a scheduler can work with."""
    first, second = await subject.open(), await subject.open()
    for capacity in (first.capacity, second.capacity):
        for name in (
            "epoch",
            "term",
            "protocol_revision",
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_seq_len",
            "max_window",
            "vocab_size",
        ):
            require(getattr(capacity, name) > 0, f"{name} is 0 in OpenResponse")
        bad_ids = [i for i in capacity.eos_token_ids if i >= capacity.vocab_size]
        require(not bad_ids, f"eos_token_ids {bad_ids} are outside the vocabulary of {capacity.vocab_size}")
    names = {capacity.instance_id for capacity in (first.capacity, second.capacity)}
    require(len(names) == 1 and "" not in names, f"instance_id names the process; two Opens told {names}")
    require(first.capacity.epoch != second.capacity.epoch, "two Opens gave the same epoch")
    require(first.capacity.term <= second.capacity.term, "the second Open was granted a lower term")


async def health_says_serving(subject: Subject) -> None:
    """grpc.health.v1 says SERVING for the service and for the whole process."""
    stub = health_pb2_grpc.HealthStub(subject.channel)
    for name in ("", SERVICE_NAME):
        try:
            response = await stub.Check(
                health_pb2.HealthCheckRequest(service=name), timeout=subject.timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise Failure(f"health of {name!r} answered {ended_by(error)}") from error
        require(response.status == response.SERVING, f"health of {name!r} is not SERVING")


async def plan_without_rows(subject: Subject) -> None:
    """A plan without rows is answered like any other."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        expect_tokens(await stream.step(epoch.plan()), {})
        expect_tokens(await stream.step(epoch.plan()), {})


async def generates_to_length(subject: Subject) -> None:
    """A prompt, then one token a step, until max_tokens ends it with LENGTH."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        output = await greedy_run(epoch, stream, prompt_of(epoch, 4), 5)
    bad_ids = [token_id for token_id in output if token_id >= epoch.capacity.vocab_size]
    require(not bad_ids, f"sampled ids {bad_ids} are outside the vocabulary")


async def one_token(subject: Subject) -> None:
    """A sequence with max_tokens 1 ends in the step that computes its prompt."""
    epoch = await subject.open()
    need(epoch, num_tokens=3)
    async with epoch.stream() as stream:
        await greedy_run(epoch, stream, prompt_of(epoch, 3), 1)


async def stop_id_ends(subject: Subject) -> None:
    """A stop token id ends the sequence with STOP, is its last token, and beats LENGTH in the same step."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        output = await greedy_run(epoch, stream, prompt, 4)
        stop_id = output[-1]
        new = epoch.new(prompt, greedy(output.index(stop_id) + 1, stop_token_ids=[stop_id]))
        result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
        for _ in range(output.index(stop_id)):
            require(not result.finished, "a sequence ended before its stop id came")
            result = await stream.step(epoch.plan({new.seq_id: 1}))
        require(
            list(result.token_ids) == [stop_id], f"the last token is {list(result.token_ids)}, not {stop_id}"
        )
        expect_finished(result, new.seq_id, STOP, stop_id)


async def min_tokens_hold_the_end_back(subject: Subject) -> None:
    """A stop id cannot be chosen before min_tokens are out."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        (stop_id,) = await greedy_run(epoch, stream, prompt, 1)
        new = epoch.new(prompt, greedy(4, stop_token_ids=[stop_id], min_tokens=2))
        result = await stream.step(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
        for _ in range(2):
            (token_id,) = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
            require(token_id != stop_id, f"the stop id {stop_id} was chosen before min_tokens were out")
            require(not result.finished, "the sequence ended before min_tokens were out")
            result = await stream.step(epoch.plan({new.seq_id: 1}))


async def chunked_prompt(subject: Subject) -> None:
    """A prompt in chunks samples nothing before its last token."""
    epoch = await subject.open()
    need(epoch, num_tokens=7)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 7)
        new = epoch.new(prompt, greedy(2))
        expect_tokens(await stream.step(epoch.plan({new.seq_id: 3}, admit=[new])), {new.seq_id: 0})
        expect_tokens(await stream.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 0})
        expect_tokens(await stream.step(epoch.plan()), {})
        first = expect_tokens(await stream.step(epoch.plan({new.seq_id: 3})), {new.seq_id: 1})
        second = expect_tokens(await stream.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 1})
        whole = await greedy_run(epoch, stream, prompt, 2)
    if epoch.capacity.row_invariant:
        chunked = first[new.seq_id] + second[new.seq_id]
        require(chunked == whole, f"in chunks the prompt gives {chunked}, in one piece {whole}")


async def ragged_rows(subject: Subject) -> None:
    """A decode, a chunk and a whole prompt run in one step and report in the plan's order."""
    epoch = await subject.open()
    need(epoch, num_seqs=3, num_tokens=8)
    async with epoch.stream() as stream:
        a, b, c = (epoch.new(prompt_of(epoch, n, salt=n), greedy(4)) for n in (3, 6, 4))
        expect_tokens(await stream.step(epoch.plan({a.seq_id: 3}, admit=[a])), {a.seq_id: 1})
        rows = {c.seq_id: 4, b.seq_id: 3, a.seq_id: 1}
        expect_tokens(
            await stream.step(epoch.plan(rows, admit=[b, c])), {c.seq_id: 1, b.seq_id: 0, a.seq_id: 1}
        )
        rows = {b.seq_id: 3, a.seq_id: 1, c.seq_id: 1}
        expect_tokens(await stream.step(epoch.plan(rows)), {b.seq_id: 1, a.seq_id: 1, c.seq_id: 1})


async def batch_changes_nothing(subject: Subject) -> None:
    """With row_invariant, a sequence's tokens do not depend on who runs beside it."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=8)
    if not epoch.capacity.row_invariant:
        raise Skipped("the executor does not claim row_invariant")
    async with epoch.stream() as stream:
        alone = await greedy_run(epoch, stream, prompt_of(epoch, 4), 3)
        a, b = epoch.new(prompt_of(epoch, 4), greedy(3)), epoch.new(prompt_of(epoch, 3, salt=1), greedy(3))
        result = await stream.step(epoch.plan({b.seq_id: 3, a.seq_id: 4}, admit=[a, b]))
        together = expect_tokens(result, {b.seq_id: 1, a.seq_id: 1})[a.seq_id]
        for _ in range(2):
            result = await stream.step(epoch.plan({b.seq_id: 1, a.seq_id: 1}))
            together += expect_tokens(result, {b.seq_id: 1, a.seq_id: 1})[a.seq_id]
    require(alone == together, f"alone the sequence gives {alone}, beside another one {together}")


async def blocks_grow(subject: Subject) -> None:
    """A block table grows by new blocks, and a row past the blocks of its sequence ends the epoch."""
    epoch = await subject.open()
    block_size = epoch.capacity.block_size
    need(epoch, num_tokens=block_size)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, block_size), greedy(block_size + 2), block_ids=epoch.blocks(1))
        expect_tokens(await stream.step(epoch.plan({new.seq_id: block_size}, admit=[new])), {new.seq_id: 1})
        plan = epoch.plan({new.seq_id: 1}, grow={new.seq_id: epoch.blocks(1)})
        expect_tokens(await stream.step(plan), {new.seq_id: 1})
        for _ in range(block_size - 1):
            expect_tokens(await stream.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 1})
        await stream.send(epoch.plan({new.seq_id: 1}))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a row had no block to write to")


async def resumed_sequence(subject: Subject) -> None:
    """Output from before a preemption counts towards max_tokens; the sequence goes on after it."""
    epoch = await subject.open()
    need(epoch, num_tokens=7)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        output = await greedy_run(epoch, stream, prompt, 5)
        new = epoch.new(prompt + output[:3], greedy(5), num_prompt_tokens=len(prompt))
        result = await stream.step(epoch.plan({new.seq_id: len(prompt) + 3}, admit=[new]))
        rest = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
        require(not result.finished, "the resumed sequence ended a token early")
        result = await stream.step(epoch.plan({new.seq_id: 1}))
        rest += expect_tokens(result, {new.seq_id: 1})[new.seq_id]
        expect_finished(result, new.seq_id, LENGTH)
    if epoch.capacity.row_invariant:
        require(rest == output[3:], f"the resumed sequence went on with {rest}, not with {output[3:]}")


async def computed_prefix(subject: Subject) -> None:
    """A sequence may start after tokens whose KV is in its blocks already."""
    epoch = await subject.open()
    block_size = epoch.capacity.block_size
    need(epoch, num_tokens=block_size + 2)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, block_size + 2)
        first = epoch.new(prompt, greedy(2))
        result = await stream.step(epoch.plan({first.seq_id: len(prompt)}, admit=[first]))
        cold = expect_tokens(result, {first.seq_id: 1})[first.seq_id]
        block_ids = [first.block_ids[0], *epoch.blocks_for(block_size + 2)]
        second = epoch.new(prompt, greedy(2), num_computed_tokens=block_size, block_ids=block_ids)
        plan = epoch.plan({second.seq_id: 2}, admit=[second], release=[first.seq_id])
        warm = expect_tokens(await stream.step(plan), {second.seq_id: 1})[second.seq_id]
    if epoch.capacity.row_invariant:
        require(cold == warm, f"with a computed prefix the sequence gives {warm}, without {cold}")


async def releases(subject: Subject) -> None:
    """A released sequence is forgotten, a second release is no error, a row for it ends the epoch."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=8)
    async with epoch.stream() as stream:
        a, b = epoch.new(prompt_of(epoch, 3), greedy(8)), epoch.new(prompt_of(epoch, 4), greedy(8))
        await stream.step(epoch.plan({a.seq_id: 3, b.seq_id: 4}, admit=[a, b]))
        expect_tokens(await stream.step(epoch.plan({b.seq_id: 1}, release=[a.seq_id])), {b.seq_id: 1})
        expect_tokens(await stream.step(epoch.plan({b.seq_id: 1}, release=[a.seq_id])), {b.seq_id: 1})
        await stream.send(epoch.plan({a.seq_id: 1}))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a released sequence had a row")


async def window_two(subject: Subject) -> None:
    """With a window of 2, plan k + 1 computes the token that step k samples, before its result is sent."""
    epoch = await subject.open()
    need(epoch, num_tokens=4, window=2)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        alone = await greedy_run(epoch, stream, prompt, 4)
        new = epoch.new(prompt, greedy(4))
        await stream.send(epoch.plan({new.seq_id: len(prompt)}, admit=[new]))
        output: list[int] = []
        for _ in range(3):
            await stream.send(epoch.plan({new.seq_id: 1}))
            output += expect_tokens(await stream.result(), {new.seq_id: 1})[new.seq_id]
        result = await stream.result()
        output += expect_tokens(result, {new.seq_id: 1})[new.seq_id]
        expect_finished(result, new.seq_id, LENGTH)
    if epoch.capacity.row_invariant:
        require(output == alone, f"with a window of 2 the sequence gives {output}, with 1 {alone}")


async def ghosts(subject: Subject) -> None:
    """A row planned before an end was known is skipped, counts in positions_sum, and hurts nobody."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=8, window=2)
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        (stop_id,) = await greedy_run(epoch, stream, prompt, 1)
        a, b = (
            epoch.new(prompt, greedy(8, stop_token_ids=[stop_id])),
            epoch.new(prompt_of(epoch, 3), greedy(8)),
        )
        await stream.send(epoch.plan({a.seq_id: 4, b.seq_id: 3}, admit=[a, b]))
        await stream.send(epoch.plan({a.seq_id: 1, b.seq_id: 1}, grow={a.seq_id: epoch.blocks(1)}))
        result = await stream.result()
        if a.seq_id not in [ended.seq_id for ended in result.finished]:
            raise Skipped("the model chose another token beside a neighbour, so nothing ended")
        expect_tokens(await stream.result(), {b.seq_id: 1})
        expect_tokens(await stream.step(epoch.plan({b.seq_id: 1}, release=[a.seq_id])), {b.seq_id: 1})


async def acknowledged_ghost_is_forgotten(subject: Subject) -> None:
    """Once its end is acknowledged, an ended sequence is unknown: a row for it ends the epoch."""
    epoch = await subject.open()
    need(epoch, num_tokens=3)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 3), greedy(1))
        expect_finished(await stream.step(epoch.plan({new.seq_id: 3}, admit=[new])), new.seq_id, LENGTH)
        await stream.send(epoch.plan({new.seq_id: 1}))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "an acknowledged ghost had a row")


async def row_error_is_one_rows(subject: Subject) -> None:
    """A token id outside the vocabulary ends its own sequence with an error, and no other."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=6)
    async with epoch.stream() as stream:
        good = epoch.new(prompt_of(epoch, 3), greedy(4))
        bad = epoch.new([1, epoch.capacity.vocab_size, 2], greedy(4))
        result = await stream.step(epoch.plan({bad.seq_id: 3, good.seq_id: 3}, admit=[bad, good]))
        require(
            [error.seq_id for error in result.errors] == [bad.seq_id],
            f"errors name {[error.seq_id for error in result.errors]}; they should name {bad.seq_id} alone",
        )
        require(bool(result.errors[0].message), "the error has no sentence")
        require(result.errors[0].status_code != 0, "the error has no status code")
        tokens = tokens_by_sequence(result)
        require(not tokens.get(bad.seq_id), "the sequence with the bad id has a token")
        require(len(tokens.get(good.seq_id, [])) == 1, "the neighbour of the bad row has no token")
        result = await stream.step(epoch.plan({good.seq_id: 1}, release=[bad.seq_id]))
        expect_tokens(result, {good.seq_id: 1})


async def seq_id_is_used_once(subject: Subject) -> None:
    """A seq_id that comes again in an epoch, even after its release, ends the epoch."""
    epoch = await subject.open()
    need(epoch, num_tokens=3)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 3), greedy(4))
        await stream.step(epoch.plan({new.seq_id: 3}, admit=[new]))
        await stream.step(epoch.plan(release=[new.seq_id]))
        await stream.send(epoch.plan(admit=[new]))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a seq_id was used twice")


async def blocks_exist(subject: Subject) -> None:
    """A block id past num_blocks ends the epoch."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 3), greedy(4), block_ids=[0, epoch.capacity.num_blocks])
        await stream.send(epoch.plan(admit=[new]))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a block does not exist")


async def reserved_fields_are_refused(subject: Subject) -> None:
    """A plan that sets a field reserved for later ends the epoch: it would be computed wrongly."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        plan = epoch.plan()
        plan.zero_block_ids.append(0)
        await stream.send(plan)
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a reserved field was set")


async def logprobs_are_reported(subject: Subject) -> None:
    """With the feature "logprobs", rows that ask get them, and only those."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=6)
    offers(epoch, "logprobs")
    async with epoch.stream() as stream:
        asking = greedy(2)
        asking.logprobs = num_alternatives = min(2, epoch.capacity.vocab_size)
        a, b = epoch.new(prompt_of(epoch, 3), asking), epoch.new(prompt_of(epoch, 3), greedy(2))
        result = await stream.step(epoch.plan({a.seq_id: 3, b.seq_id: 3}, admit=[a, b]))
    require(
        [row.seq_id for row in result.logprobs] == [a.seq_id], "logprobs do not name just the row that asked"
    )
    tokens = expect_tokens(result, {a.seq_id: 1, b.seq_id: 1})
    require(len(result.logprobs[0].tokens) == 1, "logprobs are of more than the one token that was sampled")
    (chances,) = result.logprobs[0].tokens
    require(chances.token_id == tokens[a.seq_id][0], "logprobs are of another token")
    require(
        len(chances.top_token_ids) == len(chances.top_logprobs) <= num_alternatives,
        f"{num_alternatives} alternatives were asked for; {len(chances.top_token_ids)} ids and "
        f"{len(chances.top_logprobs)} values came",
    )
    require(chances.logprob <= 0 and chances.rank >= 1, "a log-probability is at most 0, a rank at least 1")


async def token_lists_are_kept(subject: Subject) -> None:
    """With the feature "token_lists", no token is chosen that is banned or not allowed."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    offers(epoch, "token_lists")
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        plain = await greedy_run(epoch, stream, prompt, 3)
        banning, allowing = greedy(3), greedy(3)
        banning.banned_token_ids.extend(plain)
        allowing.allowed_token_ids.extend([0, 1])
        allowing.banned_token_ids.append(1)
        banned = await sampled_run(epoch, stream, prompt, banning)
        allowed = await sampled_run(epoch, stream, prompt, allowing)
    require(not set(banned) & set(plain), f"{plain} were banned and {banned} were chosen")
    require(allowed == [0, 0, 0], f"only 0 was allowed and not banned, and {allowed} were chosen")


async def bias_is_added(subject: Subject) -> None:
    """With the feature "logit_bias", a bias of 100 raises a token above all others, and 0 changes nothing."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    offers(epoch, "logit_bias")
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        (first,) = await greedy_run(epoch, stream, prompt, 1)
        raised, other = greedy(1), int(first == 0)
        raised.logit_bias[other] = 100.0
        unchanged = greedy(1)
        unchanged.logit_bias[other] = 0.0
        (chosen,) = await sampled_run(epoch, stream, prompt, raised)
        (kept,) = await sampled_run(epoch, stream, prompt, unchanged)
    require(chosen == other, f"token {other} had a bias of 100, and {chosen} was chosen")
    require(kept == first, f"a bias of 0 changed {first} into {kept}")


async def penalties_count_the_output(subject: Subject) -> None:
    """With the feature "penalties", presence and frequency begin after the prompt, also when it resumes."""
    epoch = await subject.open()
    need(epoch, num_tokens=8)
    offers(epoch, "penalties")
    async with epoch.stream() as stream:
        prompt = prompt_of(epoch, 4)
        prompt += await greedy_run(epoch, stream, prompt, 1)
        (plain,) = await greedy_run(epoch, stream, prompt, 1)
        penalized = greedy(4)
        penalized.presence_penalty = penalized.frequency_penalty = 2.0
        output = await sampled_run(epoch, stream, prompt, penalized)
        require(len(output) == 4, f"{len(output)} tokens came, max_tokens is 4")  # noqa: PLR2004
        new = epoch.new(prompt + output[:3], penalized, num_prompt_tokens=len(prompt))
        result = await stream.step(epoch.plan({new.seq_id: len(prompt) + 3}, admit=[new]))
        (resumed,) = expect_tokens(result, {new.seq_id: 1})[new.seq_id]
    if epoch.capacity.row_invariant:
        require(output[0] == plain, f"before any output they changed {plain} into {output[0]}")
        require(resumed == output[3], f"resumed, the sequence went on with {resumed}, not with {output[3]}")


async def prompt_logprobs_come_once(subject: Subject) -> None:
    """With the feature "prompt_logprobs", each wanted position of a prompt is told once, by its chunk."""
    epoch = await subject.open()
    need(epoch, num_seqs=2, num_tokens=7)
    offers(epoch, "prompt_logprobs")
    async with epoch.stream() as stream:
        asking, prompt = greedy(2), prompt_of(epoch, 7)
        asking.prompt_logprobs = 1
        for wanted_from in (1, 4):
            a, b = epoch.new(prompt, asking), epoch.new(prompt_of(epoch, 2), greedy(2))
            a.prompt_logprobs_from = wanted_from
            results = [await stream.step(epoch.plan({a.seq_id: 3}, admit=[a]))]
            results.append(await stream.step(epoch.plan({a.seq_id: 2, b.seq_id: 2}, admit=[b])))
            results.append(await stream.step(epoch.plan({a.seq_id: 2, b.seq_id: 1})))
            results.append(await stream.step(epoch.plan({a.seq_id: 1})))
            told = [row for result in results for row in result.prompt_logprobs]
            require(
                {row.seq_id for row in told} == {a.seq_id}, "they do not name just the sequence that asked"
            )
            tokens = [
                (row.first_position + i, token.token_id) for row in told for i, token in enumerate(row.tokens)
            ]
            expected = [(position, prompt[position]) for position in range(wanted_from, len(prompt))]
            require(tokens == expected, f"positions and tokens are {tokens}; they should be {expected}")
            last = [row.first_position for row in results[2].prompt_logprobs]
            require(last == [6], "a chunk told of positions that others compute")
            require(
                all(token.logprob <= 0 and token.rank >= 1 for row in told for token in row.tokens),
                "a log-probability is at most 0, a rank at least 1",
            )


async def duplicate_is_answered_once_computed(subject: Subject) -> None:
    """A plan that comes again gets the kept result, byte for byte, and is not run again."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 4), greedy(3))
        plan = epoch.plan({new.seq_id: 4}, admit=[new])
        first, again = await stream.step(plan), await stream.step(plan)
        require(
            first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True),
            "the second answer to the same plan differs from the first",
        )
        expect_tokens(await stream.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 1})


async def duplicate_that_differs(subject: Subject) -> None:
    """A plan that comes again and differs ends the epoch."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 4), greedy(3))
        plan = epoch.plan({new.seq_id: 4}, admit=[new])
        await stream.step(plan)
        plan.num_tokens[0] = 3
        await stream.send(plan)
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a plan came again and differed")


async def steps_without_a_gap(subject: Subject) -> None:
    """A step id that leaves one out ends the epoch."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        await stream.step(epoch.plan())
        epoch.plan()
        await stream.send(epoch.plan())
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "a step was left out")


async def window_is_kept(subject: Subject) -> None:
    """More unacknowledged plans than max_window end the epoch."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        for _ in range(epoch.capacity.max_window):
            await stream.step(epoch.plan(acked_step_id=0))
        await stream.send(epoch.plan(acked_step_id=0))
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "the window was exceeded")


async def positions_agree(subject: Subject) -> None:
    """A wrong positions_sum ends the epoch for good; the next Open begins a new one."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 4), greedy(3))
        await stream.step(epoch.plan({new.seq_id: 4}, admit=[new]))
        plan = epoch.plan({new.seq_id: 1})
        plan.positions_sum += 1
        await stream.send(plan)
        expect_end(await stream.end(), grpc.StatusCode.DATA_LOSS, "positions_sum was wrong")
    async with epoch.stream() as stream:
        expect_end(await stream.refusal(plan), grpc.StatusCode.FAILED_PRECONDITION, "the epoch was over")
    epoch = await subject.open()
    async with epoch.stream() as stream:
        await greedy_run(epoch, stream, prompt_of(epoch, 4), 1)


async def half_close_gets_every_result(subject: Subject) -> None:
    """A scheduler that sends no more plans gets every result, then OK."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    async with epoch.stream() as stream:
        new = epoch.new(prompt_of(epoch, 4), greedy(3))
        await stream.send(epoch.plan({new.seq_id: 4}, admit=[new]))
        await stream.done_writing()
        expect_tokens(await stream.result(), {new.seq_id: 1})
        expect_end(await stream.end(), grpc.StatusCode.OK, "all results were sent")


async def reattach_after_a_break(subject: Subject) -> None:
    """A broken stream loses nothing: a new one gets the results of the plans it sends again."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    new = epoch.new(prompt_of(epoch, 4), greedy(4))
    plans = [epoch.plan({new.seq_id: 4}, admit=[new])]
    if epoch.capacity.max_window > 1:
        plans.append(epoch.plan({new.seq_id: 1}))
    async with epoch.stream() as stream:
        for plan in plans:
            await stream.send(plan)
    async with epoch.stream() as stream:
        for plan in plans:
            await stream.send(plan)
        for _ in plans:
            expect_tokens(await stream.result(), {new.seq_id: 1})
        expect_tokens(await stream.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 1})


async def newest_stream_wins(subject: Subject) -> None:
    """A second stream takes over with its first plan; the first ends ABORTED."""
    epoch = await subject.open()
    need(epoch, num_tokens=4)
    new = epoch.new(prompt_of(epoch, 4), greedy(4))
    plan = epoch.plan({new.seq_id: 4}, admit=[new])
    async with epoch.stream() as older, epoch.stream() as newer:
        first = await older.step(plan)
        again = await newer.step(plan)
        require(first == again, "the new stream got another result for the same plan")
        expect_end(await older.end(), grpc.StatusCode.ABORTED, "a newer stream took over")
        expect_tokens(await newer.step(epoch.plan({new.seq_id: 1})), {new.seq_id: 1})


async def same_holder_opens_again(subject: Subject) -> None:
    """When its own scheduler opens it again, the old epoch's streams and plans get FAILED_PRECONDITION."""
    old = await subject.open()
    async with old.stream() as stream:
        await stream.step(old.plan())
        new = await subject.open()
        expect_end(await stream.end(), grpc.StatusCode.FAILED_PRECONDITION, "the holder opened again")
    async with old.stream() as stream:
        expect_end(
            await stream.refusal(old.plan()), grpc.StatusCode.FAILED_PRECONDITION, "the plan's epoch was over"
        )
    async with new.stream() as stream:
        await stream.step(new.plan())


async def lower_term_is_refused(subject: Subject) -> None:
    """A lower term is refused, and the holder's own from another, naming the holder; it goes on."""
    epoch = await subject.open()
    epoch = await subject.driver.open(subject.scheduler_id, term=epoch.capacity.term + 1)
    async with epoch.stream() as stream:
        await stream.step(epoch.plan())
        refusal = await subject.driver.open_refused(subject.rival_id, term=epoch.capacity.term - 1)
        _expect_held(refusal, subject.scheduler_id, epoch, "Open with a lower term")
        refusal = await subject.driver.open_refused(subject.rival_id, term=epoch.capacity.term)
        _expect_held(refusal, subject.scheduler_id, epoch, "Open with the holder's own term")
        refusal = await subject.driver.open_refused(subject.scheduler_id, term=epoch.capacity.term - 1)
        _expect_held(refusal, subject.scheduler_id, epoch, "Open by the holder with a lower term")
        await stream.step(epoch.plan())


async def living_holder_is_not_displaced(subject: Subject) -> None:
    """Term 0 is refused while another scheduler's stream lives, and granted once that is gone."""
    epoch = await subject.open()
    async with epoch.stream() as stream:
        await stream.step(epoch.plan())
        refusal = await subject.driver.open_refused(subject.rival_id)
        _expect_held(refusal, subject.scheduler_id, epoch, "Open with term 0")
        await stream.done_writing()
        expect_end(await stream.end(), grpc.StatusCode.OK, "the holder closed its stream")
    rival = await open_once_free(subject, subject.rival_id)
    require(
        rival.capacity.term > epoch.capacity.term,
        f"term 0 was granted as {rival.capacity.term}; the holder's was {epoch.capacity.term}",
    )
    await open_once_free(subject, subject.scheduler_id)


async def higher_term_fences(subject: Subject) -> None:
    """A higher term takes over; the old holder's stream and plans get PERMISSION_DENIED naming the new."""
    old = await subject.open()
    async with old.stream() as stream:
        await stream.step(old.plan())
        new = await subject.driver.open(subject.rival_id, term=old.capacity.term + 5)
        require(
            new.capacity.term == old.capacity.term + 5,
            f"term {new.capacity.term} was granted, not the one asked",
        )
        _expect_held(await stream.end(), subject.rival_id, new, "the stream of the displaced holder")
    async with old.stream() as stream:
        _expect_held(
            await stream.refusal(old.plan()), subject.rival_id, new, "a plan of the displaced holder"
        )
    refusal = await subject.driver.open_refused(subject.scheduler_id, term=old.capacity.term)
    _expect_held(refusal, subject.rival_id, new, "Open with the displaced holder's term")
    async with new.stream() as stream:
        await stream.step(new.plan())
    await open_once_free(subject, subject.scheduler_id)


CHECKS: Final[tuple[Check, ...]] = (
    health_says_serving,
    capacity_is_told,
    plan_without_rows,
    generates_to_length,
    one_token,
    stop_id_ends,
    min_tokens_hold_the_end_back,
    chunked_prompt,
    ragged_rows,
    batch_changes_nothing,
    blocks_grow,
    resumed_sequence,
    computed_prefix,
    releases,
    window_two,
    ghosts,
    acknowledged_ghost_is_forgotten,
    row_error_is_one_rows,
    seq_id_is_used_once,
    blocks_exist,
    reserved_fields_are_refused,
    refusal_checks.acknowledgements_name_results,
    refusal_checks.columns_fit,
    refusal_checks.rows_fit,
    refusal_checks.unknown_sequences_are_refused,
    refusal_checks.draft_tokens_not_offered_are_refused,
    refusal_checks.entries_of_draft_tokens_fit,
    refusal_checks.draft_tokens_fit_their_row,
    refusal_checks.draft_tokens_are_acknowledged_first,
    refusal_checks.admissions_fit,
    refusal_checks.prompt_logprobs_begin_where_they_can,
    refusal_checks.capacity_is_kept,
    refusal_checks.too_long_a_sequence_is_not_computed,
    sampling_checks.temperature_is_heeded,
    sampling_checks.top_k_is_kept,
    sampling_checks.top_p_is_kept,
    sampling_checks.min_p_is_kept,
    sampling_checks.seeds_tell_draws_apart,
    sampling_checks.draws_follow_the_output,
    sampling_checks.end_tokens_end,
    sampling_checks.longest_sequence_ends,
    sampling_checks.options_not_offered_are_refused,
    logprobs_are_reported,
    sampling_checks.logprobs_are_of_the_raw_distribution,
    token_lists_are_kept,
    bias_is_added,
    penalties_count_the_output,
    sampling_checks.penalties_weigh,
    prompt_logprobs_come_once,
    draft_checks.right_draft_tokens_are_taken,
    draft_checks.wrong_draft_tokens_are_forgotten,
    draft_checks.an_end_among_draft_tokens_ends,
    draft_checks.draft_tokens_change_no_choice,
    duplicate_is_answered_once_computed,
    duplicate_that_differs,
    steps_without_a_gap,
    window_is_kept,
    positions_agree,
    half_close_gets_every_result,
    reattach_after_a_break,
    newest_stream_wins,
    same_holder_opens_again,
    refusal_checks.open_forgets_sequences,
    lower_term_is_refused,
    living_holder_is_not_displaced,
    higher_term_fences,
)


def _expect_held(ended: Ended, scheduler_id: str, holder: Epoch, what: str) -> None:
    require(
        ended.code is grpc.StatusCode.PERMISSION_DENIED,
        f"{what} ended with {ended}; it should be PERMISSION_DENIED",
    )
    named, held = (ended.held_by, ended.held_at), (scheduler_id, str(holder.capacity.term))
    require(
        named == held, f"{what} was refused naming {named} in the trailing metadata; the holder is {held}"
    )
