import grpc
from google.rpc import error_details_pb2, status_pb2

from rpc.errors import MAX_MESSAGE_BYTES, RequestError, invalid, status_of


def details_of(error: RequestError) -> status_pb2.Status:
    metadata = dict(status_of(error).trailing_metadata)
    return status_pb2.Status.FromString(metadata["grpc-status-details-bin"])


def test_a_refused_field_travels_as_a_bad_request() -> None:
    error = invalid("max_tokens", "max_tokens is 0: it must be at least 1")
    status = details_of(error)
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "max_tokens"
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == bad_request.field_violations[0].description == error.message


def test_a_wait_travels_as_a_retry_info() -> None:
    status = details_of(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=1.25))
    retry_info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry_info)
    assert retry_info.retry_delay.ToMilliseconds() == 1250


def test_a_plain_error_has_no_details() -> None:
    assert not details_of(RequestError(grpc.StatusCode.UNAVAILABLE, "away")).details


def test_long_and_odd_text_is_cut_to_what_trailers_carry() -> None:
    for message in ("x" * 5000, "é€😀" * 2000, "\ud800" * 3000):
        sent = status_of(invalid("text", message)).details
        assert len(sent.encode()) <= MAX_MESSAGE_BYTES
        assert sent.endswith("…")
    assert status_of(invalid("text", "lone \udc00 half")).details == "lone ? half"


def test_an_error_reads_as_its_sentence() -> None:
    assert str(invalid("n", "n is 0")) == "n is 0"
