"""gRPC itself writes nothing between the lines of a process' log."""

import subprocess
import sys

import pytest

START_PROCESSES_WHILE_CALLING = """
import rpc.quiet
import asyncio, grpc, uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(5):
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            process = await asyncio.create_subprocess_exec("true")
            await asyncio.gather(call, process.wait())
    await server.stop(0)

uvloop.run(main())
"""


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_starting_processes_while_calls_run_writes_nothing() -> None:
    assert python(START_PROCESSES_WHILE_CALLING).stderr == ""


@pytest.mark.parametrize("service", ["router", "scheduler", "executor", "chairlift.__main__"])
def test_processes_of_ours_say_so_before_grpc_is_there(service: str) -> None:
    code = f"import os, sys, {service}; print('grpc' in sys.modules, os.environ['GRPC_VERBOSITY'])"
    assert python(code).stdout == "False ERROR\n"
