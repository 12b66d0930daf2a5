import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from chairlift.certs import TIERS, main
from rpc.tls import Tls, TlsFiles


def test_what_it_makes_can_be_used_and_keys_are_for_their_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert main([str(folder), "--host", "chat.example.org", "--host", "192.0.2.7"]) == 0
    told = capsys.readouterr().out
    assert f"--tls-ca {folder}/ca.crt --tls-cert {folder}/router.crt --tls-key {folder}/router.key" in told
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in ("ca", *TIERS, "client") for kind in ("crt", "key")
    }
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.suffix == ".key" else 0o644)
    for name in (*TIERS, "client"):
        Tls(TlsFiles(f"{folder}/{name}.crt", f"{folder}/{name}.key", f"{folder}/ca.crt"))
    names = x509.load_pem_x509_certificate((folder / "router.crt").read_bytes()).extensions
    alternative = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == ["router", "localhost", "chat.example.org"]
    assert [str(ip) for ip in alternative.get_values_for_type(x509.IPAddress)] == [
        *("127.0.0.1", "::1", "192.0.2.7")
    ]
    client = x509.load_pem_x509_certificate((folder / "client.crt").read_bytes()).extensions
    uses = client.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    ssl.create_default_context(cafile=str(folder / "ca.crt"))


def test_nothing_is_overwritten_unless_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "client.key").write_text("precious")
    assert main([str(tmp_path)]) == 1
    assert "client.key is there already; --force overwrites it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["client.key"]
    assert main([str(tmp_path), "--force"]) == 0
    assert "BEGIN PRIVATE KEY" in (tmp_path / "client.key").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--days", "0"], "--days is 0: it must be from 1 to 3650"),
        (
            ["--host", "münchen.example"],
            "--host is 'münchen.example': it must be a host name or an IP address",
        ),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert main([str(tmp_path), *flags]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
