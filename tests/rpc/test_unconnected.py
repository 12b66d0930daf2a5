import pytest

from rpc.unconnected import NOBODY, explained


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "failed to connect to all addresses; last error: Failed parsing HTTP/2 (Expected SETTINGS frame)",
            "it does not speak gRPC there (is it the port of --http?)",
        ),
        ("DNS resolution failed for lift:50051: Domain name not found", "its host name is not known"),
        (
            "errors resolving lift:50051: [field:hostname lookup error:address lookup failed for lift:50051]",
            "its host name is not known",
        ),
    ],
)
def test_a_wrong_port_and_a_wrong_name_are_told_apart_from_nobody(details: str, told: str) -> None:
    assert explained(details, None) == told


def test_what_is_no_failure_to_connect_is_not_explained() -> None:
    assert explained("the prompt has 600 tokens", None) is None
    assert explained("failed to connect to all addresses; last error: Connection refused", None) == NOBODY
