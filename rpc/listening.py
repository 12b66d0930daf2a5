"""Taking an address to listen on, or saying in a sentence why it cannot be had.

gRPC reports a failed bind as "failed to bind" and prints a page of its own; so the address is tried with a
plain socket first, which knows the reason.
"""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

import grpc

from rpc.address import Address, AddressError
from rpc.errors import StartError


def bind(server: grpc.aio.Server, listen: str) -> Address:
    """Binds the server to `listen` and returns the address with the port that was taken.

    A socket file that a dead process left behind is removed; one on which somebody listens is not.

    Raises:
        StartError: naming the address and the reason.
    """
    try:
        address = Address.parse(listen, field="--listen")
    except AddressError as error:
        raise StartError(str(error)) from error
    if address.target.startswith("dns:"):
        raise StartError(f"--listen is {address}: one listens on HOST:PORT or unix:PATH")
    try:
        if address.unix_path is not None:
            _try_path(Path(address.unix_path))
        else:
            _try_port(address)
        port = server.add_insecure_port(address.target)
    except (OSError, RuntimeError) as error:
        raise StartError(f"--listen is {address}: {_reason(error)}") from error
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
    host, port = address.host_and_port or ("", 0)
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()  # two sockets may be bound with SO_REUSEADDR; only one may listen


def _reason(error: OSError | RuntimeError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host name cannot be resolved ({error.strerror})"
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.EADDRINUSE and error.strerror == os.strerror(errno.EADDRINUSE):
        return "the port is in use by another process"
    return (error.strerror or str(error))[:1].lower() + (error.strerror or str(error))[1:]
