"""Everything that can be wrong between two sides of one hop, and a server to try it with."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from rpc.address import Address
from rpc.health import Health
from rpc.listening import bind
from rpc.tls import Tls, TlsFiles
from tests.rig.certificates import Authority

MAX_MESSAGE_BYTES = 1024 * 1024


@contextlib.asynccontextmanager
async def serving(
    certificates: Tls | None, listen: str = "127.0.0.1:0", *, demand: bool = True
) -> AsyncIterator[Address]:
    server = grpc.aio.server()
    await Health([]).register(server)
    address = bind(server, listen, certificates, demand_certificates=demand)
    try:
        await server.start()
        yield address
    finally:
        await server.stop(0)


# Given a CA and a folder: the server's certificates, the client's, and what the client is told.
REFUSALS: dict[str, Callable[[Authority, Path], tuple[Tls | None, Tls | None, str]]] = {
    "wrong CA": lambda ca, folder: (
        Tls(Authority(folder, "other").issue("server").files(ca.cert)),
        Tls(ca.issue("client").files(ca.cert)),
        "its certificate is not signed by a CA we believe",
    ),
    "expired": lambda ca, folder: (
        Tls(ca.issue("server", days=30).files(ca.cert)),
        Tls(ca.issue("client").files(ca.cert)),
        "its certificate has expired",
    ),
    "not valid yet": lambda ca, folder: (
        Tls(ca.issue("server", from_day=3).files(ca.cert)),
        Tls(ca.issue("client").files(ca.cert)),
        "its certificate is not valid yet",
    ),
    "wrong host": lambda ca, folder: (
        Tls(ca.issue("server", ("elsewhere",)).files(ca.cert)),
        Tls(ca.issue("client").files(ca.cert)),
        "its certificate is for another host",
    ),
    "no client certificate": lambda ca, folder: (
        Tls(ca.issue("server").files(ca.cert)),
        Tls(TlsFiles(ca=str(ca.cert))),
        "it may want a certificate of ours",
    ),
    "client certificate of another CA": lambda ca, folder: (
        Tls(ca.issue("server").files(ca.cert)),
        Tls(Authority(folder, "other").issue("client").files(ca.cert)),
        "it may not believe our certificate",
    ),
    "expired client certificate": lambda ca, folder: (
        Tls(ca.issue("server").files(ca.cert)),
        Tls(ca.issue("client", days=30).files(ca.cert)),
        "it may not believe our certificate",
    ),
    "plain text on a TLS port": lambda ca, folder: (
        Tls(ca.issue("server").files(ca.cert)),
        None,
        "it may speak TLS alone",
    ),
    "TLS on a plain port": lambda ca, folder: (
        None,
        Tls(ca.issue("client").files(ca.cert)),
        "it does not speak TLS",
    ),
}

# The server itself is in order, and serves others as before.
HARMLESS = {
    "no client certificate",
    "client certificate of another CA",
    "expired client certificate",
    "plain text on a TLS port",
}
