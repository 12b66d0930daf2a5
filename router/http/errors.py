"""Refusals and failures in OpenAI's shape: an HTTP status, and `{"error": {message, type, param, code}}`.

Pure.
"""

import math
from collections import abc
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc

from router.validation import TooLongError
from rpc.errors import RequestError, shortened

_Code = grpc.StatusCode

# HTTP status, OpenAI's type, code. Whatever is not here is a defect of the server.
_ANSWERS: Final[dict[grpc.StatusCode, tuple[int, str, str]]] = {
    _Code.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    _Code.UNIMPLEMENTED: (400, "invalid_request_error", "unsupported"),
    _Code.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    _Code.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    _Code.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    _Code.DEADLINE_EXCEEDED: (408, "timeout_error", "timeout"),
    _Code.ALREADY_EXISTS: (409, "conflict_error", "request_id_in_use"),
    _Code.ABORTED: (409, "conflict_error", "aborted"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    _Code.UNAVAILABLE: (503, "server_error", "unavailable"),
}
_DEFECT: Final = (500, "server_error", "internal_error")
_TOO_LONG: Final = "context_length_exceeded"  # by which programs know that a shorter conversation may fit

# Every status of a failure, and when it is.
STATUSES: Final[dict[int, str]] = {
    400: "A wrong value, or a field that is not supported.",
    401: "Who asks is not known.",
    403: "Who asks may not, or calls the door by another name.",
    404: "Another model, or another path.",
    405: "Another method than the path has.",
    408: "`timeout` is over, or the body took too long.",
    409: "A request of this `request_id` is running.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too much to do; Retry-After says when to try again.",
    431: "Too many headers, or too long ones.",
    500: "It could not be computed.",
    503: "Nobody to compute it, or shutting down.",
}

# Where the contract's name of a field is not the name in a body.
_NAMES_IN_BODIES: Final = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.continue_final_message": "continue_final_message",
    "chat.chat_template_kwargs": "chat_template_kwargs",
}


class HttpError(Exception):
    """What is refused for HTTP's own reasons; `message` is a sentence for the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it goes out."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def answer(
    error: RequestError | HttpError, renamed: abc.Mapping[str, str] = MappingProxyType({})
) -> ErrorAnswer:
    """The error for a client whose body has names of its own: `renamed` maps the contract's to them."""
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"  # noqa: PLR2004 - HTTP's classes
        return ErrorAnswer(error.status, _body(error.message, kind, None, error.code), {})
    status, kind, code = _ANSWERS.get(error.code, _DEFECT)
    if isinstance(error, TooLongError):
        code = _TOO_LONG
    names = {**_NAMES_IN_BODIES, **renamed}
    param = names.get(error.field, error.field.removeprefix("sampling."))
    message = error.message
    if error.field and message.startswith(error.field):
        message = param + message.removeprefix(error.field)
    headers = {"www-authenticate": "Bearer"} if error.code is _Code.UNAUTHENTICATED else {}
    if error.code is _Code.DEADLINE_EXCEEDED:  # OpenAI's clients ask again by themselves after a 408
        headers["x-should-retry"] = "false"
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
        headers["retry-after-ms"] = str(round(error.retry_after_seconds * 1000))
    return ErrorAnswer(status, _body(message, kind, param or None, code), headers)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}
