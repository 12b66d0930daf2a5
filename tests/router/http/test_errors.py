import grpc
import pytest

from router.http.errors import HttpError, answer
from rpc.errors import MAX_MESSAGE_BYTES, RequestError, invalid

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.INVALID_ARGUMENT, 400),
        (Code.UNIMPLEMENTED, 400),
        (Code.UNAUTHENTICATED, 401),
        (Code.PERMISSION_DENIED, 403),
        (Code.NOT_FOUND, 404),
        (Code.DEADLINE_EXCEEDED, 408),
        (Code.ALREADY_EXISTS, 409),
        (Code.RESOURCE_EXHAUSTED, 429),
        (Code.INTERNAL, 500),
        (Code.UNAVAILABLE, 503),
    ],
)
def test_each_status_of_grpc_has_one_of_http(code: grpc.StatusCode, status: int) -> None:
    told = answer(RequestError(code, "why"))
    assert told.status == status
    assert set(told.body["error"]) == {"message", "type", "param", "code"}
    assert told.body["error"]["message"] == "why"


@pytest.mark.parametrize(
    ("field", "param"),
    [("sampling.top_p", "top_p"), ("text", "prompt"), ("chat.messages", "messages"), ("stop", "stop")],
)
def test_a_field_goes_by_its_name_in_the_body(field: str, param: str) -> None:
    error = answer(invalid(field, f"{field} is wrong")).body["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is wrong")


def test_b94_when_to_try_again_is_told_in_whole_seconds_and_exactly() -> None:
    told = answer(RequestError(Code.RESOURCE_EXHAUSTED, "full", retry_after_seconds=1.25))
    assert told.headers == {"retry-after": "2", "retry-after-ms": "1250"}


def test_openais_clients_do_not_ask_again_when_the_time_they_gave_is_over() -> None:
    assert answer(RequestError(Code.DEADLINE_EXCEEDED, "late")).headers == {"x-should-retry": "false"}


def test_https_own_refusals_keep_their_status() -> None:
    assert answer(HttpError(413, "body_too_large", "too long")).status == 413


@pytest.mark.parametrize(
    "error", [invalid("stop", "x" * 100_000), HttpError(404, "not_found", "é" * 100_000)]
)
def test_b93_no_message_is_as_long_as_what_a_client_sent(error: RequestError | HttpError) -> None:
    message = answer(error).body["error"]["message"]
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert message.endswith(" …")
