"""The law of draft tokens: right, wrong or mixed, they change how many tokens a step brings and no answer.

With a scripted model, whose context is read back from the slots that the rows have written, and with a real
one, whose floats are compared bit by bit.
"""

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.constraints import Choice, JsonSchema, Regex
from executor.device import Runner
from executor.plan import FinishedSequence, NewSequence, SamplingParams
from executor.runner import ModelRunner
from executor.stopping import FinishReason
from tests.executor import drafting
from tests.executor.drafting import Decide, Told
from tests.executor.numerics import load
from tests.rig.scripted_executor import RequestScript, Script, ScriptedRunner

torch.set_num_threads(1)

MOST_GUESSES = 6


def guessing(rng: Random, answers: list[Told], *, vocab_size: int, max_seq_len: int = 512) -> Decide:
    """Rows as they come: chunks of a prompt, and guesses of which each is right or not."""
    right = {each.new.seq_id: each.output for each in answers}
    share = rng.choice((0.0, 0.5, 0.9, 1.0))  # of right ones

    def decide(told: Told) -> tuple[int, list[int]]:
        if rng.random() < 0.2:
            return 0, []
        if told.num_left > 1 and rng.random() < 0.5:
            return rng.randrange(1, told.num_left), []
        length = min(told.new.num_prompt_tokens + told.new.params.max_tokens, max_seq_len)
        most = min(MOST_GUESSES, length - len(told.token_ids) - 1)
        coming = right[told.new.seq_id][len(told.output) :] + [0] * most  # some behind the end
        return told.num_left, [
            token_id if rng.random() < share else rng.randrange(vocab_size)
            for token_id in coming[: rng.randint(0, most)]
        ]

    return decide


# --- a scripted model --------------------------------------------------------------------------------

SCRIPT = Script(
    num_blocks=64, block_size=4, max_seq_len=40, vocab_size=20, eos_token_ids=(3,), draws=True,
    features=("logprobs", "prompt_logprobs", "penalties", "logit_bias", "token_lists", "draft_tokens"),
)  # fmt: skip

SAMPLINGS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "temperature": st.sampled_from([0.0, 0.7, 2.0])},
    optional={
        "seed": st.integers(0, 3),
        "min_tokens": st.integers(1, 8),
        "stop_token_ids": st.frozensets(st.integers(0, 19), max_size=4),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 1.0]),
        "logit_bias": st.just(((4, 3.0), (7, -3.0))),
        "allowed_token_ids": st.just(frozenset(range(2, 12))),
        "banned_token_ids": st.just(frozenset({5, 6})),
        "top_k": st.integers(1, 5),
        "top_p": st.just(0.8),
    },
).map(lambda each: each | {"min_tokens": min(each.get("min_tokens", 0), each["max_tokens"])})


@settings(max_examples=150, deadline=None)
@given(
    st.randoms(use_true_random=True),
    st.lists(st.tuples(SAMPLINGS, st.integers(1, 9)), min_size=1, max_size=4),
)
def test_guesses_change_no_answer_of_a_scripted_model(
    rng: Random, asked: list[tuple[dict[str, Any], int]]
) -> None:
    admitted = [
        drafting.new(seq_id, [seq_id] * length, SamplingParams(**sampling), range(6 * seq_id, 6 * seq_id + 6))
        for seq_id, (sampling, length) in enumerate(asked, start=1)
    ]
    plain = drafting.run(ScriptedRunner(SCRIPT), admitted, max_seq_len=20)
    decide = guessing(rng, plain, vocab_size=SCRIPT.vocab_size, max_seq_len=20)
    guessed = drafting.run(ScriptedRunner(SCRIPT), admitted, decide, max_seq_len=20)
    assert [told.answer for told in guessed] == [told.answer for told in plain]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(0, 6))
def test_guesses_change_no_error(rng: Random, fails_at: int) -> None:
    request = RequestScript(row_errors={fails_at: "the logits of this row are no numbers"})

    def runner() -> ScriptedRunner:
        runner = ScriptedRunner(dataclasses.replace(SCRIPT, draws=False, requests=(request,)))
        runner.admit(admitted[0])
        return runner

    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
    admitted = [drafting.new(1, [1, 2], params, range(6)), drafting.new(2, [2, 3], params, range(6, 12))]
    plain = drafting.run(runner(), admitted)
    assert [len(told.output) for told in plain] == [fails_at, 8]
    guessed = drafting.run(runner(), admitted, guessing(rng, plain, vocab_size=SCRIPT.vocab_size))
    assert [told.answer for told in guessed] == [told.answer for told in plain]


# --- a real model ------------------------------------------------------------------------------------

PROMPTS = [list(b"The chairs keep moving."), list(b"A"), list(b"nobody waits, " * 4)]
SOME, MOST = frozenset(range(60, 90)), frozenset(range(10, 250))  # of 256 bytes that the tiny model says
REQUESTS = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "sampled": {"temperature": 0.9, "seed": 42, "logprobs": 1},
    "filtered": {"temperature": 1.3, "seed": -1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0},
    "penalized and sampled": {"temperature": 0.8, "seed": 7, "presence_penalty": 1.5},
    "biased": {"temperature": 0.0, "logit_bias": ((65, 8.0),), "banned_token_ids": frozenset({66})},
    "ends at stop ids": {"temperature": 0.0, "stop_token_ids": SOME, "logprobs": 2},
    "ends after min_tokens": {"temperature": 0.7, "seed": 3, "stop_token_ids": MOST, "min_tokens": 10},
    "of one token": {"temperature": 0.0, "max_tokens": 1},
    "tells of its prompt": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 2},
    "json": {"temperature": 0.0, "constraint": JsonSchema('{"type": "array", "minItems": 9}')},
    "of a form and penalized": {
        "temperature": 1.0, "seed": 5, "constraint": Regex("[a-z]{2,9}(, [a-z]{2,9}){1,4}"),
        "frequency_penalty": 0.7, "logprobs": 1,
    },
    "a choice": {"temperature": 1.0, "seed": 1, "constraint": Choice(("slow", "slower", "slowest"))},
}  # fmt: skip


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> ModelRunner:
    runner = load(tiny_folder)
    assert {"draft_tokens", "constraints"} <= set(runner.features)
    return runner


def asked_of(names: list[str]) -> list[NewSequence]:
    """One sequence for each, all with the prompt that belongs to their place."""
    return [
        drafting.new(
            seq_id,
            PROMPTS[seq_id % len(PROMPTS)],
            SamplingParams(**{"max_tokens": 24} | REQUESTS[name]),
            range(8 * seq_id, 8 * seq_id + 8),
        )
        for seq_id, name in enumerate(names)
        if seq_id > 0
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=True), st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=5))
def test_guesses_change_no_bit_of_a_real_models_answer(
    runner: ModelRunner, rng: Random, names: list[str]
) -> None:
    admitted = asked_of(["", *names])
    plain = drafting.run(runner, admitted)
    guessed = drafting.run(runner, admitted, guessing(rng, plain, vocab_size=runner.vocab_size))
    assert [told.answer for told in guessed] == [told.answer for told in plain]


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_guessed_rightly_saves_steps(name: str, runner: ModelRunner) -> None:
    """Each answer guessed to its end: so each kind of choice has been made behind guesses."""
    (plain,) = drafting.run(runner, asked_of(["", name]))
    assert isinstance(plain.end, FinishedSequence)

    def decide(told: Told) -> tuple[int, list[int]]:
        coming = [*plain.output, 0][len(told.output) :]
        most = told.new.params.max_tokens - len(told.output) - 1
        return told.num_left, coming[: min(most, MOST_GUESSES)]

    (guessed,) = drafting.run(runner, asked_of(["", name]), decide)
    assert guessed.answer == plain.answer
    assert guessed.num_steps == -(-len(plain.output) // (MOST_GUESSES + 1))


def test_the_requests_end_in_all_ways(runner: ModelRunner) -> None:
    """Else the law would hold for want of cases."""
    stopped = set()
    for name in REQUESTS:
        (told,) = drafting.run(runner, asked_of(["", name]))
        assert isinstance(told.end, FinishedSequence)
        assert name in ("of one token", "json", "a choice") or len(told.output) > MOST_GUESSES + 1
        stopped |= {name} if told.end.reason is FinishReason.STOP else set()
    assert stopped == {"ends at stop ids", "ends after min_tokens", "a choice"}


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "int8")])
def test_guesses_change_no_bit_in_other_number_types(
    dtype: str, quantization: str, tiny_folder: Path
) -> None:
    runner: Runner = load(tiny_folder, dtype=dtype, quantization=quantization)
    admitted = asked_of(["", "greedy", "sampled", "penalized", "tells of its prompt"])
    plain = drafting.run(runner, admitted)
    right = {told.new.seq_id: told.output for told in plain}

    def decide(told: Told) -> tuple[int, list[int]]:
        """Every fifth token is guessed wrongly."""
        begin = len(told.output)
        most = told.new.params.max_tokens - begin - 1
        coming = right[told.new.seq_id][begin:][: min(most, MOST_GUESSES)]
        return told.num_left, [
            (token_id + (place % 5 == 0)) % 256 for place, token_id in enumerate(coming, start=begin)
        ]

    guessed = drafting.run(runner, admitted, decide)
    assert [told.answer for told in guessed] == [told.answer for told in plain]
    assert sum(told.num_steps for told in guessed) < sum(told.num_steps for told in plain) / 2
