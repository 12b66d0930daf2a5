"""TLS on one hop, in one process: who is let in, who is refused and in which words, and files that change."""

import argparse
import asyncio
import os
import shutil
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import tls
from rpc.address import Address
from rpc.channel import Line, connect, connect_blocking
from rpc.errors import StartError
from rpc.tls import Tls, TlsFiles
from rpc.unconnected import explained
from tests.rig import descriptors
from tests.rig.certificates import Authority
from tests.rig.tls_faults import HARMLESS, MAX_MESSAGE_BYTES, REFUSALS, serving


async def ask(address: Address, certificates: Tls | None) -> str:
    """Empty when the call went through; else how it is explained."""
    async with connect(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=certificates) as channel:
        return await ask_over(channel, certificates)


async def ask_over(channel: grpc.aio.Channel, certificates: Tls | None = None) -> str:
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    except grpc.aio.AioRpcError as error:
        return explained(error.details() or "", certificates) or f"{error.code().name} {error.details()}"
    return ""


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_both_sides_show_certificates_of_one_ca(ca: Authority) -> None:
    ours = Tls(ca.issue("server").files(ca.cert))
    async with serving(ours) as address:
        assert await ask(address, Tls(ca.issue("client").files(ca.cert))) == ""
        assert await ask(address, ours) == ""
        with connect_blocking(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=ours) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await asyncio.to_thread(check, health_pb2.HealthCheckRequest(), timeout=20)


async def test_a_server_that_demands_no_certificates_lets_in_who_believes_it(ca: Authority) -> None:
    async with serving(Tls(ca.issue("server").files(None)), demand=False) as address:
        assert await ask(address, Tls(TlsFiles(ca=str(ca.cert)))) == ""


@pytest.mark.parametrize("case", REFUSALS)
async def test_localhost_that_is_two_addresses_hides_no_reason(
    case: str, ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    monkeypatch.setenv("CARES_HOSTS", str(hosts))  # where gRPC's resolver looks
    server, client, why = REFUSALS[case](ca, tmp_path)
    async with serving(server, demand=True) as address:
        _, port = address.host_and_port or ("", 0)
        here = Address.parse(f"localhost:{port}", field="")
        async with connect(here, max_message_bytes=MAX_MESSAGE_BYTES, tls=client) as channel:
            for _ in range(3):
                assert why in await ask_over(channel, client)
                await asyncio.sleep(0.1)  # the channel tries again meanwhile


async def test_localhost_is_the_name_in_its_certificate(ca: Authority) -> None:
    client = Tls(TlsFiles(ca=str(ca.cert)))
    async with serving(Tls(ca.issue("server", ("localhost",)).files(None)), demand=False) as address:
        _, port = address.host_and_port or ("", 0)
        for name in ("localhost", "dns:///localhost"):
            assert await ask(Address.parse(f"{name}:{port}", field=""), client) == ""
        assert "for another host" in await ask(address, client)


async def test_the_name_expected_may_be_told(ca: Authority) -> None:
    async with serving(Tls(ca.issue("server", ("executor",)).files(ca.cert))) as address:
        mine = ca.issue("client")
        assert "for another host (--tls-server-name" in await ask(address, Tls(mine.files(ca.cert)))
        assert await ask(address, Tls(mine.files(ca.cert, server_name="executor"))) == ""


async def test_a_unix_socket_is_never_wrapped(ca: Authority, tmp_path: Path) -> None:
    ours = Tls(ca.issue("server").files(ca.cert))
    async with serving(ours, f"unix:{tmp_path}/s.sock") as address:
        assert await ask(address, ours) == ""
        assert await ask(address, None) == ""


@pytest.mark.parametrize("case", REFUSALS)
async def test_who_does_not_fit_is_refused_and_told_why(case: str, ca: Authority, tmp_path: Path) -> None:
    server, client, why = REFUSALS[case](ca, tmp_path)
    async with serving(server, demand=True) as address:
        assert why in await ask(address, client)
        if case in HARMLESS:
            assert await ask(address, Tls(ca.issue("good").files(ca.cert))) == ""


# --- files that change --------------------------------------------------------------------------------


async def test_a_new_certificate_and_a_new_ca_are_used_for_new_connections(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    ca = tmp_path / "ca.crt"
    shutil.copy(old.cert, ca)
    mine = old.issue("server").files(ca)
    client_of_old = Tls(old.issue("client-of-old").files(old.cert))
    client_of_new = Tls(new.issue("client-of-new").files(new.cert))
    async with (
        serving(Tls(mine)) as address,
        connect(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=client_of_old) as kept,
    ):
        assert await ask_over(kept) == ""
        assert await ask(address, client_of_new) != ""
        new.issue("server")  # over the old one's files
        shutil.copy(new.cert, ca)
        assert await ask(address, client_of_new) == ""
        assert await ask(address, client_of_old) != ""
        assert await ask_over(kept) == ""  # a connection that is there stays


async def test_half_a_rotation_keeps_what_was_there(
    ca: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ca.issue("server")
    client = Tls(ca.issue("client").files(ca.cert))
    async with serving(Tls(pair.files(ca.cert))) as address:
        whole = pair.key.read_bytes()
        pair.key.write_bytes(whole[: len(whole) // 2])
        assert await ask(address, client) == ""
        assert await ask(address, client) == ""
        told = capsys.readouterr().out
        assert told.count("certificates_kept") == 1  # once for each state of the files
        pair.key.unlink()
        assert await ask(address, client) == ""
        pair.key.write_bytes(whole)
        assert await ask(address, client) == ""


def test_files_that_cannot_be_read_now_are_read_as_soon_as_they_can(
    ca: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates = Tls(ca.issue("server").files(ca.cert))
    before = certificates.current()
    ca.issue("server")
    with descriptors.none_left():
        assert certificates.current() is before
        assert certificates.current() is before
    assert certificates.current() is not before
    told = capsys.readouterr().out
    assert told.count("certificates_kept") == 1
    assert told.count("certificates_read") == 1


async def test_a_line_is_made_anew_when_its_files_have_changed(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    mine = old.issue("client")
    async with serving(Tls(new.issue("server").files(new.cert))) as address:
        ca = tmp_path / "ca.crt"
        shutil.copy(new.cert, ca)
        line = Line(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=Tls(mine.files(ca)))
        try:
            assert await ask_over(line.channel) != ""
            assert not await line.renew()
            new.issue("client")  # over the old one's files
            assert await line.renew()
            assert await ask_over(line.channel) == ""
            assert not await line.renew()
        finally:
            await line.close()


# --- what cannot be used ------------------------------------------------------------------------------


def test_what_cannot_be_used_is_named(ca: Authority, tmp_path: Path) -> None:
    pair, other = ca.issue("one"), ca.issue("two")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    locked = tmp_path / "locked.key"
    os.system(f"openssl ec -in {pair.key} -aes128 -passout pass:secret -out {locked} 2>/dev/null")
    for files, says in (
        (TlsFiles(cert=str(pair.cert)), "--tls-cert is given without --tls-key"),
        (TlsFiles(key=str(pair.key)), "--tls-key is given without --tls-cert"),
        (TlsFiles(str(tmp_path / "no.crt"), str(pair.key)), "no.crt: no such file"),
        (TlsFiles(str(pair.cert), str(other.key)), "is not that of the certificate"),
        (TlsFiles(str(junk), str(pair.key)), "cannot be read as an unencrypted PEM pair"),
        (TlsFiles(str(pair.cert), str(junk)), "cannot be read as an unencrypted PEM pair"),
        (TlsFiles(str(pair.cert), str(locked)), "cannot be read as an unencrypted PEM pair"),
        (TlsFiles(ca=str(junk)), "holds no certificates in PEM form"),
    ):
        with pytest.raises(StartError, match=says):
            Tls(files)


def test_flags_of_callers_are_variables_too(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*argv: str) -> Tls | None:
        parser = argparse.ArgumentParser()
        tls.add_flags(parser)
        return tls.from_flags(parser.parse_args(argv))

    assert parsed() is None
    given = parsed("--tls-ca", str(ca.cert), "--tls-server-name", "executor")
    assert given is not None
    assert given.server_name == "executor"
    assert not given.has_certificate
    with pytest.raises(StartError, match="--tls-server-name is given without --tls-ca"):
        parsed("--tls-server-name", "executor")
    monkeypatch.setenv("CHAIRLIFT_TLS_CA", str(ca.cert))
    assert parsed() is not None
