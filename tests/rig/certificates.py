"""Certificates for tests, good ones and bad ones, as files."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rpc.tls import TlsFiles

_PEM = serialization.Encoding.PEM
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as they would be given to a service."""

    cert: Path
    key: Path

    def files(self, ca: Path | None, *, server_name: str = "") -> TlsFiles:
        return TlsFiles(str(self.cert), str(self.key), "" if ca is None else str(ca), server_name)

    def flags(self, ca: Path) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(ca))


class Authority:
    """A CA whose files lie in a folder under its name."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _signed(name, self._key, name, self._key, (), 0, 30, is_ca=True)
        self.cert = folder / f"{name}.crt"
        self.cert.write_bytes(self._certificate.public_bytes(_PEM))

    def issue(
        self, name: str, hosts: tuple[str, ...] = LOOPBACK, *, from_day: int = -40, days: int = 80
    ) -> Pair:
        """Valid from `from_day` (0 is today) for so many days. Files of that name are overwritten."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(name, key, self._name, self._key, hosts, from_day, days, is_ca=False)
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.cert.write_bytes(certificate.public_bytes(_PEM))
        pair.key.write_bytes(
            key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return pair


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: tuple[str, ...],
    from_day: int,
    days: int,
    *,
    is_ca: bool,
) -> x509.Certificate:
    start = dt.datetime.now(dt.UTC) + dt.timedelta(days=from_day, minutes=-5)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )
    if hosts:
        names = [_general_name(host) for host in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
