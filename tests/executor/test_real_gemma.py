"""The second real model: Gemma 3 270M out of a quantised GGUF file, against transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from executor.runner import ModelRunner
from tests.executor.numerics import load, one_shot_logits
from tests.rig.real_gemma import REAL_GEMMA, needs_real_gemma

pytestmark = [pytest.mark.model, needs_real_gemma, pytest.mark.timeout(600)]  # transformers reads GGUF slowly

# "Question: What is the capital of France?\nAnswer:", as the router's test knows the ids.
QUESTION = [2, 14977, 236787, 2900, 563, 506, 5279, 529, 7001, 236881, 107, 7925, 236787]
PARIS, NEWLINE = 9079, 107


@pytest.fixture(scope="module")
def gemma() -> ModelRunner:
    return load(REAL_GEMMA)


def test_it_answers_a_question(gemma: ModelRunner) -> None:
    token_ids = list(QUESTION)
    for _ in range(2):
        token_ids.append(int(one_shot_logits(gemma, token_ids)[-1].argmax()))
    assert token_ids[len(QUESTION) :] == [PARIS, NEWLINE]


def test_its_logits_are_those_of_transformers_beyond_the_window(gemma: ModelRunner) -> None:
    logging.disable_progress_bar()
    [path] = REAL_GEMMA.glob("*.gguf")
    token_ids = QUESTION * 50  # 650 tokens; the window is 512
    reference = AutoModelForCausalLM.from_pretrained(REAL_GEMMA, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids]), logits_to_keep=64).logits[0]
    found = one_shot_logits(gemma, token_ids)[-64:]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
