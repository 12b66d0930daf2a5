"""Whom a door that only this machine can reach answers: who calls it by address, localhost or its name.

A page of another site may give its own host name this machine's address (DNS rebinding). For the browser it
is then of the same site as the door, and only the header Host, which contains that name, can keep it out. If
keys are required, there is no such danger: the page has none. A door in a container cannot see that its port
is published only on this machine: `--http-hosts` tells it.

Pure.
"""

from collections import abc
from ipaddress import ip_address
from urllib.parse import urlsplit

from router.http.errors import HttpError


def is_of_this_machine(host: str) -> bool:
    """Whether it is an address of the loopback, or its name, without a port."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check(headers: abc.Iterable[tuple[bytes, bytes]], names: abc.Collection[str] = ()) -> None:
    """Refuses a request that came under another name than `names`. Raises HttpError, 403."""
    for name, value in headers:
        if name != b"host":
            continue
        host = value.decode("latin-1")
        if not _is_welcome(host, names):
            raise HttpError(
                403,
                "host_not_allowed",
                f"the request is for {host[:64]!r}; this door answers to {', '.join(['localhost', *names])} "
                "and to addresses. A proxy before it must send one of those as Host, or the router's "
                f"--http-hosts name {'this one too' if names else 'this one (or --tenants ask for keys)'}",
            )


def _is_welcome(host: str, names: abc.Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if not name or name in {"localhost", *names} or name.endswith(".localhost"):
            return True
        return bool(ip_address(name))
    except ValueError:
        return False
