"""Kind 7: what one token below, at and above each limit gets: an answer or a refusal, alike at every door."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.v1 import router_pb2
from tests.integration.prompts import ids_of, prompt, sized
from tests.rig import cluster
from tests.rig.client import DOORS, LENGTH, Client, client_of, request
from tests.rig.cluster import Cluster
from tests.rig.oracle import Oracle
from tests.rig.quiet import check_all_leave, check_quiet
from tests.rig.scripted_executor import Script, expected_output

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def short(tiny_model_folder: Path) -> Iterator[Cluster]:
    """A scripted executor that takes 128 tokens, prompt and output together."""
    with cluster.running(tiny_model_folder, script=Script(max_seq_len=128)) as running:
        yield running


async def refusal(client: Client, door: str, message: router_pb2.GenerateRequest) -> str:
    """The sentence with which a wrong request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.ask(door, message, 5)
    assert error.value.code() is INVALID
    return error.value.details() or ""


@DOORS
async def test_b34_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    door: str, tiny_model_folder: Path
) -> None:
    with cluster.running(tiny_model_folder, script=Script(max_seq_len=256)) as running:
        async with client_of(running) as client:
            valid = [sized(100, 10, salt=i) for i in range(2)]
            asking = [asyncio.create_task(client.ask(door, message)) for message in valid]
            sentence = await refusal(client, door, sized(300, 4))
            assert "300" in sentence
            assert "256" in sentence
            for message, answer in zip(valid, await asyncio.gather(*asking), strict=True):
                assert answer.token_ids == expected_output(ids_of(message), 10)
            alone = await asyncio.gather(*(refusal(client, door, sized(300, 4, salt=i)) for i in range(20)))
            assert all("300" in sentence and "256" in sentence for sentence in alone)
        check_quiet(running)
        check_all_leave(running)


@DOORS
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output_tokens"),
    [(127, 1, 1), (100, 27, 27), (100, 28, 28), (100, None, 28)],
)
async def test_b35_what_fits_exactly_is_answered(
    num_prompt_tokens: int, max_tokens: int | None, num_output_tokens: int, door: str, short: Cluster
) -> None:
    async with client_of(short) as client:
        answer = await client.ask(door, sized(num_prompt_tokens, max_tokens))
    assert answer.token_ids == expected_output(prompt(num_prompt_tokens), num_output_tokens)
    assert answer.choice.reason == LENGTH
    check_quiet(short)


@DOORS
@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(128, 1), (129, 1), (100, 29)])
async def test_b35_one_token_too_many_is_refused(
    num_prompt_tokens: int, max_tokens: int, door: str, short: Cluster
) -> None:
    async with client_of(short) as client:
        sentence = await refusal(client, door, sized(num_prompt_tokens, max_tokens))
    assert str(num_prompt_tokens) in sentence
    assert "128" in sentence
    check_quiet(short)


@DOORS
@pytest.mark.parametrize("n", [1, 2])
async def test_b36_max_tokens_below_one_is_refused_each_time_alike(n: int, door: str, short: Cluster) -> None:
    async with client_of(short) as client:
        sentences = [await refusal(client, door, sized(5, 0, n=n)) for _ in range(3)]
        assert len(set(sentences)) == 1
        assert "sampling.max_tokens is 0; it must be at least 1" in sentences[0]
        assert "sampling.max_tokens is -1" in await refusal(client, door, sized(5, -1, n=n))
        answer = await client.ask(door, sized(5, 3, n=n))
    assert [choice.token_ids for choice in answer.choices] == [expected_output(prompt(5), 3)] * n
    check_quiet(short)


@DOORS
async def test_b37_an_empty_prompt_is_refused_and_others_go_on(door: str, short: Cluster) -> None:
    no_messages = router_pb2.GenerateRequest()
    no_messages.chat.SetInParent()
    no_ids = router_pb2.GenerateRequest()
    no_ids.token_ids.SetInParent()
    no_text = router_pb2.GenerateRequest()
    no_text.text = ""
    async with client_of(short) as client:
        other = asyncio.create_task(client.ask(door, sized(20, 60)))
        assert "text" in await refusal(client, door, no_text)
        assert "token_ids" in await refusal(client, door, no_ids)
        assert "prompt" in await refusal(client, door, router_pb2.GenerateRequest())
        assert "chat.messages" in await refusal(client, door, no_messages)
        assert (await other).token_ids == expected_output(prompt(20), 60)
    check_quiet(short)


@pytest.mark.parametrize(("max_seq_len", "budget"), [(128, 64), (128, 512), (128, 1)])
async def test_b38_a_budget_above_or_below_the_longest_prompt_works(
    max_seq_len: int, budget: int, tiny_model_folder: Path
) -> None:
    script = Script(max_seq_len=max_seq_len, max_num_batched_tokens=512)
    flags = ("--max-num-batched-tokens", str(budget))
    with cluster.running(tiny_model_folder, script=script, scheduler_flags=flags) as running:
        async with client_of(running) as client:
            answer = await client.generate(sized(120, 8))
        assert answer.token_ids == expected_output(prompt(120), 8)
        assert max(step["num_tokens"] for step in running.scripted().steps()) == min(budget, 120)
        check_quiet(running)


async def test_b38_more_seats_than_tokens_works(tiny_model_folder: Path) -> None:
    flags = ("--max-num-batched-tokens", "2", "--max-num-seqs", "8")
    with cluster.running(tiny_model_folder, script=Script(), scheduler_flags=flags) as running:
        messages = [sized(6, 6, salt=i) for i in range(8)]
        async with client_of(running) as client:
            answers = await asyncio.gather(*map(client.generate, messages))
        for message, answer in zip(messages, answers, strict=True):
            assert answer.token_ids == expected_output(ids_of(message), 6)
        check_quiet(running)


def test_b38_a_budget_of_nothing_is_refused_at_start(tiny_model_folder: Path) -> None:
    with cluster.assembling(tiny_model_folder) as empty:
        for start in (empty.start_executor, empty.start_scheduler):
            with pytest.raises(RuntimeError, match="--max-num-batched-tokens is 0: it must be at least 1"):
                start("--max-num-batched-tokens", "0")


@pytest.mark.parametrize(("budget", "num_requests", "num_prompt_tokens"), [(128, 10, 60), (100, 10, 33)])
async def test_b39_no_step_has_more_tokens_than_the_budget(
    budget: int, num_requests: int, num_prompt_tokens: int, tiny_model_folder: Path, tiny_oracle: Oracle
) -> None:
    flags = ("--max-num-batched-tokens", str(budget))
    with cluster.running(tiny_model_folder, script=Script(), scheduler_flags=flags) as running:
        messages = [sized(num_prompt_tokens, 5, salt=i) for i in range(num_requests)]
        async with client_of(running) as client:
            answers = await asyncio.gather(*map(client.generate, messages))
        for message, answer in zip(messages, answers, strict=True):
            assert answer.token_ids == expected_output(ids_of(message), 5)
        assert max(step["num_tokens"] for step in running.scripted().steps()) <= budget
        check_quiet(running)


@DOORS
async def test_b40_a_model_that_never_ends_stops_at_its_length(door: str, tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, script=Script(max_seq_len=200)) as running:
        async with client_of(running) as client:
            answer = await client.ask(door, request(prompt(20), ignore_eos=False))
        assert answer.choice.reason == LENGTH
        assert answer.token_ids == expected_output(prompt(20), 180)
        check_quiet(running)
