import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from chairlift import Answer, ChairliftError, Choice, FinishReason, TokenLogprobs, Usage


def refuse() -> None:
    raise ChairliftError("RESOURCE_EXHAUSTED", "full", field="sampling.n", retry_after_seconds=0.5)


@pytest.mark.parametrize("made_again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_an_error_and_an_answer_are_the_same_after_a_copy(made_again: Any) -> None:
    error = made_again(ChairliftError("RESOURCE_EXHAUSTED", "full", field="n", retry_after_seconds=0.5))
    assert (error.code, error.message, error.field) == ("RESOURCE_EXHAUSTED", "full", "n")
    assert str(error) == "full [RESOURCE_EXHAUSTED]; try again in 0.5 s"
    entry = TokenLogprobs(5, -0.5, 1, ((5, -0.5),))
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1)
    choice = Choice(0, "x", (5,), (entry,), FinishReason.STOP, None, usage, 0.1, 0.2)
    answer = Answer("r", 5, (choice,))
    assert made_again(answer) == answer


def test_an_error_comes_out_of_a_pool_of_processes_and_the_pool_lives_on() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(2):
            with pytest.raises(ChairliftError, match=r"full \[RESOURCE_EXHAUSTED\]") as raised:
                pool.submit(refuse).result()
            assert (raised.value.field, raised.value.retry_after_seconds) == ("sampling.n", 0.5)
