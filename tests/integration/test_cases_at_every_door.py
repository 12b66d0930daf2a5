"""Cases of sampling, seeds and log-probabilities: the same at gRPC and HTTP, whole and streamed.

A real model answers.
Each row is one question asked in several ways that must be answered alike; every way is asked at every door.
Not at every door: B53 and B56 mix neighbours within one batch, B59 and B63 look at batches (tests/executor);
B68 and B70 say what a scheduler sends (tests/router/http); B71 is in `test_sampling`, since each door words
the prompt's log-probabilities differently.
"""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.rig import cluster
from tests.rig.client import client_of
from tests.rig.cluster import Cluster
from tests.rig.doors import Answered, FourDoors
from tests.rig.quiet import check_quiet
from tests.rig.tiny_model import EOS_ID, VOCAB_SIZE

PROMPT = [7 * i % 256 for i in range(17)]
DRAWN: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 1.3,
    "seed": 7,
    "max_tokens": 12,
    "ignore_eos": True,
}
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Grüße 😀"}],
    "temperature": 0.0,
    "max_tokens": 12,
}
ALIKE: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("b53", DRAWN, [{}, *({"top_k": k} for k in (VOCAB_SIZE, VOCAB_SIZE + 1, 10**7, 2**31 - 1))]),
    ("b54_top_k", DRAWN, [{}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}]),
    (
        "b54_greedy",
        GREEDY,
        [{}, {"seed": 3, "top_p": 0.5}, {"top_k": 1}, {"top_k": 1, "temperature": 1.3, "seed": 9}],
    ),
    (
        "b54_penalties",
        DRAWN,
        [{}, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}],
    ),
    ("b57", GREEDY | {"max_tokens": 1}, [{}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]),
    ("b60", DRAWN, [{}, {}, {"n": 1}]),
    ("b61_lowest", DRAWN | {"seed": -(2**63)}, [{}, {}]),
    ("b61_minus_one", DRAWN | {"seed": -1}, [{}, {}]),
    ("b61_highest", DRAWN | {"seed": 2**63 - 1}, [{}, {}]),
    ("b63", CHAT, [{}, {"seed": 1}]),
]


@pytest.fixture(scope="module")
def served(tiny_model_folder: Path) -> Any:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler()
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        running.wait()
        yield running
        check_quiet(running)


@pytest.fixture
async def four(served: Cluster) -> AsyncIterator[FourDoors]:
    transport = httpx2.AsyncHTTPTransport(uds=f"{served.folder}/http.sock")
    async with (
        client_of(served) as grpc_client,
        httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
    ):
        yield FourDoors(grpc_client, http)


async def answer(four: FourDoors, **fields: Any) -> Answered:
    answered = await four.ask_all(**fields)
    assert isinstance(answered, Answered), answered
    return answered


@pytest.mark.parametrize(("asked", "ways"), [row[1:] for row in ALIKE], ids=[row[0] for row in ALIKE])
async def test_b53_to_b63_ways_that_say_the_same_are_answered_alike(
    four: FourDoors, asked: dict[str, Any], ways: list[dict[str, Any]]
) -> None:
    first, *others = [await answer(four, **(asked | way)) for way in ways]
    assert len(first.only.token_ids) == asked["max_tokens"]
    for way, other in zip(ways[1:], others, strict=True):
        assert other == first, way


async def test_b54_off_draws_and_top_k_of_one_does_not(four: FourDoors) -> None:
    one = DRAWN | {"max_tokens": 1}
    drawn = {tuple((await answer(four, **(one | {"seed": s, "top_k": 0}))).only.token_ids) for s in range(10)}
    assert len(drawn) > 1


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
async def test_b58_so_many_others_and_then_the_end_token(four: FourDoors, min_tokens: int) -> None:
    bias = {str(EOS_ID): 100.0}
    said = await answer(
        four, prompt=PROMPT, logit_bias=bias, min_tokens=min_tokens, max_tokens=32, temperature=0.0
    )
    assert said.only.token_ids.index(EOS_ID) == min_tokens == len(said.only.token_ids) - 1
    assert (said.only.reason, said.only.matched) == ("stop", None)


async def test_b62_choices_differ_when_drawn_and_do_not_depend_on_n(four: FourDoors) -> None:
    of_four = await answer(four, **(DRAWN | {"seed": 1, "n": 4}))
    of_two = await answer(four, **(DRAWN | {"seed": 1, "n": 2}))
    assert of_two.choices == of_four.choices[:2]
    assert len({tuple(choice.token_ids) for choice in of_four.choices}) == 4
    greedy = await answer(four, **(GREEDY | {"n": 4}))
    assert all(choice == greedy.choices[0] for choice in greedy.choices)


async def test_b66_to_b69_log_probabilities_are_finite_sorted_and_those_of_the_model(four: FourDoors) -> None:
    alike = []
    for way in (
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 0.01},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "allowed_token_ids": [40, 41]},
    ):
        said = (await answer(four, **(DRAWN | way | {"logprobs": 3}))).only
        assert len(said.logprobs) == len(said.token_ids) == 12
        for logprob, top in said.logprobs:
            assert len(top) == 3
            assert all(map(math.isfinite, (logprob, *top)))
            assert list(top) == sorted(top, reverse=True)
            assert logprob <= top[0]
        alike.append(said.logprobs[0][1])
    assert alike == [alike[0]] * 4, "of the first token, whatever is drawn from it"
    none = (await answer(four, **(GREEDY | {"logprobs": 0}))).only
    assert all(top == () for _, top in none.logprobs)
    assert len(none.logprobs) == 12


async def test_b73_a_stop_token_id_of_the_client_is_told(four: FourDoors) -> None:
    plain = (await answer(four, **GREEDY)).only.token_ids
    said = (await answer(four, **(GREEDY | {"stop_token_ids": [plain[5]]}))).only
    assert said.token_ids == plain[: plain.index(plain[5]) + 1]
    assert (said.reason, said.matched) == ("stop", plain[5])
