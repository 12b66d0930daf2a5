import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.chairlift.able_toy import Wrong, make_able
from tests.chairlift.toys import Spoil, computing_all, draws_by, failing, method, with_options
from tests.rig import toy_executor

_EACH = itertools.count()


def _draws_the_likelier_half(drawn: Any) -> Any:
    def broken(self: Any, ids: list[int], weights: list[float], index: int) -> Any:
        reached = list(itertools.accumulate(weights))
        half = [w for w, so_far in zip(weights, reached, strict=True) if so_far - w < reached[-1] / 2]
        return drawn(self, ids[: len(half)], half, index)

    return broken


def _ends_at_end_tokens_whatever_is_asked(init: Any) -> Any:
    def broken(self: Any, new: Any) -> None:
        init(self, new)
        self.ends |= {toy_executor.EOS}

    return broken


def _holds_stop_ids_alone_back(next_token: Any) -> Any:
    def broken(self: Any) -> int:
        ends, self.ends = self.ends, set(self.sampling.stop_token_ids)
        token = next_token(self)
        self.ends = ends
        return int(token)

    return broken


def _knows_no_longest_sequence(end: Any) -> Any:
    def broken(self: Any, token: int) -> Any:
        is_long = len(self.tokens) - self.new.num_prompt_tokens >= self.sampling.max_tokens
        return end(self, token) if token in self.ends or is_long else None

    return broken


DRAWS = {"temperature is heeded", "top k is kept", "seeds tell draws apart", "draws follow the output"}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (with_options(temperature=lambda _: 0.0), DRAWS),
        (with_options(temperature=lambda asked: asked and 1.0), {"temperature is heeded"}),
        (with_options(top_k=lambda _: 0), {"top k is kept"}),
        (with_options(top_p=lambda _: 1.0), {"top p is kept"}),
        (with_options(min_p=lambda _: 0.0), {"min p is kept"}),
        (
            with_options(seed=lambda _: next(_EACH)),
            {"seeds tell draws apart", "draws follow the output", "draft tokens change no choice"},
        ),
        (with_options(seed=lambda _: 7), DRAWS - {"draws follow the output"}),
        (with_options(seed=lambda seed: seed & 0xFFFFFFFF), {"seeds tell draws apart"}),
        (with_options(seed=abs), {"seeds tell draws apart"}),
        (with_options(seed=lambda seed: int(float(seed)) - (seed > 2**62)), {"seeds tell draws apart"}),
        (draws_by(lambda seq, index: 0), {"draws follow the output"}),
        (draws_by(lambda seq, index: len(seq.tokens)), {"draws follow the output"}),
        (
            draws_by(lambda seq, index: len(seq.tokens) - len(seq.new.token_ids)),
            {"draws follow the output"},
        ),
        (method(toy_executor.Sequence, "drawn", _draws_the_likelier_half), {"top k is kept"}),
        (
            method(toy_executor.Sequence, "__init__", _ends_at_end_tokens_whatever_is_asked),
            {"end tokens end"},
        ),
        (method(toy_executor.Sequence, "next_token", _holds_stop_ids_alone_back), {"end tokens end"}),
        (method(toy_executor.Sequence, "end", _knows_no_longest_sequence), {"longest sequence ends"}),
        (computing_all("not served"), {"options not offered are refused"}),
    ],
)
async def test_an_executor_that_draws_or_ends_wrongly_fails_the_check_of_that_rule(
    spoil: Spoil, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(spoil, tmp_path, monkeypatch) == expected


def able(**wrong: Any) -> Spoil:
    def spoil(monkeypatch: pytest.MonkeyPatch, executor: toy_executor.ToyExecutor) -> None:
        make_able(monkeypatch, executor, Wrong(**wrong))

    return spoil


RAW = {"logprobs are of the raw distribution"}
WEIGHED = {"penalties weigh"}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (able(), set()),
        (able(num_alternatives_missing=1), RAW),
        (able(is_hot=True), RAW),
        (able(is_biased=True), RAW),
        (able(presence_counts_each=True), WEIGHED),
        (able(frequency_counts_once=True), WEIGHED),
        (able(output_begins_at=0), WEIGHED),
        (able(repetition_begins_at_the_output=True), WEIGHED),
        (able(without="repetition"), WEIGHED),
    ],
)
async def test_an_executor_that_weighs_or_tells_wrongly_fails_the_check_of_that_rule(
    spoil: Spoil, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(spoil, tmp_path, monkeypatch) == expected
