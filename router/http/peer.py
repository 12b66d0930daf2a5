"""Whether the client of a TCP connection is still there, and reads what it is sent, according to the kernel.

The kernel itself pings an idle connection, and ends it. While bytes are on the way it does not; and its means
for that case, TCP_USER_TIMEOUT, mistakes a client that pauses (its window is closed, and it says so when
asked) for one that is gone. So we look every few seconds: if bytes are on the way and none are acknowledged,
the client has vanished; if bytes wait to be sent, it is not reading. Only for Linux; it must not know HTTP.
"""

import socket
import struct
from enum import StrEnum
from typing import Final, NamedTuple

from rpc.channel import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS

# Two silent looks on end, the first perhaps of a moment: as soon as pings of an idle connection are missed.
LOOK_SECONDS: Final = float(KEEPALIVE_TIMEOUT_SECONDS)
_MOST_SILENT_LOOKS: Final = KEEPALIVE_SECONDS // KEEPALIVE_TIMEOUT_SECONDS

# Of struct tcp_info: tcpi_unacked, tcpi_last_ack_recv, tcpi_bytes_acked, tcpi_notsent_bytes.
_INFO: Final = struct.Struct("=24xI28xI60xQ16xI")


class Fault(StrEnum):
    """Why a connection should be ended."""

    VANISHED = "client_vanished"
    STALLED = "client_stalled"


class _Told(NamedTuple):
    """Segments on the way, and how long ago the last word came; bytes ever taken, and not sent yet."""

    num_unacked: int
    silent_ms: int
    num_taken: int
    num_unsent: int


def pinged(listening: socket.socket) -> None:
    """Has its connections, which inherit this, end when they are idle and nobody answers any more."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_TIMEOUT_SECONDS)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)


class Peer:
    """The client of one connection. To be looked at now and then; `now` is seconds on any clock."""

    __slots__ = (
        "_connection",
        "_looked_at",
        "_num_silent_looks",
        "_num_taken",
        "_stall_seconds",
        "_taken_at",
    )

    def __init__(self, connection: socket.socket, *, stall_seconds: float, now: float) -> None:
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._looked_at = self._taken_at = now
        self._num_silent_looks = 0
        self._num_taken = -1

    def fault(self, now: float) -> Fault | None:
        """None when all is well."""
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        told = _Told(*_INFO.unpack(info))
        is_silent = told.num_unacked > 0 and told.silent_ms >= (now - self._looked_at) * 1000
        self._num_silent_looks = self._num_silent_looks + 1 if is_silent else 0
        if told.num_taken != self._num_taken or not (told.num_unacked or told.num_unsent):
            self._num_taken, self._taken_at = told.num_taken, now
        self._looked_at = now
        if self._num_silent_looks >= _MOST_SILENT_LOOKS:
            return Fault.VANISHED
        if now - self._taken_at >= self._stall_seconds:
            return Fault.STALLED
        return None
