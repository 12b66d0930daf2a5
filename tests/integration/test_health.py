"""Kind 15 through real processes: SERVING means that a new request would get a token now."""

import asyncio
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.prompts import prompt, sized
from tests.rig import cluster
from tests.rig.client import client_of
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet
from tests.rig.scripted_executor import Fault, Script, expected_output

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = ("executor", "scheduler", "router")


def http_of(running: Cluster) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(uds=f"{running.folder}/http.sock")
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


async def up(running: Cluster, http: httpx2.AsyncClient) -> None:
    """Returns when the router answers at both doors, serving or not."""
    while True:
        try:
            await http.get("/health")
            await asyncio.to_thread(_check, running, "router")
        except (httpx2.TransportError, grpc.RpcError):
            await asyncio.sleep(0.05)
        else:
            return


def _check(running: Cluster, name: str) -> int:
    check = health_pb2_grpc.HealthStub(running.channel(name)).Check
    return check(health_pb2.HealthCheckRequest(), timeout=10).status


async def test_b91_nobody_serves_before_the_model_is_loaded_and_who_does_gives_a_token(
    tiny_model_folder: Path,
) -> None:
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scheduler()
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        body = {"prompt": prompt(5), "max_tokens": 5}
        async with http_of(running) as http, client_of(running) as client, asyncio.timeout(60):
            await up(running, http)
            running.start_scripted_executor(Script(load_seconds=2.0))
            num_refused = 0
            while (status := (await http.get("/health")).status_code) != 200:
                assert status == 503
                # Meanwhile it says "later" at either door, or has just come to serve.
                (outcome,) = await asyncio.gather(client.generate(sized(5, 5)), return_exceptions=True)
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, grpc.aio.AioRpcError)
                    assert outcome.code() is grpc.StatusCode.UNAVAILABLE
                    num_refused += 1
                assert (await http.post("/v1/completions", json=body)).status_code in {200, 503}
                await asyncio.sleep(0.05)
            assert num_refused > 0
            answer = await client.generate(sized(5, 5))
            assert answer.token_ids == expected_output(prompt(5), 5)
            for name in SERVICES:
                assert await asyncio.to_thread(_check, running, name) == SERVING
        check_quiet(running)


@pytest.mark.parametrize("num_steps", [2, pytest.param(20, marks=pytest.mark.soak)])
async def test_b93_who_is_busy_is_not_taken_for_dead(num_steps: int, tiny_model_folder: Path) -> None:
    """Long steps and a queue: every tier goes on to say that it serves, while none of them is free."""
    stalls = tuple(Fault(at_step=1 + i, kind="stall", seconds=3.0) for i in range(num_steps))
    max_tokens = num_steps + 5
    with cluster.assembling(tiny_model_folder) as running:
        running.start_scripted_executor(Script(max_num_seqs=8, faults=stalls))
        running.start_scheduler()
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        running.wait()
        async with http_of(running) as http, client_of(running) as client:
            calls = [
                asyncio.create_task(client.generate(sized(5, max_tokens, salt=salt), 600))
                for salt in range(58)
            ]
            num_looks = 0
            while not all(call.done() for call in calls):
                for name in SERVICES:
                    assert await asyncio.to_thread(_check, running, name) == SERVING
                assert (await http.get("/health")).status_code == 200
                num_looks += 1
                await asyncio.sleep(0.1)
            assert num_looks > 3
            for salt, call in enumerate(calls):
                assert (await call).token_ids == expected_output(prompt(5, salt), max_tokens)
        assert running.process("scheduler").stderr.count('"executor_attached"') == 1
        check_quiet(running)
