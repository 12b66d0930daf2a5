"""Connections, and the transport rules that both ends must agree on.

Pings. A silent call (a long queue, a long prompt) must neither be taken for dead nor cut for pinging. Our
clients ping every 10 s, with or without calls, and give a peer 5 s to answer: a peer that vanished without
a word is noticed within 15 s. Our servers do the same towards clients, and allow any client to ping as often
as every 5 s; one that pings faster is told "too_many_pings" (UNAVAILABLE), and only its own connection ends.

Headers. A server accepts 16 KiB of them in all, and so does a client; with more, a call gets
RESOURCE_EXHAUSTED.

TLS. If certificates are given (rpc.tls), every network connection is TLS; a Unix socket never is.

Names. `localhost` is called only at 127.0.0.1. If it also meant ::1, and nobody listened there, gRPC would
report that refusal as often as the reason why the other address, where somebody listens, could not be used.
"""

import grpc

from rpc.address import Address
from rpc.tls import Tls

KEEPALIVE_SECONDS = 10
KEEPALIVE_TIMEOUT_SECONDS = 5
MIN_PING_INTERVAL_SECONDS = 5
MAX_RECONNECT_SECONDS = 1
MAX_HEADER_BYTES = 16 * 1024

Options = list[tuple[str, int | str]]


def connect(address: Address, *, max_message_bytes: int, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `address`. It connects at the first call and reconnects by itself, at most 1 s apart."""
    options = _client_options(address, max_message_bytes, tls)
    if tls is None or address.unix_path is not None:
        return grpc.aio.insecure_channel(_target(address), options=options)
    return grpc.aio.secure_channel(_target(address), tls.channel_credentials(), options=options)


def connect_blocking(address: Address, *, max_message_bytes: int, tls: Tls | None = None) -> grpc.Channel:
    """The same for threads, outside any event loop."""
    options = _client_options(address, max_message_bytes, tls)
    if tls is None or address.unix_path is not None:
        return grpc.insecure_channel(_target(address), options=options)
    return grpc.secure_channel(_target(address), tls.channel_credentials(), options=options)


class Line:
    """A long-lived channel: made anew, between two of its streams, when certificate files have changed."""

    def __init__(self, address: Address, *, max_message_bytes: int, tls: Tls | None) -> None:
        self._address = address
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._made_with = tls and tls.current()
        self.channel = self._made()

    async def renew(self) -> bool:
        """Replaces `channel` if the files have changed, and cancels calls on the old one. Whether it did."""
        newest = self._tls and self._tls.current()
        if newest is self._made_with:
            return False
        old, self._made_with, self.channel = self.channel, newest, self._made()
        await old.close(None)
        return True

    async def close(self) -> None:
        """Gives the connection back."""
        await self.channel.close(None)

    def _made(self) -> grpc.aio.Channel:
        return connect(self._address, max_message_bytes=self._max_message_bytes, tls=self._tls)


def _client_options(address: Address, max_message_bytes: int, tls: Tls | None) -> Options:
    options: Options = [
        *_common_options(max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_SECONDS * 1000),
        # Also how long one attempt may take: a black hole costs one second, not twenty.
        ("grpc.min_reconnect_backoff_ms", MAX_RECONNECT_SECONDS * 1000),
        # A restarted container comes back under a new address; the default looks names up every 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", MAX_RECONNECT_SECONDS * 1000),
        # Each channel has its own connection: closing one never touches another's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.unix_path is not None:
        options.append(("grpc.default_authority", "localhost"))  # a path is no legal :authority elsewhere
    elif tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    elif _target(address) != address.target:
        options.append(("grpc.default_authority", "localhost"))  # the name, for certificates
    return options


def _target(address: Address) -> str:
    """Where gRPC is to connect to."""
    match address.host_and_port:
        case ("localhost", port):
            return f"ipv4:127.0.0.1:{port}"
    return address.target


def server_options(*, max_message_bytes: int, max_received_bytes: int | None = None) -> Options:
    """The server's half of the rules above. It may take less in one message than it sends."""
    return [
        *_common_options(max_message_bytes, max_received_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_SECONDS * 1000),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        # With it two processes share one port and each gets half of the calls, in silence.
        ("grpc.so_reuseport", 0),
    ]


def _common_options(max_message_bytes: int, max_received_bytes: int | None = None) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", min(max_message_bytes, max_received_bytes or max_message_bytes)),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # What decides when a ping is not answered; a minute without it, whatever the timeout above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
