"""What goes wrong, as sentences: a request that is refused, and a process that cannot start.

The one place where a refusal becomes a gRPC status. Details follow google.rpc, so that any client can
read the field (BadRequest) and the time to wait (RetryInfo) without parsing the sentence.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

# A status travels in HTTP/2 trailers, which peers cut off at 8 KiB in all; text there is percent-encoded
# (three bytes for one) and stands in the details once more.
MAX_MESSAGE_BYTES = 1024
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(eq=False)
class RequestError(Exception):
    """A request that is refused or fails; `message` is a sentence for the client.

    `field` names the request's field in lower snake case, when one is to blame; `retry_after_seconds` says
    when trying again makes sense.
    """

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after_seconds: float | None = None

    def __str__(self) -> str:
        return self.message


class StartError(Exception):
    """The process cannot start; the text is one line for people."""


def invalid(field: str, message: str) -> RequestError:
    """The refusal of one field's value."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)


def status_of(error: RequestError) -> grpc.Status:
    """The gRPC status of a refusal, with google.rpc details."""
    message = shortened(error.message)
    status = status_pb2.Status(code=error.code.value[0], message=message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def shortened(message: str) -> str:
    """What of a message goes out: whatever a client sent may stand in it."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 4].decode(errors="ignore") + " …"


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: RequestError) -> NoReturn:
    """Ends the call with the refusal. Never returns: it raises what gRPC wants raised."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


def from_call(error: Any) -> RequestError:
    """What a peer answered, as the refusal it was made from (the other direction of `abort`).

    `error` is what a call raised: a grpc.aio.AioRpcError, or outside of event loops a grpc.RpcError, which
    has the same methods though its type does not say so.
    """
    result = RequestError(error.code(), error.details() or error.code().name)
    raw = dict(error.trailing_metadata() or ()).get(_DETAILS_KEY)
    if not isinstance(raw, bytes):
        return result
    for detail in status_pb2.Status.FromString(raw).details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            result.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry_info):
            result.retry_after_seconds = retry_info.retry_delay.ToMilliseconds() / 1000
    return result


def _attach(
    status: status_pb2.Status, detail: error_details_pb2.BadRequest | error_details_pb2.RetryInfo
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
