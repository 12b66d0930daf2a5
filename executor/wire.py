"""Converts proto messages to local types and back: the only place that knows both.

Checks only the form (which fields are set); what the numbers mean is for `sequences` to judge.
"""

from itertools import groupby
from operator import itemgetter
from typing import Final

from executor.constraints import Choice, Constraint, JsonOrTagged, JsonSchema, Regex, Tagged
from executor.device import Runner, StepTimings
from executor.plan import BatchPlan, NewSequence, SamplingParams, StepResult, TokenLogprobs
from executor.stopping import FinishReason
from protos.v1 import common_pb2, executor_pb2
from rpc.version import version

PROTOCOL_REVISION: Final = 1

_RESERVED_PLAN_FIELDS: Final = frozenset({"block_copies", "zero_block_ids"})
_RESERVED_SEQUENCE_FIELDS: Final = frozenset({"adapter"})
_SERVED_SAMPLING_FIELDS: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "logprobs",
        "prompt_logprobs",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "banned_token_ids",
        "json_schema",
        "regex",
        "choice",
        "json_or_tagged",
    }
)
_FINISH_REASONS: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


def plan_from_proto(message: executor_pb2.BatchPlan) -> BatchPlan:
    """The plan, with the reserved fields it sets named."""
    set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
    return BatchPlan(
        epoch=message.epoch,
        step_id=message.step_id,
        acked_step_id=message.acked_step_id,
        released_seq_ids=tuple(message.released_seq_ids),
        admitted=tuple(new_sequence_from_proto(new) for new in message.admitted),
        seq_ids=tuple(message.seq_ids),
        num_tokens=tuple(message.num_tokens),
        grown_seq_ids=tuple(message.grown_seq_ids),
        num_new_blocks=tuple(message.num_new_blocks),
        new_block_ids=tuple(message.new_block_ids),
        positions_sum=message.positions_sum,
        draft_tokens=tuple((draft.seq_id, tuple(draft.token_ids)) for draft in message.draft_tokens),
        reserved=tuple(sorted(set_fields & _RESERVED_PLAN_FIELDS)),
    )


def new_sequence_from_proto(message: executor_pb2.NewSequence) -> NewSequence:
    """The admission, with the options that are set and not served here named."""
    set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
    set_sampling = {descriptor.name for descriptor, _ in message.sampling.ListFields()}
    unsupported = (set_fields & _RESERVED_SEQUENCE_FIELDS) | (set_sampling - _SERVED_SAMPLING_FIELDS)
    return NewSequence(
        seq_id=message.seq_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(message.block_ids),
        params=sampling_from_proto(message.sampling),
        unsupported=tuple(sorted(unsupported)),
        prompt_logprobs_from=(
            message.prompt_logprobs_from if message.HasField("prompt_logprobs_from") else None
        ),
        traceparent=message.traceparent,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Sampling with absent fields off. An absent `max_tokens` becomes 0, which no sequence may have."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=0 if message.top_k == -1 else message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=frozenset(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=frozenset(message.allowed_token_ids),
        banned_token_ids=frozenset(message.banned_token_ids),
        constraint=constraint_from_proto(message),
    )


def constraint_from_proto(message: common_pb2.SamplingParams) -> Constraint | None:
    """What the output must match; None for nothing."""
    match message.WhichOneof("constraint"):
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "regex":
            return Regex(message.regex)
        case "choice":
            return Choice(tuple(message.choice.values))
        case "json_or_tagged":
            either = message.json_or_tagged
            return JsonOrTagged(
                either.json_schema,
                tuple(Tagged(tag.begin, tag.json_schema, tag.end) for tag in either.tags),
                either.opening,
                either.separator,
                either.closing,
                either.max_tags if either.HasField("max_tags") else None,
            )
        case _:
            return None


def result_to_proto(
    result: StepResult, timings: StepTimings, *, draining: bool = False, leaves_in_seconds: float = 0.0
) -> executor_pb2.StepResult:
    """The result as it is sent, kept, and sent again. `leaves_in_seconds` goes with `draining`."""
    return executor_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        seq_ids=result.seq_ids,
        num_sampled=result.num_sampled,
        token_ids=result.token_ids,
        logprobs=[
            executor_pb2.RowLogprobs(
                seq_id=seq_id, tokens=[_logprobs_to_proto(chances) for _, chances in pairs]
            )
            for seq_id, pairs in groupby(result.logprobs, key=itemgetter(0))
        ],
        finished=[
            executor_pb2.FinishedSequence(
                seq_id=ended.seq_id,
                reason=_FINISH_REASONS[ended.reason],
                matched_token_id=ended.matched_token_id,
            )
            for ended in result.finished
        ],
        errors=[
            executor_pb2.SequenceError(
                seq_id=error.seq_id, message=error.message, status_code=error.status_code
            )
            for error in result.errors
        ],
        prompt_logprobs=[
            executor_pb2.PromptLogprobs(
                seq_id=stretch.seq_id,
                first_position=stretch.first_position,
                tokens=map(_logprobs_to_proto, stretch.tokens),
            )
            for stretch in result.prompt_logprobs
        ],
        draining=draining,
        leaves_in_ms=round(1000 * max(0.0, leaves_in_seconds)),
        timings=executor_pb2.StepTimings(
            idle_us=timings.idle_us,
            inputs_us=timings.inputs_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
            total_us=timings.total_us,
        ),
    )


def open_response(
    runner: Runner,
    *,
    epoch: int,
    instance_id: str,
    term: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_window: int,
) -> executor_pb2.OpenResponse:
    """What this executor is and how much it can take."""
    fingerprints = runner.fingerprints
    return executor_pb2.OpenResponse(
        epoch=epoch,
        instance_id=instance_id,
        term=term,
        protocol_revision=PROTOCOL_REVISION,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_seq_len=runner.max_seq_len,
        max_window=max_window,
        row_invariant=runner.row_invariant,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        features=runner.features,
        fingerprints=common_pb2.Fingerprints(
            model=fingerprints.model, tokenizer=fingerprints.tokenizer, numerics=fingerprints.numerics
        ),
        dtype=runner.dtype,
        device=runner.device,
        version=version(),
    )


def _logprobs_to_proto(chances: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=chances.token_id,
        logprob=chances.logprob,
        rank=chances.rank,
        top_token_ids=chances.top_token_ids,
        top_logprobs=chances.top_logprobs,
    )
