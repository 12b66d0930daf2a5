"""Converts proto types and local types: for clients (`router.proto`) and schedulers (`scheduler.proto`).

Nothing is decided here. The one refusal that only this place can make is that of fields the contract does
not have: they exist in a message's bytes alone.
"""

from collections import abc
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.v1 import common_pb2, router_pb2, scheduler_pb2
from router import ride
from router import scheduler_session as session
from router.call import Ended, Grown, News, PromptSeen
from router.constraints import MAX_TAGS, Choice, Constraint, JsonOrTagged, JsonSchema, Regex, Tagged
from router.request_log import (
    ChoiceLog,
    Delta,
    End,
    FinishReason,
    RequestLog,
    SamplingParams,
    TokenLogprobs,
)
from router.resume import Resume
from router.validation import Conversation, Defaults, GenerateRequest, SamplingRequest
from rpc.errors import invalid
from rpc.histogram import Histogram

_IDS_AT_ONCE: Final = 16_384
_INLINE_ENTRIES: Final = 256

# --- from clients -----------------------------------------------------------------------------------


def generate_request(request: router_pb2.GenerateRequest) -> GenerateRequest:
    """A client's request as the door wants it. Long lists are not copied."""
    return GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        prompt=prompt(request),
        sampling=_sampling_request(request.sampling),
        n=request.n,
        stop=request.stop,
        include_stop=request.include_stop,
        priority=request.priority,
        cache_salt=request.cache_salt,
        resume=_resume(request.resume) if request.HasField("resume") else None,
    )


def prompt(request: router_pb2.GenerateRequest) -> str | abc.Sequence[int] | Conversation | None:
    """The prompt that is set, or None."""
    return request.token_ids.ids if request.HasField("token_ids") else text_or_chat(request)


def text_or_chat(
    request: router_pb2.GenerateRequest | router_pb2.TokenizeRequest,
) -> str | Conversation | None:
    """The text or the conversation that is set, or None."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            chat = request.chat
            continued = chat.continue_final_message
            opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
            return Conversation(chat.messages, chat.tools, opened, continued, chat.chat_template_kwargs)
        case _:
            return None


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Refuses a message that carries fields which this version of the contract does not have.

    To be called once the number of entries in its lists has been checked: it looks at each of them.
    Raises RequestError, INVALID_ARGUMENT naming where and the field's number.
    """
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]  # the stubs lack its __iter__
        where = path or message.DESCRIPTOR.name
        raise invalid(where, f"{where} has a field numbered {unknown.field_number}, unknown to this version")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inner = f"{path}.{field.name}" if path else field.name
        for entry in value if field.is_repeated else (value,):
            refuse_unknown_fields(entry, inner)


def body(request: router_pb2.GenerateRequest) -> bytes:
    """What was asked: two requests of one id are the same request only when it agrees.

    Neither the id is part of it, which the router may have given, nor what there is of the answer already.
    They are taken out for a moment: the rest may be long, and a copy would hold up everybody.
    """
    request_id, resume = request.request_id, router_pb2.Resume()
    is_resume = request.HasField("resume")
    if is_resume:
        resume.CopyFrom(request.resume)
    request.ClearField("request_id")
    request.ClearField("resume")
    told = request.SerializeToString(deterministic=True)
    request.request_id = request_id
    if is_resume:
        request.resume.CopyFrom(resume)
    return told


def _resume(resume: router_pb2.Resume) -> Resume:
    return Resume(resume.resume_token, [(entry.index, entry.token_ids) for entry in resume.received])


def _sampling_request(sampling: common_pb2.SamplingParams) -> SamplingRequest:
    return SamplingRequest(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        min_tokens=sampling.min_tokens if sampling.HasField("min_tokens") else None,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        constraint=_constraint(sampling),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if sampling.HasField("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if sampling.HasField("frequency_penalty") else None,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
    )


def _constraint(sampling: common_pb2.SamplingParams) -> Constraint | None:
    match sampling.WhichOneof("constraint"):
        case "json_schema":
            return JsonSchema(sampling.json_schema)
        case "regex":
            return Regex(sampling.regex)
        case "choice":
            return Choice(sampling.choice.values)
        case "json_or_tagged":
            either = sampling.json_or_tagged
            return JsonOrTagged(
                either.json_schema,
                [Tagged(tag.begin, tag.json_schema, tag.end) for tag in either.tags[: MAX_TAGS + 1]],
                either.opening,
                either.separator,
                either.closing,
                either.max_tags if either.HasField("max_tags") else None,
            )
        case _:
            return None


# --- to clients -------------------------------------------------------------------------------------


def event(news: News) -> router_pb2.GenerateEvent:
    """One thing that happened to a request."""
    match news:
        case Grown(_, piece):
            return _grown(piece)
        case PromptSeen(log):
            return router_pb2.GenerateEvent(prompt_info=prompt_info(log))
        case Ended(log, choice):
            return router_pb2.GenerateEvent(finished=finished(log, choice))


def accepted(request: RequestLog) -> router_pb2.Accepted:
    """The first event; the values in force are those of choice 0, whose seed is the request's own."""
    params = request.choices[0].sampling
    return router_pb2.Accepted(
        request_id=request.request_id,
        resume_token=request.resume_token,
        seed=params.seed,
        sampling=sampling_params(params),
    )


def prompt_info(request: RequestLog) -> router_pb2.PromptInfo:
    """What the prompt came to."""
    return router_pb2.PromptInfo(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=request.num_cached_tokens or 0,
        logprobs=map(_token_logprobs, request.prompt_logprobs),
    )


def _grown(piece: Delta) -> router_pb2.GenerateEvent:
    """More of one choice. It is made for every token: in place, and only what is there."""
    told = router_pb2.GenerateEvent()
    delta = told.delta
    delta.index = piece.index
    delta.offset = piece.offset
    if piece.text:
        delta.text = piece.text
    delta.token_ids.extend(piece.token_ids)
    if piece.logprobs:
        delta.logprobs.extend(map(_token_logprobs, piece.logprobs))
    return told


def finished(request: RequestLog, choice: ChoiceLog) -> router_pb2.Finished:
    """The end of one choice, with what it cost."""
    assert choice.end is not None, "the choice has ended"
    assert choice.ended_at is not None, "the choice has ended"
    timing = router_pb2.Timing(total_seconds=choice.ended_at - request.received_at)
    if choice.first_token_at is not None:
        timing.first_token_seconds = choice.first_token_at - request.received_at
    message = router_pb2.Finished(
        index=choice.index,
        reason=finish_reason(choice.end.reason),
        usage=router_pb2.Usage(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=choice.num_cached_tokens or 0,
            num_output_tokens=len(choice.output_token_ids),
        ),
        timing=timing,
    )
    if choice.end.matched_stop is not None:
        message.stop = choice.end.matched_stop
    elif choice.end.matched_token_id is not None:
        message.token_id = choice.end.matched_token_id
    return message


def response(request: RequestLog) -> router_pb2.GenerateResponse:
    """The whole answer, once every choice has ended; it takes what the log has for the client."""
    answer = router_pb2.GenerateResponse(accepted=accepted(request), prompt_info=prompt_info(request))
    for choice in request.choices:
        whole = choice.take_delta()
        answer.choices.add(
            index=choice.index,
            text=whole.text if whole else "",
            token_ids=choice.output_token_ids,
            logprobs=[_token_logprobs(entry) for entry in whole.logprobs] if whole else [],
            finished=finished(request, choice),
        )
    return answer


def sampling_params(params: SamplingParams) -> common_pb2.SamplingParams:
    """Sampling with every value set, for clients and for schedulers.

    What is off is absent where not every executor knows it: to set it would be to ask for it.
    """
    message = common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else None,
        presence_penalty=params.presence_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
    )
    match params.constraint:
        case JsonSchema(text):
            message.json_schema = text
        case Regex(pattern):
            message.regex = pattern
        case Choice(values):
            message.choice.values.extend(values)
        case JsonOrTagged():
            _put_either(message.json_or_tagged, params.constraint)
    return message


def _put_either(message: common_pb2.JsonOrTagged, either: JsonOrTagged) -> None:
    message.json_schema = either.text
    for tag in either.tags:
        message.tags.add(begin=tag.begin, json_schema=tag.text, end=tag.end)
    message.opening, message.separator, message.closing = either.opening, either.separator, either.closing
    if either.max_tags is not None:
        message.max_tags = either.max_tags


def defaults(values: Defaults) -> common_pb2.SamplingParams:
    """What absent sampling fields mean; a field that stays absent depends on the request."""
    return common_pb2.SamplingParams(
        temperature=values.temperature,
        top_p=values.top_p,
        top_k=values.top_k,
        min_p=values.min_p,
        repetition_penalty=values.repetition_penalty,
        presence_penalty=0,
        frequency_penalty=0,
        max_tokens=values.max_tokens,
        min_tokens=0,
    )


def fingerprints(prints: session.Fingerprints) -> common_pb2.Fingerprints:
    """What the parts are."""
    return common_pb2.Fingerprints(model=prints.model, tokenizer=prints.tokenizer, numerics=prints.numerics)


def finish_reason(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """The contract's word; the numbers agree."""
    return common_pb2.FinishReason.ValueType(reason)


def _token_logprobs(entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def tokenized(token_ids: abc.Sequence[int], max_total_tokens: int) -> router_pb2.TokenizeResponse:
    """The ids of a text. Some at a time: to convert many at once is one long call into C."""
    response = router_pb2.TokenizeResponse(max_total_tokens=max_total_tokens)
    for first in range(0, len(token_ids), _IDS_AT_ONCE):
        response.token_ids.extend(token_ids[first : first + _IDS_AT_ONCE])
    return response


# --- to schedulers ----------------------------------------------------------------------------------


def router_message(message: session.RouterMessage) -> scheduler_pb2.RouterMessage:
    """What a session wants to say."""
    match message:
        case session.Hello():
            hello = scheduler_pb2.Hello(
                router_id=message.router_id,
                protocol_revision=message.protocol_revision,
                stream=message.stream,
            )
            return scheduler_pb2.RouterMessage(hello=hello)
        case session.Ack():
            return scheduler_pb2.RouterMessage(ack=scheduler_pb2.Ack(message_id=message.message_id))
        case session.Cancel():
            cancel = scheduler_pb2.Cancel(key=message.key, reason=finish_reason(message.reason))
            return scheduler_pb2.RouterMessage(cancel=cancel)
        case session.Submit():
            return scheduler_pb2.RouterMessage(submit=_submit(message))


def _submit(message: session.Submit) -> scheduler_pb2.Submit:
    submit = scheduler_pb2.Submit(handle=message.handle, prompt_token_ids=message.prompt_token_ids)
    if message.num_parts > 1:
        submit.part.index = message.part
        submit.part.count = message.num_parts
    body = message.body
    if body is not None:
        submit.key = body.key
        submit.request_id = body.request_id
        submit.sample_index = body.sample_index
        submit.group = body.group
        submit.output_token_ids.extend(body.output_token_ids)
        submit.sampling.CopyFrom(sampling_params(body.sampling))
        submit.priority = body.priority
        submit.tenant = body.tenant
        if body.remaining_ms is not None:
            submit.remaining_ms = body.remaining_ms
        submit.waited_ms = body.waited_ms
        submit.cache_salt = body.cache_salt
        submit.body_digest = body.body_digest
        submit.accepted_before = body.accepted_before
        submit.traceparent = body.traceparent
    return submit


# --- from schedulers --------------------------------------------------------------------------------


def is_long(message: scheduler_pb2.SchedulerMessage) -> bool:
    """Whether it takes milliseconds to take apart: all the log-probabilities of a prompt come at once."""
    rows = message.step_output.prompt_logprobs
    return sum(len(row.tokens) for row in rows) > _INLINE_ENTRIES


def scheduler_message(message: scheduler_pb2.SchedulerMessage) -> session.SchedulerMessage | None:
    """What a scheduler said; None for something that only a newer version can say.

    Raises SessionError when it cannot be told apart.
    """
    match message.WhichOneof("message"):
        case "step_output":
            return _step_output(message.step_output)
        case "serving_status":
            return session.ServingStatus(message.serving_status.serving, message.serving_status.reason)
        case "welcome":
            return _welcome(message.welcome)
        case _:
            return None


def _welcome(welcome: scheduler_pb2.Welcome) -> session.Welcome:
    prints = welcome.fingerprints
    return session.Welcome(
        scheduler_id=welcome.scheduler_id,
        term=welcome.term,
        protocol_revision=welcome.protocol_revision,
        max_total_tokens=welcome.max_total_tokens,
        vocab_size=welcome.vocab_size,
        eos_token_ids=tuple(welcome.eos_token_ids),
        fingerprints=session.Fingerprints(prints.model, prints.tokenizer, prints.numerics),
        dtype=welcome.dtype,
        features=frozenset(welcome.features),
    )


def _step_output(output: scheduler_pb2.StepOutput) -> session.StepOutput:
    return session.StepOutput(
        message_id=output.message_id,
        handles=tuple(output.handles),
        num_tokens=tuple(output.num_tokens),
        token_ids=tuple(output.token_ids),
        logprobs={row.handle: tuple(map(_logprobs, row.tokens)) for row in output.logprobs},
        finished=tuple(map(_finished, output.finished)),
        started={row.handle: row.num_cached_tokens for row in output.started},
        step_id=output.step_id,
        accepted=tuple(output.accepted),
        prompt_logprobs={
            row.handle: (row.first_position, tuple(map(_logprobs, row.tokens)))
            for row in output.prompt_logprobs
        },
    )


def changes(message: scheduler_pb2.BatchChanges) -> ride.Changes:
    """Some iterations, for those who look."""
    newest = message.newest
    return ride.Changes(
        executor_id=newest.executor_id,
        step_id=newest.step_id,
        time_seconds=newest.time_seconds,
        seated=_riders(message.seated) if message.whole else None,
        steps=tuple(_step(step) for step in message.steps),
        gauges={
            "running": newest.num_running,
            "waiting": newest.num_waiting,
            "groups": [[group.priority, group.tenant, group.num_waiting] for group in newest.waiting],
            "seats": newest.max_num_seqs,
            "blocks": newest.num_blocks,
            "free": newest.num_free_blocks,
            "cached": newest.num_cached_blocks,
            "plan_bytes": newest.num_plan_bytes,
            "step_us": newest.previous_step_us,
            "idle_us": newest.previous_idle_us,
            "accepted": newest.num_accepted_tokens,
        },
    )


def _step(step: scheduler_pb2.StepChange) -> ride.Step:
    return ride.Step(
        step.step_id,
        step.num_alike,
        left=tuple((leaver.seq_id, _leaving_reason(leaver.reason)) for leaver in step.left),
        entered=_riders(step.entered),
        prefill=tuple((chunk.seq_id, chunk.num_tokens) for chunk in step.chunks if chunk.prefill),
        last_chunk=tuple((chunk.seq_id, chunk.num_tokens) for chunk in step.chunks if not chunk.prefill),
        still=tuple(step.still_seq_ids),
    )


def _riders(members: abc.Iterable[router_pb2.StepMember]) -> tuple[ride.Rider, ...]:
    return tuple(
        ride.Rider(member.seq_id, member.request_id, member.index, member.padding, member.tenant)
        for member in members
    )


def histogram(observed: Histogram) -> router_pb2.Histogram:
    """What was counted so far."""
    return router_pb2.Histogram(bounds=observed.bounds, counts=observed.counts)


def time_line(response: router_pb2.ExplainResponse) -> dict[str, object]:
    """One request's time line as plain values, seconds since it came in."""
    return {
        "request_id": response.request_id,
        "entries": [
            {
                "index": entry.index,
                "start": entry.start_seconds,
                "duration": entry.duration_seconds,
                "reason": entry.reason,
                "step": entry.step_id,
                "detail": entry.detail,
            }
            for entry in response.entries
        ],
    }


def _leaving_reason(reason: common_pb2.FinishReason.ValueType) -> str:
    if reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        return ride.PREEMPTED
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")


def _finished(row: scheduler_pb2.SequenceFinished) -> session.SequenceFinished:
    try:
        reason = FinishReason(row.reason)
    except ValueError:
        raise session.SessionError(f"handle {row.handle} ended for the unknown reason {row.reason}") from None
    end = End(
        reason=reason,
        matched_token_id=row.matched_token_id if row.HasField("matched_token_id") else None,
        message=row.message,
        status_code=row.status_code,
        retry_after_ms=row.retry_after_ms,
    )
    return session.SequenceFinished(row.handle, end, row.num_cached_tokens)


def _logprobs(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=tuple(entry.top_token_ids),
        top_logprobs=tuple(entry.top_logprobs),
    )
