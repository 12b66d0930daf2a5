"""Translates between protobuf messages and the scheduler's own values: the one place where the two meet."""

import heapq
import operator
from collections.abc import Iterable, Mapping

from protos.v1 import common_pb2, executor_pb2, router_pb2, scheduler_pb2
from rpc.version import version
from scheduler.batch_changes import BatchChanges
from scheduler.core import SchedulerCore
from scheduler.executor_state import ExecutorState
from scheduler.explain import Entry
from scheduler.plan import (
    BatchPlan,
    Capacity,
    FinishedSequence,
    Leaver,
    NewSequence,
    SequenceError,
    StepResult,
)
from scheduler.promise import Promise
from scheduler.router_session import FinishedOutput, StepOutput
from scheduler.sequence import FinishReason, Request, Sequence, StatusCode
from scheduler.token_ids import NO_IDS, TokenIds

MAX_WAITING_GROUPS = 31  # listed one by one

PROTOCOL_REVISION = 1
KEY_BYTES = 16


class SubmitError(ValueError):
    """A Submit that makes no sense: the router's fault, as one sentence."""


class CapacityError(ValueError):
    """An executor that offers nothing to work with."""


def capacity_of(message: executor_pb2.OpenResponse) -> Capacity:
    """What an executor says about itself. Raises CapacityError."""
    for name in (
        "epoch",
        "num_blocks",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_window",
        "vocab_size",
    ):
        if getattr(message, name) < 1:
            raise CapacityError(f"its {name} is 0, it must be at least 1")
    return Capacity(
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_seq_len=message.max_seq_len,
        max_window=message.max_window,
        vocab_size=message.vocab_size,
        eos_token_ids=frozenset(message.eos_token_ids),
        row_invariant=message.row_invariant,
        instance_id=message.instance_id,
        model_fingerprint=message.fingerprints.model,
        tokenizer_fingerprint=message.fingerprints.tokenizer,
        numerics_fingerprint=message.fingerprints.numerics,
        dtype=message.dtype,
        features=frozenset(message.features),
        version=message.version,
    )


def request_of(message: scheduler_pb2.Submit, prompt_token_ids: TokenIds, now: float) -> Request:
    """The request in a Submit, with times on the scheduler's clock. Raises SubmitError."""
    sampling = message.sampling
    if len(message.key) != KEY_BYTES:
        raise SubmitError(f"key has {len(message.key)} bytes, it must have {KEY_BYTES}")
    if not sampling.HasField("max_tokens") or not 1 <= sampling.max_tokens <= 2**31 - 1:
        raise SubmitError(f"sampling.max_tokens is {sampling.max_tokens}, it must be from 1 to {2**31 - 1}")
    return Request(
        key=message.key,
        request_id=message.request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=sampling.SerializeToString(),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        sample_index=message.sample_index,
        group=message.group,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        body_digest=message.body_digest,
        deadline=now + message.remaining_ms / 1000 if message.HasField("remaining_ms") else None,
        arrival=now - message.waited_ms / 1000,
        accepted_before=message.accepted_before,
        want_logprobs=sampling.HasField("logprobs"),
        want_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        needs=_needs(sampling),
        traceparent=message.traceparent,
    )


def _needs(sampling: common_pb2.SamplingParams) -> frozenset[str]:
    """The optional abilities of executors that these parameters need."""
    has_penalty = (
        (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1)
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )
    needs = {
        "prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "penalties": has_penalty,
        "logit_bias": sampling.logit_bias,
        "token_lists": sampling.allowed_token_ids or sampling.banned_token_ids,
        "constraints": sampling.WhichOneof("constraint"),
    }
    return frozenset(feature for feature, is_needed in needs.items() if is_needed)


def padding_sampling() -> bytes:
    """Sampling parameters under which a padding row goes on until it is released."""
    return greedy_sampling(2**31 - 1)


def greedy_sampling(max_tokens: int) -> bytes:
    """Sampling parameters for `max_tokens` tokens, whichever they are."""
    return common_pb2.SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=max_tokens
    ).SerializeToString()


def plan_message(plan: BatchPlan) -> executor_pb2.BatchPlan:
    """The plan as it is sent; the same plan gives the same bytes."""
    return executor_pb2.BatchPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        acked_step_id=plan.acked_step_id,
        released_seq_ids=plan.released_seq_ids,
        admitted=[_new_sequence_message(item) for item in plan.admitted],
        seq_ids=plan.seq_ids,
        num_tokens=plan.num_tokens,
        grown_seq_ids=plan.grown_seq_ids,
        num_new_blocks=plan.num_new_blocks,
        new_block_ids=plan.new_block_ids,
        positions_sum=plan.positions_sum,
        draft_tokens=[
            executor_pb2.DraftTokens(seq_id=seq_id, token_ids=ids)
            for seq_id, ids in plan.draft_tokens.items()
        ],
    )


def _new_sequence_message(item: NewSequence) -> executor_pb2.NewSequence:
    message = executor_pb2.NewSequence(
        seq_id=item.seq_id,
        token_ids=item.token_ids,
        num_prompt_tokens=item.num_prompt_tokens,
        num_computed_tokens=item.num_computed_tokens,
        block_ids=item.block_ids,
        prompt_logprobs_from=item.prompt_logprobs_from,
        traceparent=item.traceparent,
    )
    message.sampling.MergeFromString(item.sampling)
    return message


def result_of(message: executor_pb2.StepResult) -> StepResult:
    """An executor's answer."""
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        seq_ids=list(message.seq_ids),
        num_sampled=list(message.num_sampled),
        token_ids=list(message.token_ids),
        logprobs={item.seq_id: list(item.tokens) for item in message.logprobs},
        prompt_logprobs={
            item.seq_id: (item.first_position, list(item.tokens)) for item in message.prompt_logprobs
        },
        finished=[
            FinishedSequence(
                item.seq_id,
                FinishReason.STOP if item.reason == common_pb2.FINISH_REASON_STOP else FinishReason.LENGTH,
                item.matched_token_id if item.HasField("matched_token_id") else None,
            )
            for item in message.finished
        ],
        errors=[
            SequenceError(item.seq_id, item.message, _status_code(item.status_code))
            for item in message.errors
        ],
        draining=message.draining,
        seconds_to_leave=message.leaves_in_ms / 1000,
        total_us=message.timings.total_us,
        idle_us=message.timings.idle_us,
    )


def _status_code(number: int) -> StatusCode:
    return StatusCode(number) if number in set(StatusCode) - {StatusCode.OK} else StatusCode.INTERNAL


def welcome_message(scheduler_id: str, term: int, promise: Promise) -> scheduler_pb2.SchedulerMessage:
    """What a router must know about the model."""
    welcome = scheduler_pb2.Welcome(
        scheduler_id=scheduler_id,
        term=term,
        protocol_revision=PROTOCOL_REVISION,
        max_total_tokens=promise.max_total_tokens,
        vocab_size=promise.vocab_size,
        eos_token_ids=sorted(promise.eos_token_ids),
        fingerprints=common_pb2.Fingerprints(
            model=promise.model_fingerprint,
            tokenizer=promise.tokenizer_fingerprint,
            numerics=promise.numerics_fingerprint,
        ),
        dtype=promise.dtype,
        features=sorted(promise.features),
    )
    return scheduler_pb2.SchedulerMessage(welcome=welcome)


def serving_message(serving: bool, reason: str) -> scheduler_pb2.SchedulerMessage:  # noqa: FBT001  (the message's own two fields)
    """Whether requests are being served."""
    return scheduler_pb2.SchedulerMessage(
        serving_status=scheduler_pb2.ServingStatus(serving=serving, reason=reason)
    )


def output_message(output: StepOutput, step_id: int) -> scheduler_pb2.SchedulerMessage:
    """Tokens and ends for one router."""
    message = scheduler_pb2.SchedulerMessage()
    message.step_output.CopyFrom(
        scheduler_pb2.StepOutput(
            message_id=output.message_id,
            handles=output.handles,
            num_tokens=output.num_tokens,
            token_ids=output.token_ids,
            logprobs=[
                scheduler_pb2.SequenceLogprobs(handle=handle, tokens=_token_logprobs(entries))
                for handle, entries in output.logprobs
            ],
            prompt_logprobs=[
                scheduler_pb2.SequencePromptLogprobs(
                    handle=handle, first_position=first_position, tokens=_token_logprobs(entries)
                )
                for handle, first_position, entries in output.prompt_logprobs
            ],
            finished=[_finished_message(item) for item in output.finished],
            started=[
                scheduler_pb2.SequenceStarted(handle=handle, num_cached_tokens=count)
                for handle, count in output.started
            ],
            step_id=step_id,
            accepted=output.accepted,
        )
    )
    return message


def _token_logprobs(entries: Iterable[object]) -> list[common_pb2.TokenLogprobs]:
    """The core carries these unread; they arrived as the messages that they leave as."""
    return [entry for entry in entries if isinstance(entry, common_pb2.TokenLogprobs)]


def _finished_message(item: FinishedOutput) -> scheduler_pb2.SequenceFinished:
    finish = item.finish
    return scheduler_pb2.SequenceFinished(
        handle=item.handle,
        reason=finish_reason(finish.reason),
        matched_token_id=finish.matched_token_id,
        num_cached_tokens=item.num_cached_tokens,
        num_wasted_tokens=item.num_wasted_tokens,
        message=finish.message,
        status_code=finish.status_code,
        retry_after_ms=round((finish.retry_after_seconds or 0) * 1000),
    )


def finish_reason(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """The contract's value for why a sequence ended; None is UNSPECIFIED."""
    return common_pb2.FinishReason.ValueType(0 if reason is None else int(reason))


def cancel_reason(reason: common_pb2.FinishReason.ValueType) -> FinishReason:
    """Why a router aborts a sequence; anything that it may not say counts as ABORT."""
    if reason == common_pb2.FINISH_REASON_STOP:
        return FinishReason.STOP
    return FinishReason.DEADLINE if reason == common_pb2.FINISH_REASON_DEADLINE else FinishReason.ABORT


def step_summary(state: ExecutorState, plan: BatchPlan, planned_at: float) -> router_pb2.StepSummary:
    """What one iteration does, for watchers."""
    entered = {item.seq_id for item in plan.admitted}
    summary = step_gauges(state, plan.step_id, planned_at)
    summary.members.extend(
        router_pb2.StepMember(
            request_id=seq.request.request_id,
            index=seq.request.sample_index,
            seq_id=seq_id,
            num_tokens=count,
            entered=seq_id in entered,
            prefill=num_samples == 0,
            padding=seq.is_padding,
            tenant=seq.request.tenant,
            num_draft_tokens=len(plan.draft_tokens.get(seq_id, NO_IDS)),
        )
        for seq, seq_id, count, num_samples in zip(
            plan.rows, plan.seq_ids, plan.num_tokens, plan.num_samples, strict=True
        )
    )
    summary.left.extend(_leaver(leaver) for leaver in plan.left if not leaver.seq.is_padding)
    summary.num_preempted = sum(leaver.reason is None and not leaver.seq.is_padding for leaver in plan.left)
    return summary


def step_gauges(state: ExecutorState, step_id: int, planned_at: float) -> router_pb2.StepSummary:
    """An executor's figures after a step was planned, without the sequences in it."""
    return router_pb2.StepSummary(
        executor_id=state.executor_id,
        step_id=step_id,
        time_seconds=planned_at,
        num_running=len(state.running),
        num_free_blocks=state.blocks.num_free,
        num_cached_blocks=state.blocks.num_idle,
        num_blocks=state.blocks.num_blocks,
        max_num_seqs=state.max_num_seqs,
        previous_step_us=state.previous_step_us,
        previous_idle_us=state.previous_idle_us,
        num_accepted_tokens=state.num_accepted_tokens,
    )


def changes_message(gauges: router_pb2.StepSummary, changes: BatchChanges) -> scheduler_pb2.BatchChanges:
    """The steps that were not sent yet, for followers; `gauges` are those of the newest."""
    return scheduler_pb2.BatchChanges(
        newest=gauges,
        whole=changes.is_fresh,
        steps=[
            scheduler_pb2.StepChange(
                step_id=step.step_id,
                num_alike=step.num_alike,
                entered=[_rider(seq_id, seq) for seq_id, seq in step.entered],
                left=[_leaver(leaver) for leaver in step.left],
                chunks=[
                    router_pb2.StepMember(seq_id=seq_id, num_tokens=count, prefill=prefill)
                    for seq_id, count, prefill in step.chunks
                ],
                still_seq_ids=step.still,
            )
            for step in changes.steps
        ],
    )


def whole_message(
    gauges: router_pb2.StepSummary, changes: BatchChanges, num_missed: int
) -> scheduler_pb2.BatchChanges:
    """The whole batch, for a follower that does not know it; it was not sent `num_missed` messages."""
    message = scheduler_pb2.BatchChanges(
        newest=gauges,
        whole=True,
        seated=[_rider(seq_id, seq) for seq_id, seq in changes.seated.items()],
    )
    message.newest.num_dropped = num_missed
    return message


def _rider(seq_id: int, seq: Sequence) -> router_pb2.StepMember:
    return router_pb2.StepMember(
        request_id=seq.request.request_id,
        index=seq.request.sample_index,
        seq_id=seq_id,
        padding=seq.is_padding,
        tenant=seq.request.tenant,
    )


def _leaver(leaver: Leaver) -> router_pb2.StepLeaver:
    return router_pb2.StepLeaver(
        request_id=leaver.seq.request.request_id,
        index=leaver.seq.request.sample_index,
        seq_id=leaver.seq_id,
        reason=finish_reason(leaver.reason),
    )


def waiting_groups(counts: Mapping[tuple[int, str], int]) -> list[router_pb2.WaitingGroup]:
    """How many wait, by importance class and tenant: the largest groups, and all others as one."""
    shown = heapq.nlargest(MAX_WAITING_GROUPS, counts.items(), key=operator.itemgetter(1))
    groups = [
        router_pb2.WaitingGroup(priority=priority, tenant=tenant, num_waiting=count)
        for (priority, tenant), count in shown
    ]
    rest = sum(counts.values()) - sum(group.num_waiting for group in groups)
    if rest:
        groups.append(router_pb2.WaitingGroup(num_waiting=rest))
    return groups


def explain_response(request_id: str, lines: dict[int, list[Entry]]) -> router_pb2.ExplainResponse:
    """Time lines of a request's choices, in order of time."""
    entries = [
        router_pb2.ExplainEntry(
            index=index,
            start_seconds=entry.start,
            duration_seconds=entry.duration,
            reason=entry.reason.value,
            step_id=entry.step_id,
            detail=entry.detail,
        )
        for index, line in lines.items()
        for entry in line
    ]
    entries.sort(key=lambda entry: (entry.start_seconds, entry.index))
    return router_pb2.ExplainResponse(request_id=request_id, entries=entries)


def load_message(
    core: SchedulerCore, *, scheduler_id: str = "", term: int = 0, missing: Mapping[str, str] | None = None
) -> scheduler_pb2.GetLoadResponse:
    """How busy this scheduler is. `missing` says why executors are not attached."""
    states = core.executors.values()
    return scheduler_pb2.GetLoadResponse(
        num_running=core.num_running,
        num_waiting=len(core.waiting),
        num_waiting_tokens=core.waiting.num_tokens,
        num_free_blocks=sum(state.blocks.num_free for state in states),
        num_blocks=sum(state.blocks.num_blocks for state in states),
        num_executors=len(core.executors),
        num_preemptions=core.counters.preemptions,
        num_steps=core.counters.steps,
        status=router_pb2.SchedulerStatus(
            scheduler_id=scheduler_id,
            version=version(),
            term=term,
            num_running=core.num_running,
            num_waiting=len(core.waiting),
            executors=[
                *map(_executor_status, states),
                *(
                    router_pb2.ExecutorStatus(executor_id=executor_id, missing=reason)
                    for executor_id, reason in (missing or {}).items()
                ),
            ],
        ),
    )


def _executor_status(state: ExecutorState) -> router_pb2.ExecutorStatus:
    return router_pb2.ExecutorStatus(
        executor_id=state.executor_id,
        version=state.capacity.version,
        num_running=len(state.running),
        max_num_seqs=state.max_num_seqs,
        num_blocks=state.blocks.num_blocks,
        num_free_blocks=state.blocks.num_free,
        draining=state.is_draining,
        previous_step_us=state.previous_step_us,
        previous_idle_us=state.previous_idle_us,
    )
