"""The second real model through all three processes: no chat template, a vocabulary of 262,144, windows."""

import pytest

from tests.rig import cluster
from tests.rig.client import client_of, request
from tests.rig.real_gemma import REAL_GEMMA, needs_real_gemma

pytestmark = [pytest.mark.model, needs_real_gemma]


async def test_it_answers_a_question() -> None:
    with cluster.running(REAL_GEMMA, executor_flags=["--dtype", "bfloat16"]) as running:
        async with client_of(running) as client:
            question = "Question: What is the capital of France?\nAnswer:"
            answer = await client.generate(request(question, max_tokens=2))
            assert answer.text == " Paris\n"
