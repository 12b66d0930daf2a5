"""Resume tokens: whose they are, and what they say of the request."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.resume import Resume, ResumeTokens, checked_received
from rpc.errors import RequestError

DIGEST, OTHER_DIGEST = bytes(range(32)), bytes(32)
TOKENS = ResumeTokens(b"a secret of sixteen bytes or more")


def refusal(token: str, *, tenant: str = "t", request_id: str = "r", digest: bytes = DIGEST) -> RequestError:
    with pytest.raises(RequestError) as raised:
        TOKENS.accepted_at(token, tenant, request_id, digest)
    return raised.value


def test_any_router_with_the_secret_reads_when_the_request_was_accepted() -> None:
    token = TOKENS.issue("t", "r", DIGEST, 1_790_000_000.25)
    again = ResumeTokens(b"a secret of sixteen bytes or more")
    assert again.accepted_at(token, "t", "r", DIGEST) == 1_790_000_000.25
    assert token.isascii()
    assert len(token) < 60


def test_a_token_is_of_one_request_one_tenant_one_body_one_cluster() -> None:
    token = TOKENS.issue("t", "r", DIGEST, 5.0)
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert refusal(token, tenant="u").code is denied
    assert refusal(token, request_id="s").code is denied
    assert refusal(ResumeTokens(b"another secret, as long").issue("t", "r", DIGEST, 5.0)).code is denied
    assert "differs from the one that was accepted" in refusal(token, digest=OTHER_DIGEST).message
    # What tenant and id are made of cannot be moved between them.
    assert refusal(TOKENS.issue("tr", "", DIGEST, 5.0)).code is denied


@given(st.data())
def test_a_token_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    token = TOKENS.issue("t", "r", DIGEST, 5.0)
    position = data.draw(st.integers(0, len(token) - 2))  # the last letter has two bits that say nothing
    letter = data.draw(st.sampled_from("ABCxyz019-_").filter(lambda letter: letter != token[position]))
    assert refusal(token[:position] + letter + token[position + 1 :])


@given(st.text())
def test_any_text_is_a_token_or_refused(text: str) -> None:
    assert refusal(text).field == "resume.resume_token"


def test_what_was_received_is_put_in_order_of_the_choices() -> None:
    resume = Resume("t", [(2, [0, 9]), (0, [])])
    assert checked_received(resume, num_choices=3, vocab_size=10, max_tokens=2) == [[], [], [0, 9]]


@pytest.mark.parametrize(
    ("received", "field", "says"),
    [
        ([(0, [1]), (3, [5])], "resume.received[1].index", "is 3; the request has 3 choices"),
        ([(1, [1]), (1, [1])], "resume.received[1].index", "is 1, which an earlier entry has too"),
        ([(0, [1] * 5)], "resume.received[0].token_ids", "has 5 ids; max_tokens of this request is 4"),
        ([(2, [9, 0, 10])], "resume.received[0].token_ids", "[2] is 10; ids go from 0 to 9"),
        ([(2, [9, 0, -1])], "resume.received[0].token_ids", "[2] is -1; ids go from 0 to 9"),
    ],
)
def test_what_cannot_have_been_received_is_refused_by_its_place(
    received: list[tuple[int, list[int]]], field: str, says: str
) -> None:
    with pytest.raises(RequestError) as raised:
        checked_received(Resume("t", received), num_choices=3, vocab_size=10, max_tokens=4)
    assert (raised.value.code, raised.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert f"{field}{'' if says.startswith('[') else ' '}{says}" in raised.value.message
