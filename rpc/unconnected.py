"""Why no connection was made, in words: gRPC tells it at length, and differently at each try.

Pure: from what gRPC reports to the end of a sentence.
"""

from typing import Final

from rpc.tls import Tls

NOBODY: Final = "nobody answers"
CLOSES: Final = "it closes the connection"
_UNCONNECTED: Final = (
    "failed to connect",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving",
)
_MEANINGS: Final = (
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by a CA we believe (--tls-ca)"),
    (
        "Hostname Verification Check failed",
        "its certificate is for another host (--tls-server-name tells which to expect)",
    ),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("Tls handshake failed", "the TLS handshake failed"),
    ("Failed parsing HTTP/2", "it does not speak gRPC there (is it the port of --http?)"),
    ("DNS resolution failed", "its host name is not known"),
    ("errors resolving", "its host name is not known"),
)


def explained(details: str, tls: Tls | None) -> str | None:
    """Why no connection was made, as the end of a sentence about the other side; None when one was.

    `details` is what gRPC reports: at length, and differently at each try.
    """
    if not any(words in details for words in _UNCONNECTED):
        return None
    for words, meaning in _MEANINGS:
        if words in details:
            return meaning
    if "Socket closed" not in details and "Connection reset" not in details:
        return NOBODY
    if tls is None:
        return f"{CLOSES}: it may speak TLS alone (--tls-ca), or be on its way down"
    if not tls.has_certificate:
        return f"{CLOSES}: it may want a certificate of ours (--tls-cert, --tls-key)"
    return f"{CLOSES}: it may not believe our certificate (--tls-cert), or be on its way down"
