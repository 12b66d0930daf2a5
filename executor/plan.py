"""What crosses between a scheduler and this executor, as local values.

The messages of `protos/v1/executor.proto` without protobuf; `wire` translates. Pure data.
"""

from dataclasses import dataclass
from typing import Final

from executor.constraints import Constraint
from executor.stopping import FinishReason

INVALID_ARGUMENT: Final = 3
"""gRPC status code: the request itself cannot be computed."""
INTERNAL: Final = 13
"""gRPC status code: the computation went wrong."""
DRAFT_TOKENS: Final = "draft_tokens"
"""Feature of an executor that takes plans with draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence's next token is chosen and when it ends. Defaults mean *off*.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: smallest set of tokens whose probability reaches this; 1 is off.
        top_k: this many most likely tokens; 0 is off.
        min_p: drop tokens less likely than this share of the most likely one; 0 is off.
        seed: key of the random numbers, any signed 64-bit integer.
        max_tokens: most output tokens, those before a preemption included.
        min_tokens: no end token before this many output tokens.
        ignore_eos: go on past the model's end tokens.
        stop_token_ids: ids that end the sequence.
        logprobs: None for no log-probabilities, else how many alternatives beside the chosen token.
        prompt_logprobs: the same for the tokens of the prompt, where `prompt_logprobs_from` asks for them.
        repetition_penalty: divides or multiplies the logits of tokens in prompt or output; 1 is off.
        presence_penalty, frequency_penalty: taken off for tokens in the output; 0 is off.
        logit_bias: pairs of token id and what is added to its logit.
        allowed_token_ids: no other may be chosen; empty is off.
        banned_token_ids: may not be chosen.
        constraint: what the output must match; None for nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] = frozenset()
    banned_token_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the executor has not seen, or has forgotten.

    `prompt_logprobs_from` is the first position whose log-probability is wanted; None for none. `unsupported`
    names the options its request sets and this executor does not serve. `traceparent` names the span that its
    computation is part of; empty for none.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    params: SamplingParams
    unsupported: tuple[str, ...] = ()
    prompt_logprobs_from: int | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One iteration (vLLM: SchedulerOutput). Position i of `seq_ids` and `num_tokens` is one row."""

    epoch: int
    step_id: int
    acked_step_id: int = 0
    released_seq_ids: tuple[int, ...] = ()
    admitted: tuple[NewSequence, ...] = ()
    seq_ids: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    grown_seq_ids: tuple[int, ...] = ()
    num_new_blocks: tuple[int, ...] = ()
    new_block_ids: tuple[int, ...] = ()
    positions_sum: int = 0
    draft_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Pairs of seq_id and guesses for the next tokens of its row."""
    reserved: tuple[str, ...] = ()
    """Names of reserved fields that are set; a plan with any is refused."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was, natural logarithm of the model's raw distribution."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a stretch of one sequence's prompt, one for each position in order."""

    seq_id: int
    first_position: int
    tokens: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that ended, and with STOP the end token or stop id that did it."""

    seq_id: int
    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceError:
    """A sequence that could not be computed: a sentence and the gRPC status code for its client."""

    seq_id: int
    message: str
    status_code: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one plan brought. Rows in the plan's order; a row that erred or was a ghost's is in no column."""

    epoch: int
    step_id: int
    seq_ids: tuple[int, ...] = ()
    num_sampled: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    """Pairs of seq_id and the log-probabilities of a new token; a sequence's stand together, in order."""
    finished: tuple[FinishedSequence, ...] = ()
    errors: tuple[SequenceError, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
