"""The whole server against transformers: the same ids, whatever runs beside, however it is cut or preempted.

Forty real prompts of many scripts, 48 tokens each, float32, greedy. The tiny model takes all of them every
time; the real model a representative slice, and all of them in the long form (`make soak`).
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.v1 import router_pb2
from tests.integration.prompts import prompt as ids_prompt
from tests.rig import cluster
from tests.rig.client import Client, client_of, request
from tests.rig.cluster import Cluster
from tests.rig.oracle import Oracle
from tests.rig.quiet import check_quiet
from tests.router.prompts import load
from tests.router.real_model import REAL_MODEL, needs_real_model

NUM_PROMPTS = 40
NUM_TOKENS = 48
BLOCK_SIZE = 16
ARRIVAL_SECONDS = 0.5
WINDOWS = pytest.mark.parametrize("window", [1, 2])
BUDGETS = pytest.mark.parametrize("budget", [1, 7, 64, 2048])


def real_prompts(count: int) -> list[str]:
    """Spread over all files of the collection, so over languages and scripts."""
    every = list(load().values())
    return [every[index * len(every) // count] for index in range(count)]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the ids that the router makes of it."""

    text: str
    token_ids: list[int]


async def questions(client: Client, texts: Sequence[str], max_prompt_tokens: int = 10_000) -> list[Question]:
    """With their ids; those that are too long are left out."""
    tokenized = [
        Question(text, list((await client.stub.Tokenize(router_pb2.TokenizeRequest(text=text))).token_ids))
        for text in texts
    ]
    return [question for question in tokenized if len(question.token_ids) <= max_prompt_tokens]


async def ask_one_by_one(client: Client, asked: Sequence[Question], num_tokens: int, oracle: Oracle) -> None:
    for number, question in enumerate(asked):
        door = ["generate", "complete"][number % 2]
        answer = await client.ask(door, request(question.text, max_tokens=num_tokens), 120)
        assert len(answer.token_ids) == num_tokens
        oracle.check(question.token_ids, answer.token_ids)


async def ask_at_once(
    client: Client, asked: Sequence[Question], num_tokens: int, oracle: Oracle, seed: int = 0
) -> None:
    """All of them, arriving at random."""
    rng = random.Random(seed)

    async def ask(question: Question, after_seconds: float) -> list[int]:
        await asyncio.sleep(after_seconds)
        answer = await client.ask(
            rng.choice(["generate", "complete"]), request(question.text, max_tokens=num_tokens), 600
        )
        return answer.token_ids

    answers = await asyncio.gather(*(ask(question, rng.uniform(0, ARRIVAL_SECONDS)) for question in asked))
    for question, token_ids in zip(asked, answers, strict=True):
        assert len(token_ids) == num_tokens
        oracle.check(question.token_ids, token_ids)


def few_blocks(asked: Sequence[Question], num_tokens: int) -> int:
    """So few that the longest has room for itself and not much more: the others are preempted."""
    longest = max(len(question.token_ids) for question in asked) + num_tokens
    shortest = min(len(question.token_ids) for question in asked) + num_tokens
    return -(-longest // BLOCK_SIZE) + -(-shortest // BLOCK_SIZE)


def restart_scheduler(running: Cluster, *flags: str) -> None:
    """Another scheduler in front of the same executor and model."""
    if "scheduler" in running.names:
        running.stop("scheduler")
    running.start_scheduler("--scheduler-id", "the-oracle-test", *flags)
    running.wait()


# --- the tiny model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> Iterator[Cluster]:
    """An executor with room for every setting of the scheduler's."""
    flags = ("--num-blocks", "8192", "--max-num-batched-tokens", "2048")
    with cluster.running(tiny_model_folder, executor_flags=flags) as running:
        yield running


@WINDOWS
async def test_forty_real_prompts_at_once_equal_the_oracle(
    window: int, tiny: Cluster, tiny_oracle: Oracle
) -> None:
    restart_scheduler(tiny, "--window", str(window))
    async with client_of(tiny) as client:
        asked = await questions(client, real_prompts(NUM_PROMPTS))
        await ask_at_once(client, asked, NUM_TOKENS, tiny_oracle, seed=window)
    check_quiet(tiny, tiny_oracle)


async def test_forty_real_prompts_one_by_one_equal_the_oracle(tiny: Cluster, tiny_oracle: Oracle) -> None:
    async with client_of(tiny) as client:
        asked = await questions(client, real_prompts(NUM_PROMPTS))
        await ask_one_by_one(client, asked, NUM_TOKENS, tiny_oracle)
    check_quiet(tiny, tiny_oracle)


@WINDOWS
@BUDGETS
async def test_every_token_budget_equals_the_oracle(
    budget: int, window: int, tiny: Cluster, tiny_oracle: Oracle
) -> None:
    restart_scheduler(tiny, "--window", str(window), "--max-num-batched-tokens", str(budget))
    async with client_of(tiny) as client:
        # With a budget of 1 every token of a prompt is a step: short prompts only.
        asked = await questions(client, real_prompts(NUM_PROMPTS), 64 if budget == 1 else 10_000)
        await ask_at_once(client, asked, 24, tiny_oracle, seed=budget)
    check_quiet(tiny, tiny_oracle)


@WINDOWS
async def test_preempted_requests_equal_the_oracle(window: int, tiny: Cluster, tiny_oracle: Oracle) -> None:
    async with client_of(tiny) as client:
        asked = await questions(client, real_prompts(NUM_PROMPTS), 600)
        num_blocks = str(few_blocks(asked, NUM_TOKENS))
        restart_scheduler(
            tiny,
            "--window",
            str(window),
            "--num-blocks",
            num_blocks,
            "--watermark",
            "0",
            "--admission",
            "optimistic",
        )
        await ask_at_once(client, asked, NUM_TOKENS, tiny_oracle, seed=window)
    assert tiny.load().num_preemptions >= 1
    check_quiet(tiny, tiny_oracle)


async def test_a_seeded_draw_does_not_depend_on_what_runs_beside(tiny: Cluster) -> None:
    restart_scheduler(tiny)
    messages = [
        request(ids_prompt(5 + i, salt=i), max_tokens=32, temperature=1.0, top_p=0.95, seed=i)
        for i in range(12)
    ]
    async with client_of(tiny) as client:
        alone = [(await client.complete(message)).token_ids for message in messages]
        together = await asyncio.gather(*map(client.generate, messages))
    assert [answer.token_ids for answer in together] == alone
    check_quiet(tiny)


# --- the real model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    """SmolLM2 in float32, with no scheduler and no router yet to decide how it is used."""
    with cluster.assembling(REAL_MODEL) as running:
        running.start_executor(
            "--num-threads", "2", "--num-blocks", "1024", "--max-num-batched-tokens", "2048"
        )
        running.start_router()
        yield running


@pytest.fixture(scope="module")
def real_oracle(pytestconfig: pytest.Config) -> Oracle:
    """Remembers its answers from one run to the next."""
    assert pytestconfig.cache is not None
    return Oracle(REAL_MODEL, pytestconfig.cache.mkdir("oracle"))


async def check_real_model(
    real: Cluster, oracle: Oracle, texts: Sequence[str], num_tokens: int, *scheduler_flags: str
) -> None:
    restart_scheduler(real, *scheduler_flags)
    async with client_of(real) as client:
        asked = await questions(client, texts)
        await ask_at_once(client, asked, num_tokens, oracle)
    check_quiet(real, oracle)


@needs_real_model
@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_the_real_model_one_by_one_equals_the_oracle(real: Cluster, real_oracle: Oracle) -> None:
    restart_scheduler(real)
    async with client_of(real) as client:
        asked = await questions(client, real_prompts(10), 150)
        await ask_one_by_one(client, asked[:4], 24, real_oracle)
    check_quiet(real, real_oracle)


@needs_real_model
@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("window", "budget", "count"),
    [
        pytest.param(1, 2048, 10, marks=pytest.mark.soak),
        (2, 64, 6),
        pytest.param(2, 64, 10, marks=pytest.mark.soak),
        pytest.param(2, 7, 3, marks=pytest.mark.soak),
    ],
)
async def test_the_real_model_at_once_equals_the_oracle(
    window: int, budget: int, count: int, real: Cluster, real_oracle: Oracle
) -> None:
    texts = [text for text in real_prompts(10) if len(text) < 300][:count]
    flags = ("--window", str(window), "--max-num-batched-tokens", str(budget))
    await check_real_model(real, real_oracle, texts, 24, *flags)


@needs_real_model
@pytest.mark.model
@pytest.mark.timeout(300)
async def test_the_real_model_preempted_equals_the_oracle(real: Cluster, real_oracle: Oracle) -> None:
    texts = [text for text in real_prompts(10) if len(text) < 300]
    await check_real_model(
        real, real_oracle, texts, 24, "--num-blocks", "24", "--watermark", "0", "--admission", "optimistic"
    )
    assert real.load().num_preemptions >= 1


@needs_real_model
@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(3600)
@WINDOWS
@BUDGETS
async def test_the_real_model_in_full_at_every_budget(
    budget: int, window: int, real: Cluster, real_oracle: Oracle
) -> None:
    flags = ("--window", str(window), "--max-num-batched-tokens", str(budget))
    await check_real_model(real, real_oracle, real_prompts(NUM_PROMPTS), NUM_TOKENS, *flags)


@needs_real_model
@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(3600)
@WINDOWS
async def test_the_real_model_in_full_preempted(window: int, real: Cluster, real_oracle: Oracle) -> None:
    flags = ("--window", str(window), "--num-blocks", "64", "--watermark", "0", "--admission", "optimistic")
    await check_real_model(real, real_oracle, real_prompts(NUM_PROMPTS), NUM_TOKENS, *flags)
    assert real.load().num_preemptions >= 1


@needs_real_model
@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_the_real_model_in_full_one_by_one(real: Cluster, real_oracle: Oracle) -> None:
    restart_scheduler(real)
    async with client_of(real) as client:
        asked = await questions(client, real_prompts(NUM_PROMPTS))
        await ask_one_by_one(client, asked, NUM_TOKENS, real_oracle)
    check_quiet(real, real_oracle)
