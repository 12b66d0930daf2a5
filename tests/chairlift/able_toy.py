"""The toy executor with log-probabilities, penalties, bias and lists, each of which can be spoiled."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from protos.v1 import common_pb2
from tests.rig import toy_executor
from tests.rig.toy_executor import VOCAB

FEATURES = ("logprobs", "penalties", "logit_bias", "token_lists")


@dataclass(frozen=True, slots=True)
class Wrong:
    """What an able toy does wrongly."""

    num_alternatives_missing: int = 0
    is_hot: bool = False  # log-probabilities are those after the temperature
    is_biased: bool = False  # and after the bias
    presence_counts_each: bool = False
    frequency_counts_once: bool = False
    output_begins_at: int | None = None  # for presence and frequency
    repetition_begins_at_the_output: bool = False
    without: str = ""  # a penalty
    tells_of_the_last: bool = False  # of a row's tokens
    counts_by_the_row: bool = False  # penalties do not count what came behind draft tokens


def make_able(monkeypatch: pytest.MonkeyPatch, executor: Any, wrong: Wrong) -> None:
    """Gives the toy abilities."""
    open_, run_row, fault_of = executor.Open, toy_executor.Epoch.run_row, toy_executor.fault_of

    async def open_and_offer(request: Any, context: Any) -> Any:
        response = await open_(request, context)
        response.features.extend(FEATURES)
        return response

    def next_token(self: Any) -> int:
        logits = _adjusted(self, wrong)
        ranked = sorted((-logit, token_id) for token_id, logit in logits.items())
        temperature = self.sampling.temperature
        if temperature == 0:
            return ranked[0][1]
        weights = [math.exp((ranked[0][0] - negative) / temperature) for negative, _ in ranked]
        kept = self.kept(weights)
        ids = [token_id for _, token_id in ranked]
        return int(self.drawn(ids[: len(kept)], kept, len(self.tokens) - self.new.num_prompt_tokens))

    def run_row_and_report(self: Any, result: Any, sequence: Any, *row: Any) -> None:
        before = sequence.row_began = len(sequence.tokens)
        run_row(self, result, sequence, *row)
        new_ends = range(before + 1, len(sequence.tokens) + 1)
        if new_ends and sequence.sampling.HasField("logprobs"):
            reports = [_report(sequence, sequence.tokens[:end], wrong) for end in new_ends]
            reports = reports[-1:] if wrong.tells_of_the_last else reports
            result.logprobs.add(seq_id=sequence.new.seq_id, tokens=reports)

    def fault_of_able(new: Any) -> str:
        known = type(new)()
        known.CopyFrom(new)
        for name in ("logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
            known.sampling.ClearField(name)
        del known.sampling.allowed_token_ids[:], known.sampling.banned_token_ids[:]
        return fault_of(known)

    monkeypatch.setattr(executor, "Open", open_and_offer)
    monkeypatch.setattr(toy_executor.Sequence, "next_token", next_token)
    monkeypatch.setattr(toy_executor.Epoch, "run_row", run_row_and_report)
    monkeypatch.setattr(toy_executor, "fault_of", fault_of_able)


def _raw(tokens: list[int]) -> dict[int, float]:
    first = toy_executor.likeliest(tokens)
    return {(first + i) % VOCAB: -0.3 * i for i in range(VOCAB)}


def _adjusted(sequence: Any, wrong: Wrong) -> dict[int, float]:
    sampling, tokens = sequence.sampling, sequence.tokens
    num_prompt = sequence.new.num_prompt_tokens
    begin = num_prompt if wrong.output_begins_at is None else wrong.output_begins_at
    counted = tokens[: sequence.row_began] if wrong.counts_by_the_row else tokens
    counts = Counter(counted[begin:])
    seen = set(counted[num_prompt:] if wrong.repetition_begins_at_the_output else counted)
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    repetition = 1.0 if wrong.without == "repetition" else repetition
    logits = {}
    for token_id, logit in _raw(tokens).items():
        value = logit + sampling.logit_bias.get(token_id, 0.0)
        if token_id in seen:
            value = value / repetition if value > 0 else value * repetition
        if count := counts[token_id]:
            value -= sampling.frequency_penalty * (1 if wrong.frequency_counts_once else count)
            value -= sampling.presence_penalty * (count if wrong.presence_counts_each else 1)
        logits[token_id] = value
    allowed = set(sampling.allowed_token_ids) or set(logits)
    excluded = set(sampling.banned_token_ids)
    excluded |= sequence.ends if len(tokens) - num_prompt < sampling.min_tokens else set()
    return {token_id: value for token_id, value in logits.items() if token_id in allowed - excluded}


def _report(sequence: Any, tokens: list[int], wrong: Wrong) -> common_pb2.TokenLogprobs:
    *context, chosen = tokens
    logits, sampling = _raw(context), sequence.sampling
    if wrong.is_biased:
        logits = {
            token_id: logit + sampling.logit_bias.get(token_id, 0.0) for token_id, logit in logits.items()
        }
    if wrong.is_hot and sampling.temperature:
        logits = {token_id: logit / sampling.temperature for token_id, logit in logits.items()}
    total = math.log(sum(map(math.exp, logits.values())))
    ranked = sorted(logits, key=lambda token_id: -logits[token_id])
    top = ranked[: max(0, sampling.logprobs - wrong.num_alternatives_missing)]
    return common_pb2.TokenLogprobs(
        token_id=chosen,
        logprob=logits[chosen] - total,
        rank=1 + ranked.index(chosen),
        top_token_ids=top,
        top_logprobs=[logits[token_id] - total for token_id in top],
    )
