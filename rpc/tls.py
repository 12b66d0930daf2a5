"""TLS by one group of flags: who shows which certificate to whom, with files that may change while we run.

The rules, for every hop (docs/security.md):
  - `--tls-cert` with `--tls-key` is what a process shows: to its callers, and to those it calls.
  - `--tls-ca` is the authority that it trusts. With it, a server lets in only callers whose certificate this
    authority signed, and a caller speaks only to servers whose certificate it signed. A caller without it
    trusts the well-known authorities.
  - A caller expects the host of the address in the server's certificate, or `--tls-server-name`.
  - A Unix socket is never wrapped: the kernel keeps strangers out.

The files are checked at each new connection. If they cannot be used, this is logged and the present
certificates stay in use: a rotation is not atomic, and half of one must not stop a service. A file that
cannot be read now is tried again at the next connection. It must not know: services, contracts.
"""

import argparse
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from rpc.errors import StartError

_PREFIX: Final = "CHAIRLIFT_"  # as in rpc.settings, which is slow to load for a probe
_log = structlog.get_logger()

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths as they were given; empty is absent. `server_name` is what callers expect instead of the host."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """The contents of the files at one time, PEM; None is absent."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    stamp: Stamp


class _UnreadableError(StartError):
    """A file whose contents nobody has seen: they may be good."""


class Tls:
    """The certificates of one process, read and checked, and read again when their files change."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises StartError naming the flag, the file and what is wrong with it."""
        if bool(files.cert) != bool(files.key):
            given, missing = ("--tls-cert", "--tls-key") if files.cert else ("--tls-key", "--tls-cert")
            raise StartError(
                f"{given} is given without {missing}: a certificate is of use with its key alone"
            )
        self._files = files
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._loaded = _load(files)
        self._refused: Stamp | None = None
        self._told: object = None

    @property
    def server_name(self) -> str:
        """The name expected of servers; empty: the host of their address."""
        return self._files.server_name

    @property
    def has_certificate(self) -> bool:
        """Whether there is one to show."""
        return bool(self._files.cert)

    def current(self) -> object:
        """The newest usable contents of the files; the same object for as long as nothing changed."""
        return self._current()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel, which keeps them: a channel that is to use newer files has to be made anew."""
        loaded = self._current()
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def server_credentials(self, *, demand_certificates: bool) -> grpc.ServerCredentials:
        """For a gRPC server, for its whole life. Callers must show a certificate when that is demanded."""
        offered = self._current()

        def configuration(loaded: _Loaded) -> Any:
            trusted = loaded.ca if demand_certificates else None
            assert loaded.key is not None, "a server has a certificate"
            assert loaded.cert is not None, "likewise"
            return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], trusted)

        def newer() -> Any:  # called with each new connection
            nonlocal offered
            loaded = self._current()
            if loaded is offered:
                return None
            offered = loaded
            return configuration(loaded)

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            configuration(offered), newer, demand_certificates
        )
        return credentials

    def server_context(self, *, demand_certificates: bool) -> ssl.SSLContext:
        """For any other server of this process, for its whole life."""
        offered = self._current()

        def context() -> ssl.SSLContext:
            made = _context(self._files, ca=demand_certificates)
            made.sslobject_class = _ToldHandshake
            made.verify_mode = ssl.CERT_REQUIRED if demand_certificates else ssl.CERT_NONE
            return made

        newest = entrance = context()

        def exchange(connection: ssl.SSLObject, _name: str | None, _entrance: ssl.SSLContext) -> None:
            nonlocal offered, newest
            loaded = self._current()
            if loaded is not offered:
                try:
                    newest, offered = context(), loaded
                except (OSError, StartError) as error:  # they changed again, this very moment
                    _log.warning("certificates_kept", reason=str(error))
            connection.context = newest

        entrance.sni_callback = exchange  # comes with each handshake, whether a name was sent or not
        return entrance

    def _current(self) -> _Loaded:
        with self._lock:
            stamp = _stamp(self._files)
            if stamp not in (self._loaded.stamp, self._refused):
                try:
                    self._loaded = _load(self._files)
                except StartError as error:
                    if not isinstance(error, _UnreadableError):
                        self._refused = stamp
                    if self._told != (stamp, str(error)):
                        _log.warning("certificates_kept", reason=str(error))
                    self._told = (stamp, str(error))
                else:
                    _log.info("certificates_read")
            return self._loaded


class _ToldHandshake(ssl.SSLObject):
    """A connection whose failed handshake is a line in the log: asyncio would drop it without a word."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            _log.warning("tls_refused", reason=error.reason or str(error))
            raise


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a caller, for commands; files may be given by environment variables too.

    The name may not: in the environment of a service it is that of whom the service calls, and the probe
    beside it calls the service.
    """

    def add(flag: str, sentence: str) -> None:
        variable = _PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        parser.add_argument(flag, default=os.environ.get(variable, ""), help=f"{sentence} ({variable})")

    add("--tls-ca", "file: speak TLS, and believe whom this CA signed")
    add("--tls-cert", "file: the certificate to show")
    add("--tls-key", "file: its key")
    parser.add_argument(
        "--tls-server-name",
        default="",
        help="the name expected in the server's certificate, in place of the address's",
    )


def from_flags(options: argparse.Namespace) -> Tls | None:
    """What the flags of `add_flags` say; None without any. Raises StartError."""
    return of_caller(TlsFiles(options.tls_cert, options.tls_key, options.tls_ca, options.tls_server_name))


def of_caller(files: TlsFiles) -> Tls | None:
    """What a caller speaks by; None for plain text. Raises StartError."""
    if files.server_name and not files:
        raise StartError(
            "--tls-server-name is given without --tls-ca: no TLS is spoken, no certificate looked at"
        )
    return Tls(files) if files else None


def given_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Which flags of `add_flags` say something that the environment does not."""
    names = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    given = [name for name in names if getattr(options, name) != parser.get_default(name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def _load(files: TlsFiles) -> _Loaded:
    """Reads and checks all of them. Raises StartError."""
    stamp = _stamp(files)
    cert, key, ca = (
        _read("--tls-cert", files.cert),
        _read("--tls-key", files.key),
        _read("--tls-ca", files.ca),
    )
    _context(files, ca=True)
    return _Loaded(cert, key, ca, stamp)


def _read(flag: str, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise _UnreadableError(f"{flag} is {path}: {(error.strerror or str(error)).lower()}") from error


def _context(files: TlsFiles, *, ca: bool) -> ssl.SSLContext:
    """A server's context of the files. Raises StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if files.cert:
            # An empty password: without one, an encrypted key would ask for it on the terminal.
            context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            reason = f"the key in --tls-key ({files.key}) is not that of the certificate"
        else:
            reason = f"it and the key in --tls-key ({files.key}) cannot be read as an unencrypted PEM pair"
        raise StartError(f"--tls-cert is {files.cert}: {reason}") from error
    except OSError as error:
        raise _UnreadableError(f"--tls-cert is {files.cert}: {error.strerror}") from error
    try:
        if files.ca and ca:
            context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise StartError(f"--tls-ca is {files.ca}: it holds no certificates in PEM form") from error
    except OSError as error:
        raise _UnreadableError(f"--tls-ca is {files.ca}: {error.strerror}") from error
    return context


def _stamp(files: TlsFiles) -> Stamp:
    """What changes when a file does."""
    stamps = []
    for path in filter(None, (files.cert, files.key, files.ca)):
        try:
            status = os.stat(path)  # noqa: PTH116 - a few of them with each connection
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
