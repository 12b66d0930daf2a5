"""What a person may write as an address, and what gRPC is given for it.

Pure: nothing here resolves a name, opens a socket or imports gRPC.
"""

import re
from dataclasses import dataclass

# sockaddr_un holds 108 bytes, the last one is the closing zero. Beyond it the kernel says only "invalid".
MAX_UNIX_PATH_BYTES = 107
_MAX_PORT = 65535
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_FORMS = "an address is HOST:PORT, [IPV6]:PORT, unix:PATH or dns:///NAME:PORT"


class AddressError(ValueError):
    """An address that cannot be used; its text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class Address:
    """One place to listen on or to connect to, known to be well-formed."""

    target: str
    """What gRPC wants: `127.0.0.1:50051`, `unix:/run/x.sock`, `dns:///name:50053`."""

    @classmethod
    def parse(cls, text: str, *, field: str) -> "Address":
        """Reads one address; `field` names it in the error, such as `--listen`.

        Port 0 stands for any free port and makes sense for listening alone.

        Raises:
            AddressError: naming the field, what was given, and what is right.
        """
        text = text.strip()
        if text.startswith("unix:"):
            return cls(f"unix:{_unix_path(text, field)}")
        scheme = "dns:///" if text.startswith("dns:///") else ""
        host, colon, port = text.removeprefix(scheme).rpartition(":")
        if not colon or not (_HOST_NAME.fullmatch(host) or _IPV6.fullmatch(host)):
            raise AddressError(f"{field} is {text!r}: {_FORMS}")
        if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
            raise AddressError(f"{field} is {text!r}: the port must be a number from 0 to {_MAX_PORT}")
        return cls(f"{scheme}{host}:{int(port)}")

    @property
    def unix_path(self) -> str | None:
        """The path of the socket file; None for an address of the network."""
        return self.target.removeprefix("unix:") if self.target.startswith("unix:") else None

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """Host without brackets, and port; None for a Unix socket."""
        if self.unix_path is not None:
            return None
        host, _, port = self.target.removeprefix("dns:///").rpartition(":")
        return host.strip("[]"), int(port)

    def __str__(self) -> str:
        return self.target


def parse_list(text: str, *, field: str) -> list[Address]:
    """Reads addresses parted by commas, in order; at least one, none twice.

    Raises:
        AddressError: naming the field and the piece that is wrong.
    """
    addresses = [Address.parse(piece, field=field) for piece in text.split(",")]
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            raise AddressError(f"{field} is {text!r}: {address} stands there twice")
    return addresses


def parse_groups(text: str, *, field: str) -> list[list[Address]]:
    """Reads groups parted by commas, each of one or several addresses parted by `|`: `A|B,C`.

    Raises:
        AddressError: naming the field and the piece that is wrong; no address may stand there twice.
    """
    parse_list(text.replace("|", ","), field=field)
    return [[Address.parse(piece, field=field) for piece in group.split("|")] for group in text.split(",")]


def _unix_path(text: str, field: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):  # unix:///absolute, the spelling with an empty authority
        path = path.removeprefix("//")
    length = len(path.encode(errors="surrogateescape"))
    if not path or "\0" in path:
        raise AddressError(f"{field} is {text!r}: unix: needs the path of a socket file")
    if length > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"{field} is a socket path of {length} bytes, and the system takes at most "
            f"{MAX_UNIX_PATH_BYTES}: {path}"
        )
    return path
