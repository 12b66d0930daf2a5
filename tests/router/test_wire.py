"""Proto types and local types: presence is kept, strangers are refused, numbers agree."""

from dataclasses import replace

import grpc
import pytest

from protos.v1 import common_pb2, router_pb2, scheduler_pb2
from router import scheduler_session as session
from router import wire
from router.call import failure
from router.constraints import Choice, Constraint, JsonOrTagged, JsonSchema, Regex, Tagged
from router.request_log import End, FinishReason, SamplingParams, TokenLogprobs
from router.validation import Conversation, SamplingRequest
from rpc.errors import RequestError
from tests.router.test_request_log import new_log, sampling


def with_unknown_field(message: common_pb2.SamplingParams | router_pb2.GenerateRequest) -> bytes:
    return message.SerializeToString() + bytes([0xF8, 0x3E, 0x01])  # field 1007, varint 1


# --- from clients -----------------------------------------------------------------------------------


def test_absent_and_zero_are_told_apart() -> None:
    absent = wire.generate_request(router_pb2.GenerateRequest())
    lists = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
    assert not any(getattr(absent.sampling, name) for name in lists)
    assert replace(absent.sampling, **dict.fromkeys(lists, ())) == SamplingRequest()
    assert absent.prompt is None
    zeros = common_pb2.SamplingParams(
        temperature=0, top_p=0, top_k=0, min_p=0, seed=0, max_tokens=0, min_tokens=0, logprobs=0,
        prompt_logprobs=0, repetition_penalty=0, presence_penalty=0, frequency_penalty=0,
    )  # fmt: skip
    got = wire.generate_request(router_pb2.GenerateRequest(sampling=zeros)).sampling
    assert [got.temperature, got.top_p, got.top_k, got.min_p, got.seed] == [0, 0, 0, 0, 0]
    assert [got.max_tokens, got.min_tokens, got.logprobs, got.prompt_logprobs] == [0, 0, 0, 0]
    assert [got.repetition_penalty, got.presence_penalty, got.frequency_penalty] == [0, 0, 0]


def test_what_is_off_is_not_asked_of_executors_and_what_is_on_arrives() -> None:
    off = SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, seed=1, max_tokens=1, min_tokens=0, ignore_eos=False,
        stop_token_ids=(), logprobs=None,
    )  # fmt: skip
    newer = {"prompt_logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    newer |= {"logit_bias", "allowed_token_ids", "banned_token_ids"}
    assert not newer & {field.name for field, _ in wire.sampling_params(off).ListFields()}
    on = replace(
        off, prompt_logprobs=0, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5,
        logit_bias=((3, -2.0), (7, 100.0)), allowed_token_ids=(3, 7), banned_token_ids=(8,),
    )  # fmt: skip
    message = wire.sampling_params(on)
    assert newer <= {field.name for field, _ in message.ListFields()}
    got = wire.generate_request(router_pb2.GenerateRequest(sampling=message)).sampling
    assert (got.prompt_logprobs, got.repetition_penalty, got.presence_penalty) == (0, 1.5, -1.0)
    assert (got.frequency_penalty, got.logit_bias) == (0.5, {3: -2.0, 7: 100.0})
    assert (list(got.allowed_token_ids), list(got.banned_token_ids)) == ([3, 7], [8])


def test_each_kind_of_prompt_is_told_apart_even_when_it_is_empty() -> None:
    assert wire.prompt(router_pb2.GenerateRequest(text="")) == ""
    ids = wire.prompt(router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[-1, 1 << 40])))
    assert not isinstance(ids, str | Conversation | None)
    assert list(ids) == [-1, 1 << 40]
    chat = wire.text_or_chat(router_pb2.TokenizeRequest(chat=router_pb2.Chat(tools=["{}"])))
    assert isinstance(chat, Conversation)
    assert (len(chat.messages), list(chat.tools), chat.add_generation_prompt) == (0, ["{}"], True)
    closed = wire.prompt(router_pb2.GenerateRequest(chat=router_pb2.Chat(add_generation_prompt=False)))
    assert isinstance(closed, Conversation)
    assert not closed.add_generation_prompt


def test_fields_that_the_contract_does_not_have_are_refused_where_they_stand() -> None:
    inner = common_pb2.SamplingParams.FromString(with_unknown_field(common_pb2.SamplingParams(seed=1)))
    with pytest.raises(RequestError, match="sampling has a field numbered 1007") as raised:
        wire.refuse_unknown_fields(router_pb2.GenerateRequest(sampling=inner))
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    outer = router_pb2.GenerateRequest.FromString(with_unknown_field(router_pb2.GenerateRequest(text="a")))
    with pytest.raises(RequestError, match="1007"):
        wire.refuse_unknown_fields(outer)
    message = router_pb2.Message(role="user")
    message.MergeFromString(bytes([0xF8, 0x3E, 0x01]))
    chat = router_pb2.Chat(messages=[router_pb2.Message(role="user"), message])
    with pytest.raises(RequestError, match=r"chat\.messages has a field numbered 1007"):
        wire.refuse_unknown_fields(router_pb2.GenerateRequest(chat=chat))


def test_a_request_of_known_fields_passes() -> None:
    params = common_pb2.SamplingParams(seed=1, logit_bias={1: 2.0}, choice=common_pb2.Choices(values=["a"]))
    wire.refuse_unknown_fields(router_pb2.GenerateRequest(text="a", stop=["b"], sampling=params))


def test_the_body_tells_requests_apart() -> None:
    one, same = (router_pb2.GenerateRequest(request_id="r", text="a", stop=["x"]) for _ in range(2))
    assert wire.body(one) == wire.body(same)
    assert wire.body(one) != wire.body(router_pb2.GenerateRequest(request_id="r", text="b"))


# --- to clients -------------------------------------------------------------------------------------


def test_accepted_tells_every_value_in_force() -> None:
    accepted = wire.accepted(new_log(seed=-5, temperature=0.5, stop_token_ids=(3,), logprobs=0))
    assert (accepted.request_id, accepted.seed, accepted.resume_token) == ("r", -5, "")
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs"]
    assert all(accepted.sampling.HasField(name) for name in names)  # type: ignore[arg-type]
    assert not wire.accepted(new_log()).sampling.HasField("logprobs")


def test_finished_counts_up_to_the_token_that_completed_the_end() -> None:
    log = new_log("b")
    choice = log.choices[0]
    choice.start(2)
    choice.append([97, 98, 99], (), 10.5)
    finished = wire.finished(log, choice)
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert finished.stop == "b"
    usage = finished.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (3, 2, 2)
    assert finished.timing.first_token_seconds == finished.timing.total_seconds == 0.5


def test_b111_without_a_token_there_is_no_first_token_time() -> None:
    log = new_log()
    log.choices[0].finish(End(FinishReason.ABORT), 11.0)
    finished = wire.finished(log, log.choices[0])
    assert not finished.timing.HasField("first_token_seconds")
    assert finished.WhichOneof("matched") is None


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End(FinishReason.DEADLINE), grpc.StatusCode.DEADLINE_EXCEEDED),
        (End(FinishReason.ABORT), grpc.StatusCode.ABORTED),
        (End(FinishReason.ERROR), grpc.StatusCode.INTERNAL),
        (End(FinishReason.ERROR, status_code=14), grpc.StatusCode.UNAVAILABLE),
        (End(FinishReason.ERROR, status_code=999), grpc.StatusCode.INTERNAL),
        (End(FinishReason.ERROR, status_code=8, retry_after_ms=1500), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_b75_an_end_that_is_no_proper_end_has_a_status(end: End, code: grpc.StatusCode) -> None:
    error = failure(end)
    assert error is not None
    assert error.code is code
    assert error.message
    assert error.retry_after_seconds == (1.5 if end.retry_after_ms else None)


def test_proper_ends_have_no_status() -> None:
    assert failure(End(FinishReason.STOP)) is failure(End(FinishReason.LENGTH)) is None


# --- with schedulers --------------------------------------------------------------------------------


def submit_body(**changes: object) -> session.SubmitBody:
    values: dict[str, object] = {
        "key": b"k" * 16, "request_id": "r", "sample_index": 1, "group": 4, "output_token_ids": (9,),
        "sampling": sampling(seed=-1), "priority": -3, "tenant": "t", "remaining_ms": 0, "waited_ms": 5,
        "cache_salt": "s", "body_digest": b"d", "accepted_before": True,
    }  # fmt: skip
    return session.SubmitBody(**(values | changes))  # type: ignore[arg-type]


def test_a_whole_submit_crosses_as_it_is() -> None:
    submit = wire.router_message(session.Submit(7, (1, 2), 0, 1, submit_body())).submit
    assert (submit.handle, list(submit.prompt_token_ids), list(submit.output_token_ids)) == (7, [1, 2], [9])
    assert (submit.sample_index, submit.group, submit.priority, submit.sampling.seed) == (1, 4, -3, -1)
    assert submit.HasField("remaining_ms")
    assert submit.remaining_ms == 0
    assert submit.accepted_before
    assert not submit.HasField("part")
    without = wire.router_message(session.Submit(7, (1,), 0, 1, submit_body(remaining_ms=None))).submit
    assert not without.HasField("remaining_ms")


def test_a_later_part_carries_handle_and_ids_alone() -> None:
    submit = wire.router_message(session.Submit(7, (1, 2), 1, 2, None)).submit
    part = scheduler_pb2.Part(index=1, count=2)
    assert submit == scheduler_pb2.Submit(handle=7, prompt_token_ids=[1, 2], part=part)


def test_small_messages_cross_as_they_are() -> None:
    assert wire.router_message(session.Hello("r", 1, 7)).hello == scheduler_pb2.Hello(
        router_id="r", protocol_revision=1, stream=7
    )
    assert wire.router_message(session.Ack(5)).ack.message_id == 5
    cancel = wire.router_message(session.Cancel(b"k", FinishReason.DEADLINE)).cancel
    assert (cancel.key, cancel.reason) == (b"k", common_pb2.FINISH_REASON_DEADLINE)


def test_step_output_comes_in_whole() -> None:
    row = common_pb2.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5], top_logprobs=[-0.5])
    sequence_finished = scheduler_pb2.SequenceFinished
    output = scheduler_pb2.StepOutput(
        message_id=3, handles=[1, 2], num_tokens=[1, 2], token_ids=[5, 6, 7], step_id=9,
        logprobs=[scheduler_pb2.SequenceLogprobs(handle=1, tokens=[row])],
        started=[scheduler_pb2.SequenceStarted(handle=2, num_cached_tokens=16)],
        finished=[
            sequence_finished(handle=1, reason=common_pb2.FINISH_REASON_STOP, matched_token_id=0),
            sequence_finished(
                handle=2, reason=common_pb2.FINISH_REASON_ERROR, message="no", status_code=13,
                num_cached_tokens=4,
            ),
        ],
    )  # fmt: skip
    got = wire.scheduler_message(scheduler_pb2.SchedulerMessage(step_output=output))
    assert got == session.StepOutput(
        message_id=3, handles=(1, 2), num_tokens=(1, 2), token_ids=(5, 6, 7), step_id=9,
        logprobs={1: (TokenLogprobs(5, -0.5, 1, (5,), (-0.5,)),)}, started={2: 16},
        finished=(
            session.SequenceFinished(1, End(FinishReason.STOP, matched_token_id=0), 0),
            session.SequenceFinished(2, End(FinishReason.ERROR, message="no", status_code=13), 4),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("reason", [0, 77])
def test_an_end_without_a_known_reason_ends_the_stream(reason: int) -> None:
    finished = scheduler_pb2.SequenceFinished(handle=1)
    finished.reason = reason  # type: ignore[assignment]
    output = scheduler_pb2.StepOutput(message_id=1, finished=[finished])
    with pytest.raises(session.SessionError, match="handle 1 ended for the unknown reason"):
        wire.scheduler_message(scheduler_pb2.SchedulerMessage(step_output=output))


def test_a_message_that_only_a_newer_scheduler_knows_is_ignored() -> None:
    assert wire.scheduler_message(scheduler_pb2.SchedulerMessage()) is None


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        (common_pb2.SamplingParams(), None),
        (common_pb2.SamplingParams(json_schema=""), JsonSchema("")),
        (common_pb2.SamplingParams(regex="("), Regex("(")),
        (common_pb2.SamplingParams(choice=common_pb2.Choices(values=["a", "b"])), Choice(["a", "b"])),
        (
            common_pb2.SamplingParams(
                json_or_tagged=common_pb2.JsonOrTagged(
                    json_schema="{}",
                    tags=[common_pb2.Tagged(begin="a", json_schema="[]", end="b")],
                    opening="c",
                    separator="d",
                    closing="e",
                    max_tags=5,
                )
            ),
            JsonOrTagged("{}", [Tagged("a", "[]", "b")], "c", "d", "e", 5),
        ),
        (
            common_pb2.SamplingParams(json_or_tagged=common_pb2.JsonOrTagged(json_schema="{}")),
            JsonOrTagged("{}", []),
        ),
    ],
)
def test_constraints_are_read_and_handed_on(
    params: common_pb2.SamplingParams, constraint: Constraint | None
) -> None:
    read = wire.generate_request(router_pb2.GenerateRequest(sampling=params)).sampling.constraint
    assert read == constraint
    kept = Choice(tuple(constraint.values)) if isinstance(constraint, Choice) else constraint
    sent = wire.sampling_params(sampling(constraint=kept))
    assert sent.WhichOneof("constraint") == params.WhichOneof("constraint")
    assert sent.choice == params.choice
    assert sent.json_or_tagged == params.json_or_tagged


def test_variables_of_the_template_come_as_they_were_written() -> None:
    chat = router_pb2.Chat(chat_template_kwargs='{"enable_thinking": false}')
    read = wire.text_or_chat(router_pb2.TokenizeRequest(chat=chat))
    assert isinstance(read, Conversation)
    assert read.chat_template_kwargs == '{"enable_thinking": false}'


def test_a_conversation_that_is_continued_opens_no_answer() -> None:
    chat = router_pb2.Chat(continue_final_message=True)
    read = wire.text_or_chat(router_pb2.TokenizeRequest(chat=chat))
    assert isinstance(read, Conversation)
    assert read.continue_final_message
    assert not read.add_generation_prompt
