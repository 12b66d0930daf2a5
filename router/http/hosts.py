"""Whom a door on this machine alone answers: those who call it by an address, or as localhost.

A page of another site may give its own name this machine's address (DNS rebinding), and is then, for the
browser, of the same site as the door: no header keeps it out but Host, which bears its name. Where keys are
wanted the page has none.

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


def check(headers: abc.Iterable[tuple[bytes, bytes]]) -> None:
    """Refuses a request that came under another name. Raises HttpError, 403."""
    for name, value in headers:
        if name != b"host":
            continue
        host = value.decode("latin-1")
        if not _is_no_name(host):
            raise HttpError(
                403,
                "host_not_allowed",
                f"the request is for {host[:64]!r}; a door on this machine alone, without keys, answers to "
                "localhost and to addresses. A proxy before it must send one of those as Host, or give the "
                "router --tenants",
            )


def _is_no_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return not name or name == "localhost" or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False
