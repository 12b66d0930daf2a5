import contextlib
import socket
import time
from collections.abc import Iterator

from router.http.peer import Fault, Peer
from tests.router.http.vanishing import vanish

FAR = 1_000_000.0


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's end of one, and the client's, which takes little at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        server, _ = listening.accept()
        with server:
            server.setblocking(False)
            yield server, client


def test_b82_a_client_that_vanished_is_known_by_bytes_that_nobody_acknowledges() -> None:
    with connection() as (server, client):
        peer = Peer(server, stall_seconds=FAR, now=time.monotonic())
        server.send(b"taken")
        assert client.recv(5) == b"taken"
        assert peer.fault(time.monotonic()) is None
        vanish(client)
        assert peer.fault(time.monotonic()) is None, "nothing is on the way"
        server.send(b"lost")
        faults = []
        for _ in range(4):
            time.sleep(0.02)
            faults.append(peer.fault(time.monotonic()))
        assert faults[0] is None, "it may have been sent this moment"
        assert faults[-1] is Fault.VANISHED


def test_b88_a_client_that_pauses_has_until_the_limit_from_what_it_took_last() -> None:
    with connection() as (server, client):
        peer = Peer(server, stall_seconds=30.0, now=0.0)
        with contextlib.suppress(BlockingIOError):
            while True:
                server.send(bytes(65536))
        client.recv(1)
        time.sleep(0.05)  # on the way is nothing any more: the window is closed
        assert [peer.fault(now) for now in (5.0, 15.0, 34.9)] == [None] * 3
        for _ in range(100):
            client.recv(65536)
        time.sleep(0.05)
        assert [peer.fault(now) for now in (40.0, 69.9)] == [None] * 2
        assert peer.fault(70.0) is Fault.STALLED


def test_a_connection_on_which_nothing_is_to_be_sent_is_well_however_long() -> None:
    with connection() as (server, client):
        peer = Peer(server, stall_seconds=30.0, now=0.0)
        server.send(b"taken")
        assert client.recv(5) == b"taken"
        assert [peer.fault(now) for now in (1.0, 1e4, 1e5)] == [None] * 3
