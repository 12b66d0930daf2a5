"""One request at each of the four doors, and what came of it in the same words.

The doors are gRPC and HTTP, whole and streamed.

A request is the fields of an HTTP body; at the gRPC doors they go where the contract has them. Streams are
looked at as they come: one end for each choice, nothing after it, [DONE] last and only after a good end.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2

from protos.v1 import common_pb2, router_pb2
from rpc.errors import from_call
from tests.rig import client
from tests.rig.client import Client

DOORS = ("grpc", "grpc stream", "http", "http stream")
_OF_SAMPLING = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_CODES = {
    "invalid_value": "INVALID_ARGUMENT",
    "context_length_exceeded": "INVALID_ARGUMENT",
    "unsupported": "UNIMPLEMENTED",
    "model_not_found": "NOT_FOUND",
    "timeout": "DEADLINE_EXCEEDED",
    "request_id_in_use": "ALREADY_EXISTS",
    "rate_limit_exceeded": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
    "internal_error": "INTERNAL",
}
_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}

Logprob = tuple[float, tuple[float, ...]]
"""Of a token, and of its alternatives, likeliest first."""


@dataclass(slots=True)
class Said:
    """One choice. `matched` is the client's own stop that ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str = ""
    matched: str | int | None = None


@dataclass(slots=True)
class Answered:
    """A whole answer."""

    choices: list[Said]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def only(self) -> Said:
        """The only choice."""
        (choice,) = self.choices
        return choice


@dataclass(slots=True)
class Refused:
    """A call that failed. `code` is gRPC's word; `text` what was said before."""

    code: str
    field: str = ""
    text: str = ""


class FourDoors:
    """One router's doors."""

    def __init__(self, grpc_client: Client, http: httpx2.AsyncClient) -> None:
        self._grpc = grpc_client
        self._http = http

    async def ask(self, door: str, **fields: Any) -> Answered | Refused:
        """What comes of a request at one door."""
        match door:
            case "grpc":
                return await self._complete(fields)
            case "grpc stream":
                return await self._generate(fields)
            case "http":
                return await self._post(fields)
        return await self._post_streamed(fields)

    async def ask_all(self, **fields: Any) -> Answered | Refused:
        """What comes of it at every door, which must be the same."""
        first, *others = [await self.ask(door, **fields) for door in DOORS]
        for door, other in zip(DOORS[1:], others, strict=True):
            if isinstance(first, Refused) and isinstance(other, Refused):
                other.text = first.text  # a whole answer that failed has none
            assert other == first, f"{door} says otherwise than {DOORS[0]}: {other} and {first}"
        return first

    # --- gRPC ---------------------------------------------------------------------------------------

    async def _complete(self, fields: dict[str, Any]) -> Answered | Refused:
        message, timeout_seconds = _message(fields)
        try:
            answer = await self._grpc.complete(message, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            return _refused(error)
        return _answered(answer, message)

    async def _generate(self, fields: dict[str, Any]) -> Answered | Refused:
        message, timeout_seconds = _message(fields)
        answer: client.Answer | None = None
        try:
            async for answer in self._grpc.growing(message, timeout_seconds):  # noqa: B007 - the last one is used
                pass
        except grpc.aio.AioRpcError as error:
            return _refused(error, answer.choices[0].text if answer else "")
        assert answer is not None
        assert all(choice.finished is not None for choice in answer.choices), "the stream ended too early"
        return _answered(answer, message)

    # --- HTTP ---------------------------------------------------------------------------------------

    async def _post(self, fields: dict[str, Any]) -> Answered | Refused:
        response = await self._http.post(_path(fields), json=fields | {"return_token_ids": True})
        value = strict(response.text)
        if response.status_code != 200:
            return _failed(value["error"])
        choices = [_choice(choice) for choice in value["choices"]]
        assert [choice["index"] for choice in value["choices"]] == list(range(len(choices)))
        return Answered(choices, value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"])

    async def _post_streamed(self, fields: dict[str, Any]) -> Answered | Refused:
        more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        response = await self._http.post(_path(fields), json=fields | more)
        if response.status_code != 200:
            assert response.headers["content-type"] == "application/json"
            return _failed(strict(response.text)["error"])
        *lines, last, empty = response.text.split("\n\n")
        assert not empty
        events = [strict(line.removeprefix("data: ")) for line in lines]
        if last != "data: [DONE]":
            return _failed(strict(last.removeprefix("data: "))["error"], _joined(events).get(0, Said()).text)
        *events, usage = events
        assert usage["choices"] == []
        joined = _joined(events)
        assert all(choice.reason for choice in joined.values()), "a choice has no end"
        return Answered(
            [joined[index] for index in range(len(joined))],
            usage["usage"]["prompt_tokens"],
            usage["usage"]["completion_tokens"],
        )


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def _message(fields: dict[str, Any]) -> tuple[router_pb2.GenerateRequest, float]:
    fields = dict(fields)
    timeout_seconds = fields.pop("timeout", 60.0)
    message = router_pb2.GenerateRequest()
    match fields.pop("prompt", None):
        case str(text):
            message.text = text
        case list(ids):
            message.token_ids.ids.extend(ids)
    for turn in fields.pop("messages", ()):
        message.chat.messages.add(**turn)
    stop = fields.pop("stop", ())
    message.stop.extend([stop] if isinstance(stop, str) else stop)
    for name, value in fields.items():
        target: Any = message.sampling if name in _OF_SAMPLING else message
        if name == "logit_bias":
            message.sampling.logit_bias.update({int(token): bias for token, bias in value.items()})
        elif name == "choice":
            message.sampling.choice.SetInParent()
            message.sampling.choice.values.extend(value)
        elif isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message, timeout_seconds


def _answered(answer: client.Answer, message: router_pb2.GenerateRequest) -> Answered:
    choices = []
    for choice in answer.choices:
        assert choice.finished is not None
        matched = choice.finished.WhichOneof("matched")
        told: str | int | None = getattr(choice.finished, matched) if matched else None
        if matched == "token_id" and told not in message.sampling.stop_token_ids:
            told = None  # an end of the model's own
        logprobs = [(entry.logprob, tuple(entry.top_logprobs)) for entry in choice.logprobs]
        choices.append(Said(choice.text, choice.token_ids, logprobs, _REASONS[choice.reason], told))
    assert answer.choices[0].finished is not None
    usages = [choice.finished.usage for choice in answer.choices if choice.finished is not None]
    return Answered(choices, usages[0].num_prompt_tokens, sum(usage.num_output_tokens for usage in usages))


def _refused(error: grpc.aio.AioRpcError, text: str = "") -> Refused:
    refusal = from_call(error)
    name = refusal.field.removeprefix("sampling.")
    told = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}
    return Refused(refusal.code.name, told.get(name.partition("[")[0].partition(".")[0], name), text)


def _failed(error: dict[str, Any], text: str = "") -> Refused:
    return Refused(_CODES[error["code"]], (error["param"] or "").partition("[")[0], text)


def _path(fields: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in fields else "/v1/completions"


def _choice(choice: dict[str, Any]) -> Said:
    """A choice, or what one chunk tells of it."""
    content = choice.get("message", choice.get("delta"))
    text = choice["text"] if content is None else content.get("content", "")
    return Said(
        text,
        list(choice.get("token_ids", ())),
        _logprobs(choice["logprobs"]) if choice["logprobs"] else [],
        choice["finish_reason"] or "",
        choice.get("stop_reason"),
    )


def _logprobs(told: dict[str, Any]) -> list[Logprob]:
    if "content" in told:
        return [
            (entry["logprob"], tuple(top["logprob"] for top in entry["top_logprobs"]))
            for entry in told["content"]
        ]
    return [
        (logprob, tuple(top.values()))
        for logprob, top in zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    ]


def _joined(events: list[dict[str, Any]]) -> dict[int, Said]:
    joined: dict[int, Said] = {}
    for event in events:
        for told in event["choices"]:
            so_far, more = joined.setdefault(told["index"], Said()), _choice(told)
            assert not so_far.reason, "something came after the end of a choice"
            so_far.text += more.text
            so_far.token_ids += more.token_ids
            so_far.logprobs += more.logprobs
            so_far.reason, so_far.matched = more.reason, more.matched
    return joined
