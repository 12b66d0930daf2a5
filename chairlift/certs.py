"""`chairlift certs DIR`: makes a CA and certificates signed by it, to try TLS on every hop.

One CA, a certificate for each tier and one for clients. Tiers are servers and callers, so theirs serve as
both; the client's is a caller's alone. A tier's certificate names the hosts it is usually found under: its
own name (as in docker-compose.yml), localhost and the loopback addresses, and what --host adds.
"""

import datetime as dt
import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.parser import Parser
from rpc.errors import StartError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

TIERS = ("router", "scheduler", "executor")
_HOSTS = ("localhost", "127.0.0.1", "::1")
_DEFAULT_DAYS = 365
_MAX_DAYS = 3650
_CLOCKS_DIFFER = dt.timedelta(minutes=5)


def main(argv: list[str]) -> int:
    """Writes the files; returns the exit code."""
    parser = Parser(
        prog="chairlift certs",
        description="Makes a CA and certificates of it, to try TLS with. Who has ca.key can make more of "
        "them: for a service that matters, let your own CA make them.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to; it is made if need be")
    parser.add_argument(
        "--host", action="append", default=[], help="one more name or address of the tiers; may be repeated"
    )
    parser.add_argument(
        "--days", type=int, default=_DEFAULT_DAYS, help="how long they are valid (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    options = parser.parse_args(argv)
    try:
        written = write(options.folder, hosts=options.host, days=options.days, force=options.force)
    except StartError as error:
        print(f"chairlift certs: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    ca = f"--tls-ca {options.folder}/ca.crt"
    for word, name in (("serve", "router"), ("ask", "client")):
        pair = f"--tls-cert {options.folder}/{name}.crt --tls-key {options.folder}/{name}.key"
        print(f"{word} with  {ca} {pair}")
    return 0


def write(
    folder: Path, *, hosts: Iterable[str] = (), days: int = _DEFAULT_DAYS, force: bool = False
) -> list[Path]:
    """Makes NAME.crt and NAME.key for the CA, each tier and the client; keys are for their owner alone.

    Raises:
        StartError: the library is not there, a file is, or a value is wrong.
    """
    try:
        from cryptography import x509  # noqa: F401 - whether it is there
    except ImportError as error:
        raise StartError(
            "it needs a library that is not installed (cryptography); "
            "`pip install 'chairlift[certs]'` brings it"
        ) from error
    if not 1 <= days <= _MAX_DAYS:
        raise StartError(f"--days is {days}: it must be from 1 to {_MAX_DAYS}")
    names = ("ca", *TIERS, "client")
    paths = [folder / f"{name}.{kind}" for name in names for kind in ("crt", "key")]
    present = [path for path in paths if path.exists()]
    if present and not force:
        raise StartError(f"{present[0]} is there already; --force overwrites it, and all the others")
    made = _made(tuple(hosts), days)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, made, strict=True):
            _put(path, content, private=path.suffix == ".key")
    except OSError as error:
        raise StartError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return paths


def _made(hosts: tuple[str, ...], days: int) -> list[bytes]:
    """Certificate and key, in PEM form, of the CA, each tier and the client."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    server, caller = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _signed("chairlift development CA", ca_key, None, ca_key, days)
    pairs = [(ca, ca_key)]
    for tier in TIERS:
        key = ec.generate_private_key(ec.SECP256R1())
        names = (tier, *_HOSTS, *hosts)
        pairs.append((_signed(tier, key, ca, ca_key, days, names, (server, caller)), key))
    key = ec.generate_private_key(ec.SECP256R1())
    pairs.append((_signed("client", key, ca, ca_key, days, (), (caller,)), key))
    form = serialization.Encoding.PEM
    contents = []
    for certificate, key in pairs:
        contents.append(certificate.public_bytes(form))
        contents.append(
            key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
    return contents


def _signed(
    name: str,
    key: "ec.EllipticCurvePrivateKey",
    issuer: "x509.Certificate | None",
    issuer_key: "ec.EllipticCurvePrivateKey",
    days: int,
    hosts: Iterable[str] = (),
    uses: "Iterable[x509.ObjectIdentifier]" = (),
) -> "x509.Certificate":
    """A certificate for `key`; of the issuer, or of itself when there is none: then it is a CA's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    now = dt.datetime.now(dt.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    is_ca = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .add_extension(_key_usage(is_ca=is_ca), critical=True)
    )
    names = [_general_name(host) for host in dict.fromkeys(hosts)]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if not is_ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _key_usage(*, is_ca: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> "x509.GeneralName":
    """An address as an address, anything else as a name. Raises StartError."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise StartError(f"--host is {host!r}: it must be a host name or an IP address") from error


def _put(path: Path, content: bytes, *, private: bool) -> None:
    """Writes a file whole or not at all, readable from its first byte on by whom it is for."""
    half = path.with_name(path.name + ".part")
    half.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(half, flags, 0o600 if private else 0o644), "wb") as file:
        file.write(content)
    half.replace(path)
