"""Takes an address to listen on, or says in a sentence why that is not possible.

gRPC reports a failed bind as "failed to bind" and prints a page of its own; so the address is first tried
with a plain socket, which knows the reason.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from rpc.address import Address, AddressError
from rpc.errors import StartError
from rpc.tls import Tls


def bind(
    server: grpc.aio.Server, listen: str, tls: Tls | None = None, *, demand_certificates: bool = False
) -> Address:
    """Binds the server to `listen` and returns the address with the port that was taken.

    A socket file that a dead process left behind is removed; one on which somebody listens is not. With `tls`
    an address of the network is served by TLS alone; its callers show certificates if that is demanded.

    Raises:
        StartError: naming the address and the reason.
    """
    with _explained(listen, "--listen") as address:
        if address.unix_path is not None:
            _try_path(Path(address.unix_path))
        else:
            _try_port(address)
        if tls is None or address.unix_path is not None:
            port = server.add_insecure_port(address.target)
        else:
            credentials = tls.server_credentials(demand_certificates=demand_certificates)
            port = server.add_secure_port(address.target, credentials)
    return _with_port(address, port)


def bound_socket(listen: str, *, field: str) -> tuple[socket.socket, Address]:
    """A listening socket for a server that is not gRPC's, and its address, by the same rules as `bind`.

    `field` names the setting that `listen` comes from.

    Raises:
        StartError: naming the field, the address and the reason.
    """
    with _explained(listen, field) as address, contextlib.ExitStack() as on_failure:
        if address.unix_path is not None:
            _try_path(Path(address.unix_path))
            taken = on_failure.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            taken.bind(address.unix_path)
        else:
            family, kind, protocol, where = _resolved(address)
            taken = on_failure.enter_context(contextlib.closing(socket.socket(family, kind, protocol)))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(where)
        taken.listen()
        taken.setblocking(False)
        on_failure.pop_all()
    port = 0 if address.unix_path is not None else taken.getsockname()[1]
    return taken, _with_port(address, port)


@contextlib.contextmanager
def _explained(listen: str, field: str) -> Iterator[Address]:
    """The address that `listen` spells; what keeps it from being had becomes a StartError."""
    try:
        address = Address.parse(listen, field=field)
    except AddressError as error:
        raise StartError(str(error)) from error
    if address.target.startswith("dns:"):
        raise StartError(f"{field} is {address}: one listens on HOST:PORT or unix:PATH")
    try:
        yield address
    except (OSError, RuntimeError) as error:
        raise StartError(f"{field} is {address}: {_reason(error)}") from error


def _with_port(address: Address, port: int) -> Address:
    if address.unix_path is not None:
        return address
    return Address(f"{address.target.rpartition(':')[0]}:{port}")


def _try_path(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {path.parent} does not exist")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, f"the folder {path.parent} may not be written to") from None
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file of that name that is not a socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another process listens on that socket")


def _try_port(address: Address) -> None:
    family, kind, protocol, where = _resolved(address)
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()  # two sockets may be bound with SO_REUSEADDR; only one may listen


def _resolved(address: Address) -> tuple[socket.AddressFamily, socket.SocketKind, int, Any]:
    """What a socket for this address is made with, and bound to."""
    host, port = address.host_and_port or ("", 0)
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, kind, protocol, where


def _reason(error: OSError | RuntimeError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host name cannot be resolved ({error.strerror})"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.EADDRINUSE and error.strerror == os.strerror(errno.EADDRINUSE):
        return "the port is in use by another process, or another door of this one"
    return (error.strerror or str(error))[:1].lower() + (error.strerror or str(error))[1:]
