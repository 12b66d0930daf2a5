"""A router is killed, and its clients go on through another one: every token once, nothing computed twice."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from chairlift import Client
from protos.v1 import router_pb2, router_pb2_grpc
from tests.integration.prompts import prompt
from tests.rig import cluster
from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.quiet import wait_until_idle
from tests.rig.scripted_executor import Script, expected_output

SLOW = Script(step_seconds=0.01)


@pytest.fixture(scope="module")
def two_routers(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as running:
        secret = running.folder / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        running.start_scripted_executor(SLOW)
        running.start_scheduler()
        for name in ("router", "other"):
            running.start_router("--cluster-secret-file", str(secret), name=name)
        running.wait()
        yield running


def stub(running: Cluster, name: str) -> router_pb2_grpc.RouterStub:
    return router_pb2_grpc.RouterStub(running.channel(name))


def read(call: Any, num_tokens: int) -> tuple[router_pb2.Accepted, list[list[int]]]:
    """Takes events until every one of two choices has some tokens."""
    accepted, received = router_pb2.Accepted(), [[], []]
    while min(map(len, received)) < num_tokens:
        event = next(call)
        if event.HasField("accepted"):
            accepted = event.accepted
        if event.HasField("delta"):
            received[event.delta.index] += event.delta.token_ids
    return accepted, received


def test_b106_another_router_goes_on_with_the_live_sequences_of_a_killed_one(two_routers: Cluster) -> None:
    asked = request(prompt(20), max_tokens=150, n=2, temperature=1.0)
    call = stub(two_routers, "router").Generate(asked, timeout=60)  # dropping it would cancel it
    accepted, received = read(call, 5)
    two_routers.kill("router")
    try:
        asked.request_id = accepted.request_id
        asked.resume.resume_token = accepted.resume_token
        for index, token_ids in enumerate(received):
            asked.resume.received.add(index=index, token_ids=token_ids)
        for event in stub(two_routers, "other").Generate(asked, timeout=60):
            if event.HasField("accepted"):
                assert event.accepted == accepted
            if event.HasField("delta"):
                assert event.delta.offset == len(received[event.delta.index])
                received[event.delta.index] += event.delta.token_ids
        assert received == [expected_output(prompt(20), 150)] * 2
        admitted = [entry for step in two_routers.scripted().steps() for entry in step["admitted"]]
        assert [entry[2] for entry in admitted] == [20, 20], "each was computed once"
        wait_until_idle(two_routers)
    finally:
        two_routers.restart("router")
        two_routers.wait()


def test_b106_the_client_library_goes_on_through_the_next_router(two_routers: Cluster) -> None:
    addresses = f"{two_routers.address('router')},{two_routers.address('other')}"
    options = {"max_tokens": 120, "ignore_eos": True}
    with (
        Client(addresses, max_retries=20) as client,
        client.stream(prompt(30), **options) as stream,  # type: ignore[arg-type]
    ):
        pieces = [next(stream) for _ in range(5)]
        two_routers.kill("router")
        pieces += list(stream)
    two_routers.restart("router")
    two_routers.wait()
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert token_ids == expected_output(prompt(30), 120)
    assert "".join(piece.text for piece in pieces) == stream.answer.text


def test_b28_a_request_whose_router_died_is_found_again_by_its_id_alone(two_routers: Cluster) -> None:
    asked = request(prompt(25), max_tokens=100, request_id="found again")
    call = stub(two_routers, "router").Generate(asked, timeout=60)
    next(call)
    with pytest.raises(grpc.RpcError, match="in use at another router"):
        stub(two_routers, "other").Complete(asked, timeout=60)
    num_steps = two_routers.load().num_steps
    two_routers.kill("router")
    answer = stub(two_routers, "other").Complete(asked, timeout=60)
    two_routers.restart("router")
    two_routers.wait()
    assert list(answer.choices[0].token_ids) == expected_output(prompt(25), 100)
    admitted = [entry[2] for step in two_routers.scripted().steps() for entry in step["admitted"]]
    assert admitted.count(25) == 1
    assert two_routers.load().num_steps - num_steps < 200


def test_b106_a_resume_at_another_router_ends_the_stream_at_the_first_one(two_routers: Cluster) -> None:
    asked = request(prompt(22), max_tokens=150)
    call = stub(two_routers, "router").Generate(asked, timeout=60)
    accepted = next(call).accepted
    asked.request_id = accepted.request_id
    asked.resume.resume_token = accepted.resume_token
    token_ids = []
    for event in stub(two_routers, "other").Generate(asked, timeout=60):
        token_ids += event.delta.token_ids
    with pytest.raises(grpc.RpcError, match="another stream goes on with this request") as raised:
        list(call)
    assert raised.value.code() is grpc.StatusCode.ABORTED  # type: ignore[attr-defined]  # a call, too
    assert token_ids == expected_output(prompt(22), 150)
    admitted = [entry[2] for step in two_routers.scripted().steps() for entry in step["admitted"]]
    assert admitted.count(22) == 1
