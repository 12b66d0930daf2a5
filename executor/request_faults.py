"""What is wrong with a request that cannot be computed, as a sentence for its client.

The router refuses all of this at its door. It is checked again here, because a wrong number would index a
tensor or spoil a batch that others share. Pure functions of one `NewSequence`.
"""

from typing import Final

from executor.plan import NewSequence, SamplingParams

MAX_LOGPROBS: Final = 20
"""Most alternatives a request may ask for."""
MAX_TEMPERATURE: Final = 100
"""Far above it, a logit of minus infinity would be divided to a NaN, and a banned token could be drawn."""
MAX_REPETITION_PENALTY: Final = 100
MAX_PENALTY: Final = 2
"""Of the presence and frequency penalties, either way."""
MAX_BIAS: Final = 100
"""Either way."""


def request_fault(new: NewSequence, *, vocab_size: int, max_seq_len: int) -> str | None:
    """Why this one request cannot be computed, as a sentence for its client; None when it can."""
    if new.unsupported:
        return f"{', '.join(new.unsupported)} is not supported by this executor"
    if not new.token_ids:
        return "the prompt is empty; at least one token is needed"
    if max(new.token_ids) >= vocab_size or min(new.token_ids) < 0:
        index = next(i for i, token_id in enumerate(new.token_ids) if not 0 <= token_id < vocab_size)
        return f"token {index} is {new.token_ids[index]}; token ids are 0 to {vocab_size - 1}"
    if len(new.token_ids) >= max_seq_len:
        return (
            f"the sequence has {len(new.token_ids)} tokens; it must leave room for one more "
            f"in the {max_seq_len} this executor can take"
        )
    return _params_fault(new, vocab_size)


def _params_fault(new: NewSequence, vocab_size: int) -> str | None:
    params = new.params
    num_output = len(new.token_ids) - new.num_prompt_tokens
    # Written so that NaN, for which every comparison is false, breaks the rule.
    rules = (
        (
            params.constraint is None or not params.ignore_eos,
            "ignore_eos is set, and a constrained output ends with an end token",
        ),
        (params.max_tokens >= 1, f"max_tokens is {params.max_tokens}; it must be at least 1"),
        (
            num_output < params.max_tokens,
            f"max_tokens is {params.max_tokens} and {num_output} output tokens are known already",
        ),
        (
            0 <= params.min_tokens <= params.max_tokens,
            f"min_tokens is {params.min_tokens}; it must be 0 to max_tokens, {params.max_tokens}",
        ),
        (
            0 <= params.temperature <= MAX_TEMPERATURE,
            f"temperature is {params.temperature}; it must be 0 to {MAX_TEMPERATURE}",
        ),
        (0 < params.top_p <= 1, f"top_p is {params.top_p}; it must be above 0 and at most 1"),
        (0 <= params.min_p <= 1, f"min_p is {params.min_p}; it must be 0 to 1"),
        (params.top_k >= 0, f"top_k is {params.top_k}; it must be 0 (off) or more"),
    )
    broken = next((sentence for holds, sentence in rules if not holds), None)
    return broken or _logprobs_fault(params) or _adjustment_fault(params) or _ids_fault(params, vocab_size)


def _logprobs_fault(params: SamplingParams) -> str | None:
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            return f"{name} is {count}; it must be 0 to {MAX_LOGPROBS}"
    return None


def _adjustment_fault(params: SamplingParams) -> str | None:
    repetition = params.repetition_penalty
    if not 0 < repetition <= MAX_REPETITION_PENALTY:
        return f"repetition_penalty is {repetition}; it must be above 0 and at most {MAX_REPETITION_PENALTY}"
    for name, penalty in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            return f"{name} is {penalty}; it must be {-MAX_PENALTY} to {MAX_PENALTY}"
    for token_id, bias in params.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            return f"logit_bias of token {token_id} is {bias}; it must be {-MAX_BIAS} to {MAX_BIAS}"
    if params.allowed_token_ids and params.allowed_token_ids <= params.banned_token_ids:
        return "every one of allowed_token_ids is banned: no token is left to choose"
    return None


def _ids_fault(params: SamplingParams, vocab_size: int) -> str | None:
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids),
        ("banned_token_ids", params.banned_token_ids),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                return f"{name} holds {token_id}; token ids are 0 to {vocab_size - 1}"
    return None
