"""Kind 3: a preempted request is indistinguishable from one that was never preempted."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.v1 import router_pb2
from tests.integration.prompts import ids_of, prompt, sized
from tests.rig import cluster
from tests.rig.client import DOORS, Answer, client_of
from tests.rig.cluster import Cluster
from tests.rig.oracle import Oracle
from tests.rig.quiet import check_all_leave, check_quiet
from tests.rig.scripted_executor import Script, expected_output


@pytest.fixture(scope="module", params=["1", "2"], ids=["window 1", "window 2"])
def tight(request: pytest.FixtureRequest, tiny_model_folder: Path) -> Iterator[Cluster]:
    """The tiny model with 14 blocks: four requests of 96 tokens do not fit at once."""
    with cluster.running(
        tiny_model_folder,
        executor_flags=("--num-blocks", "14"),
        scheduler_flags=("--window", request.param, "--watermark", "0", "--admission", "optimistic"),
    ) as running:
        yield running


def four(**fields: Any) -> list[router_pb2.GenerateRequest]:
    """About 24 blocks wanted."""
    return [sized(length, 64, salt=i, **fields) for i, length in enumerate([32, 32, 32, 3])]


async def all_at_once(
    running: Cluster, door: str, messages: list[router_pb2.GenerateRequest]
) -> list[Answer]:
    async with client_of(running) as client:
        return await asyncio.gather(*(client.ask(door, message) for message in messages))


async def one_by_one(running: Cluster, messages: list[router_pb2.GenerateRequest]) -> list[Answer]:
    async with client_of(running) as client:
        return [await client.complete(message) for message in messages]


@DOORS
async def test_b09_output_is_whole_and_right_after_recompute(
    door: str, tight: Cluster, tiny_oracle: Oracle
) -> None:
    before = tight.load().num_preemptions
    messages = four()
    answers = await all_at_once(tight, door, messages)
    assert tight.load().num_preemptions > before
    for message, answer in zip(messages, answers, strict=True):
        assert len(answer.token_ids) == 64
        tiny_oracle.check(ids_of(message), answer.token_ids)
    check_quiet(tight, tiny_oracle)


async def test_b10_a_sampled_stream_is_one_generation(tight: Cluster, tiny_cluster: Cluster) -> None:
    messages = [
        sized(length, 64, salt=i, temperature=0.9, seed=100 + i) for i, length in enumerate([32, 32, 32, 3])
    ]
    alone = await one_by_one(tiny_cluster, messages)
    before = tight.load().num_preemptions
    streamed = await all_at_once(tight, "generate", messages)
    whole = await all_at_once(tight, "complete", messages)
    assert tight.load().num_preemptions >= before + 2
    for right, stream, once in zip(alone, streamed, whole, strict=True):
        assert stream.token_ids == once.token_ids == right.token_ids
        assert stream.text == once.text == right.text
    check_quiet(tight)


@DOORS
async def test_b09_b11_penalties_and_prompt_logprobs_are_the_same_after_a_recompute(
    door: str, tight: Cluster, tiny_cluster: Cluster
) -> None:
    messages = four(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2, logprobs=1, prompt_logprobs=1
    )
    alone = await one_by_one(tiny_cluster, messages)
    before = tight.load().num_preemptions
    together = await all_at_once(tight, door, messages)
    assert tight.load().num_preemptions > before
    for right, answer in zip(alone, together, strict=True):
        assert answer.token_ids == right.token_ids
        assert answer.choice.logprobs == right.choice.logprobs
        assert answer.prompt_logprobs == right.prompt_logprobs != []
    check_quiet(tight)


async def test_b11_there_is_one_logprob_for_each_token(tight: Cluster, tiny_cluster: Cluster) -> None:
    messages = four(logprobs=2)
    alone = await one_by_one(tiny_cluster, messages)
    before = tight.load().num_preemptions
    answers = await all_at_once(tight, "generate", messages)
    assert tight.load().num_preemptions > before
    for right, answer in zip(alone, answers, strict=True):
        entries = answer.choice.logprobs
        assert [entry.token_id for entry in entries] == answer.token_ids == right.token_ids
        for entry, expected in zip(entries, right.choice.logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert len(entry.top_token_ids) == 2
            assert list(entry.top_logprobs) == pytest.approx(list(expected.top_logprobs), abs=1e-4)
    check_quiet(tight)


@DOORS
async def test_b12_a_request_that_would_outgrow_the_cache_alone_is_refused(
    door: str, tiny_model_folder: Path, tiny_oracle: Oracle
) -> None:
    with cluster.running(tiny_model_folder, executor_flags=("--num-blocks", "6")) as running:
        async with client_of(running) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="96") as refusal:
                await client.ask(door, sized(80, 100), 5)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            whole_cache = await client.ask(door, sized(80, 16))
        tiny_oracle.check(prompt(80), whole_cache.token_ids)
        assert running.load().num_preemptions == 0
        check_quiet(running, tiny_oracle)
        check_all_leave(running)


@pytest.mark.parametrize("window", ["1", "2"])
async def test_b13_a_resumed_request_is_not_thrown_out_again_and_again(
    window: str, tiny_model_folder: Path
) -> None:
    script = Script(num_blocks=20, max_num_batched_tokens=32)
    flags = ("--window", window, "--watermark", "0", "--admission", "optimistic")
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        first, second = sized(64, 120), sized(200, 60, salt=1)
        async with client_of(running) as client:
            answers = client.growing(first)
            await anext(answers)
            other = await client.generate(second)
            answer = [answer async for answer in answers][-1]
        assert answer.token_ids == expected_output(ids_of(first), 120)
        assert other.token_ids == expected_output(ids_of(second), 60)
        steps = running.scripted().steps()
        for num_prompt_tokens, num_tokens in ((64, 120), (200, 60)):
            seq_ids = {
                entry[0] for step in steps for entry in step["admitted"] if entry[2] == num_prompt_tokens
            }
            assert len(seq_ids) <= 3, "preempted twice at most"
            computed = sum(count for step in steps for seq_id, count in step["rows"] if seq_id in seq_ids)
            assert computed <= 3 * (num_prompt_tokens + num_tokens)
        assert running.load().num_preemptions >= 1
        check_quiet(running)


@pytest.mark.parametrize(
    "block_size", [8, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 16, 64))]
)
async def test_b33_preemptions_give_back_whole_blocks_whatever_their_size(
    block_size: int, tiny_model_folder: Path
) -> None:
    """Prompts that are no multiple of a block, a hundred preemptions: at the end each block is free."""
    script = Script(num_blocks=max(256 // block_size, 8), block_size=block_size)
    flags = ("--watermark", "0", "--admission", "optimistic")
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            salts = iter(range(1_000_000))
            async with asyncio.timeout(120):
                while (await asyncio.to_thread(running.load)).num_preemptions < 100:
                    asked = [sized(21 + i, 43 + i, salt=next(salts)) for i in range(8)]
                    for message, answer in zip(
                        asked, await asyncio.gather(*map(client.generate, asked)), strict=True
                    ):
                        wanted = expected_output(ids_of(message), message.sampling.max_tokens)
                        assert answer.token_ids == wanted
        check_quiet(running)
        check_all_leave(running)
