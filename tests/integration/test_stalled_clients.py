"""Clients that ask and then take nothing: they are cut, and what they held goes back."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.v1 import router_pb2_grpc
from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet, wait_until_idle
from tests.rig.scripted_executor import Script

# More than the buffers between the two ends take, and more than is computed until a client is cut.
MANY = 8000
SCRIPT = Script(num_blocks=4096, max_num_seqs=16, step_seconds=0.001)
# The library of a gRPC client reads by itself, as much as it guesses the network holds; this one does not.
SMALL_WINDOW = [
    ("grpc.default_authority", "localhost"),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
]
CUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def short_tempered(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(SCRIPT)
        running.start_scheduler()
        http = f"unix:{running.folder}/http.sock"
        running.start_router("--http", http, "--client-stall-seconds", "0.5")
        running.wait()
        yield running


def until_running(running: Cluster) -> None:
    deadline = time.monotonic() + 20
    while not running.load().num_running:
        assert time.monotonic() < deadline, "it never ran"


def test_b88_a_grpc_client_that_does_not_read_is_cut_and_gives_its_blocks_back(
    short_tempered: Cluster,
) -> None:
    asked = sized(10, MANY, n=4, logprobs=1, temperature=1.0)
    with grpc.insecure_channel(short_tempered.address("router"), options=SMALL_WINDOW) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(asked)
        until_running(short_tempered)
        wait_until_idle(short_tempered, CUT_SECONDS)
        with pytest.raises(
            grpc.RpcError, match=r"nothing of the stream was taken for 0\.5 seconds"
        ) as raised:
            list(call)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert '"client_stalled"' in short_tempered.process("router").stderr
    check_quiet(short_tempered)


def test_b88_an_http_client_that_does_not_read_loses_its_connection(short_tempered: Cluster) -> None:
    asked = {"prompt": prompt(12), "max_tokens": MANY, "n": 4, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{short_tempered.folder}/http.sock")
        client.sendall(head.encode() + body)
        until_running(short_tempered)
        wait_until_idle(short_tempered, CUT_SECONDS)
        client.settimeout(20)
        said = b""
        while piece := client.recv(65_536):
            said += piece
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert b"[DONE]" not in said
    check_quiet(short_tempered)
