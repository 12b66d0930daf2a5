import grpc
from google.rpc import error_details_pb2, status_pb2

from rpc.errors import MAX_MESSAGE_BYTES, RequestError, from_call, invalid, status_of


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


class Call:
    """What a peer raises when a call ends with this refusal."""

    def __init__(self, error: RequestError) -> None:
        self._status = status_of(error)

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> object:
        return self._status.trailing_metadata


def test_a_refusal_is_read_by_the_peer_as_it_was_made() -> None:
    for error in (
        invalid("max_tokens", "max_tokens is 0: it must be at least 1"),
        RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_seconds=1.25),
        RequestError(grpc.StatusCode.UNAVAILABLE, "away"),
    ):
        read = from_call(Call(error))
        assert (read.code, read.message) == (error.code, error.message)
        assert (read.field, read.retry_after_seconds) == (error.field, error.retry_after_seconds)


def test_an_error_that_no_service_of_ours_made_is_read_by_its_code() -> None:
    class Bare(Call):
        def details(self) -> str:
            return ""

        def trailing_metadata(self) -> object:
            return None

    read = from_call(Bare(RequestError(grpc.StatusCode.CANCELLED, "")))
    assert (read.code, read.message) == (grpc.StatusCode.CANCELLED, "CANCELLED")

    class Odd(Call):
        def trailing_metadata(self) -> object:
            return (("grpc-status-details-bin", "no bytes"),)

    assert from_call(Odd(invalid("n", "n is 0"))).field == ""


def test_long_and_odd_text_is_cut_to_what_trailers_carry() -> None:
    for message in ("x" * 5000, "é€😀" * 2000, "\ud800" * 3000):
        sent = status_of(invalid("text", message)).details
        assert len(sent.encode()) <= MAX_MESSAGE_BYTES
        assert sent.endswith("…")
    assert status_of(invalid("text", "lone \udc00 half")).details == "lone ? half"


def test_an_error_reads_as_its_sentence() -> None:
    assert str(invalid("n", "n is 0")) == "n is 0"
