import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from rpc.errors import StartError
from rpc.listening import bind, bound_socket


@pytest.fixture
async def server() -> AsyncIterator[grpc.aio.Server]:
    one = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    yield one
    await one.stop(None)


async def test_a_port_in_use_is_refused_by_a_sentence(server: grpc.aio.Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartError, match=rf"^--listen is 127.0.0.1:{port}: the port is in use by another"
        ):
            bind(server, f"127.0.0.1:{port}")


async def test_port_zero_takes_a_free_port_and_tells_which(server: grpc.aio.Server) -> None:
    host, _, port = str(bind(server, "127.0.0.1:0")).partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_the_socket_file_of_a_dead_process_is_taken_over(
    server: grpc.aio.Server, tmp_path: Path
) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    assert bind(server, f"unix:{path}").unix_path == str(path)


async def test_a_socket_file_on_which_somebody_listens_is_left_alone(
    server: grpc.aio.Server, tmp_path: Path
) -> None:
    path = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(StartError, match="another process listens on that socket"):
            bind(server, f"unix:{path}")
        assert path.exists()


async def test_a_file_that_is_no_socket_is_never_removed(server: grpc.aio.Server, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StartError, match="not a socket"):
        bind(server, f"unix:{path}")
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("unix:/no/such/folder/x.sock", "the folder /no/such/folder does not exist"),
        ("unix:/" + "x" * 107, "108 bytes"),
        ("dns:///host:1", "one listens on HOST:PORT or unix:PATH"),
        ("192.0.2.1:50051", "cannot assign requested address"),
        ("no.such.host.invalid:50051", "the host name cannot be resolved"),
        ("50051", "an address is HOST:PORT"),
    ],
)
async def test_an_address_that_cannot_be_had_is_refused_with_the_reason(
    server: grpc.aio.Server, listen: str, says: str
) -> None:
    with pytest.raises(StartError, match="--listen is ") as refusal:
        bind(server, listen)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_socket_for_another_server_is_had_by_the_same_rules(tmp_path: Path) -> None:
    taken, address = bound_socket("127.0.0.1:0", field="--http")
    with taken:
        assert address.host_and_port == taken.getsockname()
        with pytest.raises(StartError, match=rf"^--http is {address}: the port is in use by another"):
            bound_socket(str(address), field="--http")
        with socket.create_connection(taken.getsockname()):
            pass
    taken, address = bound_socket(f"unix:{tmp_path}/a.sock", field="--http")
    with taken, pytest.raises(StartError, match="another process listens on that socket"):
        bound_socket(str(address), field="--http")
    taken, _ = bound_socket(str(address), field="--http")  # the file was left behind
    taken.close()
    with pytest.raises(StartError, match="--http is '8000'"):
        bound_socket("8000", field="--http")
