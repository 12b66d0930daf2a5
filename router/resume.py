"""Resuming a request whose stream broke: the token that proves whose it is, and what its client has.

A token is made when a request is accepted and can be verified by every router that has the cluster's secret.
It binds tenant, request id, the time of acceptance and the digest of the body, so that nobody can guess the
one of another's request, and a request that differs from the accepted one is told from a forged token. It is
unpadded base64url of

    version (1 byte) | accepted at, milliseconds (6) | head of the body's digest (16) | head of the HMAC (16)

Pure; it must not know streams, logs, proto types. Time is the wall clock's, in seconds: no other clock is
shared by routers.
"""

import base64
import binascii
import hashlib
import hmac
from collections import abc
from dataclasses import dataclass
from typing import Final

import grpc

from rpc.errors import RequestError, invalid

MIN_SECRET_BYTES: Final = 16
_VERSION: Final = b"\x01"
_TIME_BYTES: Final = 6
_DIGEST_BYTES: Final = 16
_MAC_BYTES: Final = 16
_TOKEN_BYTES: Final = 1 + _TIME_BYTES + _DIGEST_BYTES + _MAC_BYTES
_FIELD: Final = "resume.resume_token"


@dataclass(frozen=True, slots=True)
class Resume:
    """A wish to go on, as it was sent: (index, token ids) of each choice of which anything was received."""

    resume_token: str
    received: abc.Sequence[tuple[int, abc.Sequence[int]]]


class ResumeTokens:
    """Makes and verifies tokens with the secret of a cluster."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, tenant: str, request_id: str, body_digest: bytes, now: float) -> str:
        """The token of a request that is taken in now."""
        head = _VERSION + round(now * 1000).to_bytes(_TIME_BYTES) + body_digest[:_DIGEST_BYTES]
        return _encoded(head + self._mac(tenant, request_id, head))

    def accepted_at(self, token: str, tenant: str, request_id: str, body_digest: bytes) -> float:
        """When the request was accepted.

        Raises RequestError: INVALID_ARGUMENT for what is no token, or for another request than the accepted
        one; PERMISSION_DENIED for a token of another request id, tenant or cluster.
        """
        raw = _decoded(token)
        if raw is None or len(raw) != _TOKEN_BYTES or not raw.startswith(_VERSION):
            raise invalid(_FIELD, f"{_FIELD} is no token of this version; send back the one from Accepted")
        head, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, request_id, head)):
            raise RequestError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{_FIELD} was not given by this cluster for request_id {request_id!r}, or not to you; "
                "ask for the request again without it (routers go on with each other's requests when they "
                "share one --cluster-secret-file)",
                field=_FIELD,
            )
        if not hmac.compare_digest(head[-_DIGEST_BYTES:], body_digest[:_DIGEST_BYTES]):
            raise invalid(
                "resume",
                f"the request differs from the one that was accepted as request_id {request_id!r}; a resume "
                "repeats it as it was, with request_id and resume beside it",
            )
        return int.from_bytes(head[1 : 1 + _TIME_BYTES]) / 1000

    def _mac(self, tenant: str, request_id: str, head: bytes) -> bytes:
        named = b"".join(len(name).to_bytes(4) + name for name in (tenant.encode(), request_id.encode()))
        return hmac.digest(self._secret, b"chairlift resume" + named + head, hashlib.sha256)[:_MAC_BYTES]


def checked_received(
    resume: Resume, *, num_choices: int, vocab_size: int, max_tokens: int
) -> list[list[int]]:
    """The ids received of each choice, in order of index; none where nothing was said.

    Raises RequestError, INVALID_ARGUMENT naming the entry.
    """
    received: list[list[int]] = [[] for _ in range(num_choices)]
    seen = set()
    for position, (index, token_ids) in enumerate(resume.received):
        where = f"resume.received[{position}]"
        if index >= num_choices:
            raise invalid(
                f"{where}.index", f"{where}.index is {index}; the request has {num_choices} choices"
            )
        if index in seen:
            raise invalid(f"{where}.index", f"{where}.index is {index}, which an earlier entry has too")
        seen.add(index)
        field = f"{where}.token_ids"
        if len(token_ids) > max_tokens:
            raise invalid(
                field, f"{field} has {len(token_ids)} ids; max_tokens of this request is {max_tokens}"
            )
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
            raise invalid(field, f"{field}[{wrong}] is {token_ids[wrong]}; ids go from 0 to {vocab_size - 1}")
        received[index] = list(token_ids)
    return received


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decoded(token: str) -> bytes | None:
    try:
        return base64.b64decode(
            token.encode("ascii") + b"=" * (-len(token) % 4), altchars=b"-_", validate=True
        )
    except (UnicodeEncodeError, binascii.Error):
        return None
