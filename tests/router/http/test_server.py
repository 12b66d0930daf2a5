import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from router import __main__ as main
from router.config import RouterSettings
from router.http.app import HttpApp
from router.http.server import HttpDoor, _Connection
from rpc.channel import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS
from rpc.errors import StartError
from rpc.tls import Tls
from tests.rig.certificates import Authority, Pair
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router.http.vanishing import vanish
from tests.router.stack import Rig, Start, eventually, letters

SETTINGS = RouterSettings.model_construct(http="127.0.0.1:0", tls_ca="", max_message_bytes=1024)


async def test_without_its_libraries_the_door_says_what_brings_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as rig:
        main._http_door(rig.intake, rig.pool, SETTINGS, rig.doorkeeper, None)
        monkeypatch.delitem(sys.modules, "router.http.server")
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        with pytest.raises(StartError, match=r"\(uvicorn\); `pip install 'chairlift\[router,http\]'`"):
            main._http_door(rig.intake, rig.pool, SETTINGS, rig.doorkeeper, None)


async def test_a_door_that_never_opened_stops_without_a_word(start: Start) -> None:
    async with start() as rig:
        await main._http_door(rig.intake, rig.pool, SETTINGS, rig.doorkeeper, None).stop()


# --- HTTPS ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def https(
    rig: Rig, certificates: Tls | None, *, demand: bool = True, client_stall_seconds: float = 30.0
) -> AsyncIterator[str]:
    """HOST:PORT of a door."""
    app = HttpApp(
        rig.intake,
        max_body_bytes=1024,
        doorkeeper=rig.doorkeeper,
        client_stall_seconds=client_stall_seconds,
    )
    door = HttpDoor(app, "127.0.0.1:0", tls=certificates, demand_certificates=demand)
    address = await door.open()
    try:
        yield address
    finally:
        await door.stop()


def trust(ca: Authority, mine: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca.cert))
    if mine is not None:
        context.load_cert_chain(mine.cert, mine.key)
    return context


async def get(address: str, context: ssl.SSLContext | None) -> int:
    scheme = "http" if context is None else "https"
    async with httpx2.AsyncClient(verify=context or True, timeout=20) as client:
        return (await client.get(f"{scheme}://{address}/health")).status_code


async def test_https_shows_and_demands_certificates(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, stranger = Authority(tmp_path), Authority(tmp_path, "other")
    mine = ca.issue("client")
    async with start() as rig, https(rig, Tls(ca.issue("server").files(ca.cert))) as address:
        assert await get(address, trust(ca, mine)) == 200
        for context, reason in (
            (trust(ca), "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
            (trust(ca, stranger.issue("stranger")), "CERTIFICATE_VERIFY_FAILED"),
            (trust(ca, ca.issue("late", days=30)), "CERTIFICATE_VERIFY_FAILED"),
            (None, "HTTP_REQUEST"),
        ):
            with pytest.raises(httpx2.TransportError):
                await get(address, context)
            told = capsys.readouterr().out
            assert "tls_refused" in told
            assert reason in told
        with pytest.raises(httpx2.TransportError):  # here it is the client who does not believe
            await get(address, trust(stranger, mine))
        assert await get(address, trust(ca, mine)) == 200


async def test_https_without_certificates_of_clients(start: Start, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    certificates = Tls(ca.issue("server").files(ca.cert))
    async with start() as rig, https(rig, certificates, demand=False) as address:
        assert await get(address, trust(ca)) == 200


async def test_https_takes_up_new_certificates(start: Start, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    ca = tmp_path / "ca.crt"
    shutil.copy(old.cert, ca)
    of_old, of_new = trust(old, old.issue("client-of-old")), trust(new, new.issue("client-of-new"))
    async with start() as rig, https(rig, Tls(old.issue("server").files(ca))) as address:
        assert await get(address, of_old) == 200
        new.issue("server")
        shutil.copy(new.cert, ca)
        assert await get(address, of_new) == 200
        with pytest.raises(httpx2.TransportError):
            await get(address, of_old)
        mixed = trust(new, Pair(tmp_path / "client-of-old.crt", tmp_path / "client-of-old.key"))
        with pytest.raises(httpx2.TransportError):  # the old CA's clients are not believed any more
            await get(address, mixed)


# --- heads ------------------------------------------------------------------------------------------


def request(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


@contextlib.asynccontextmanager
async def asked(
    address: str, data: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has sent this."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(address: str, data: bytes) -> bytes:
    """All that comes back until the other side closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow"])
async def test_b104_who_does_not_send_a_whole_head_is_cut(
    start: Start, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Connection, "head_seconds", 0.05)
    async with start() as rig, https(rig, None) as address:
        assert await answer_to(address, begun) == b""
        assert await get(address, None) == 200


async def test_b104_a_second_head_on_one_connection_is_timed_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Connection, "head_seconds", 0.5)
    async with start() as rig, https(rig, None) as address:
        whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (await answer_to(address, whole + b"GET /he")).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        (request(b"x" * 2000)[:-2000], b"413"),
        (
            request(b"{}").replace(b"content-length: 2", b"transfer-encoding: chunked")[:-2] + b"800\r\n",
            b"408",
        ),
    ],
    ids=["413", "408"],
)
async def test_b104_who_does_not_end_a_body_that_was_refused_is_cut(
    start: Start, begun: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.exchange.BODY_SECONDS", 0.2)
    monkeypatch.setattr(_Connection, "head_seconds", 0.3)
    async with start() as rig, https(rig, None) as address, asked(address, begun) as (reader, writer):
        answer = asyncio.create_task(reader.read())
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while not answer.done():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)
            await asyncio.wait([answer])
        if answer.exception() is None:  # a reset may take what came before it
            assert answer.result().startswith(b"HTTP/1.1 " + status)


async def test_the_rest_of_a_refused_body_may_come_and_the_connection_serves_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Connection, "head_seconds", 0.3)
    begun = request(b"x" * 2000)[:-1000]
    async with start() as rig, https(rig, None) as address, asked(address, begun) as (reader, writer):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.write(b"x" * 1000)
        await asyncio.sleep(0.5)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in await reader.read()


async def test_b104_a_head_that_is_too_long_is_refused(start: Start) -> None:
    async with start() as rig, https(rig, None) as address:
        for head in (b"x-long: " + b"a" * 40_000, b"\r\n".join(b"x-%d: y" % i for i in range(5_000))):
            start_line = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            answer = await answer_to(address, start_line + head + b"\r\n\r\n")
            # As the pieces fall: the whole head was seen, or the server gave up before its end.
            assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        assert await get(address, None) == 200


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    ("headers", "behind"),
    [
        ([], b"\r\n"),
        ([], b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
        ([b"connection: upgrade", b"upgrade: h2c"], b"\r\n"),  # as Java's client asks first
        ([], b"x" * 40_000),
    ],
    ids=["line", "request", "upgrade", "flood"],
)
async def test_b25_who_hangs_up_behind_what_it_sent_ahead_is_noticed(
    start: Start, stream: bytes, headers: list[bytes], behind: bytes
) -> None:
    async with start() as rig, https(rig, None) as address:
        body = b'{"prompt": "Hi", "stream": %s}' % stream
        async with asked(address, request(body, *headers)) as (reader, writer):
            submit = await rig.scheduler.submitted()
            if stream == b"true":
                await rig.scheduler.give(submit, [97])
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.write(behind)
            await writer.drain()
            await asyncio.sleep(0.05)  # the door has it
            if len(behind) < 40_000:  # else the door itself ends the connection
                assert not rig.scheduler.cancels
                writer.close()
            async with asyncio.timeout(20):
                await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        await rig.quiet()


async def test_requests_that_were_sent_ahead_are_answered_in_turn(start: Start) -> None:
    async with start(ScriptedScheduler(script=letters("ok"))) as rig, https(rig, None) as address:
        one = request(b'{"prompt": "Hi"}')
        last = request(b'{"prompt": "Hi"}', b"connection: close")
        answer = await answer_to(address, one * 20 + last)
        assert answer.count(b"HTTP/1.1 200 ") == answer.count(b'"text":"ok"') == 21
        await rig.quiet()


async def test_b82_connections_of_the_network_are_pinged_by_tcp(start: Start) -> None:
    """So that a client whose packets are dropped is given up as at the gRPC door."""
    async with start() as rig:
        app = HttpApp(rig.intake, max_body_bytes=1024, doorkeeper=rig.doorkeeper)
        door = HttpDoor(app, "127.0.0.1:0")
        host, _, port = (await door.open()).rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await eventually(lambda: bool(door._server and door._server.server_state.connections))
        assert door._server is not None
        (connection,) = door._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        in_all = [
            accepted.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert in_all == [KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS, 1]
        # It would count pauses of a client as its absence, and where it is set the number of pings does not.
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        writer.close()
        await door.stop()


async def test_b82_who_vanishes_amid_a_stream_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Connection, "look_seconds", 0.1)
    async with start() as rig, https(rig, None) as address:
        async with asked(address, request(b'{"prompt": "Hi", "stream": true}')) as (reader, writer):
            submit = await rig.scheduler.submitted()
            await rig.scheduler.give(submit, [97])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            vanish(writer.get_extra_info("socket"))
            await rig.scheduler.give(submit, [97])
            async with asyncio.timeout(20):
                await rig.scheduler.until(lambda: bool(rig.scheduler.cancels))
        await rig.quiet()


@pytest.mark.parametrize(("stall_seconds", "is_cut"), [(30.0, False), (0.2, True)])
async def test_b88_a_client_that_pauses_in_an_answer_is_cut_when_it_stalls_and_not_before(
    start: Start, monkeypatch: pytest.MonkeyPatch, stall_seconds: float, is_cut: bool
) -> None:
    """The whole answer lies in the system's buffers, and the client's window is closed."""
    monkeypatch.setattr(_Connection, "look_seconds", 0.05)
    async with start() as rig, https(rig, None, client_stall_seconds=stall_seconds) as address:
        host, _, port = address.rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
            received = await loop.sock_recv(client, 1000)
            head, _, body = received.partition(b"\r\n\r\n")
            told = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]  # it is there
            await asyncio.sleep(0.6)
            while len(body) < told:  # the system still has it
                body += await loop.sock_recv(client, 65536)
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(client, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                body += await loop.sock_recv(client, 65536)
            assert (len(body) == told) == is_cut
