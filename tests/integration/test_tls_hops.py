"""TLS on every hop: each caller of ours is refused where it must be, and says why; the whole works."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from chairlift import AsyncClient, ChairliftError, Client
from chairlift.certs import write
from chairlift.conformance import Outcome, UntestedError
from chairlift.conformance import run as check_conformance
from router.scheduler_client import SchedulerClient
from router.scheduler_session import TokenizerIdentity
from rpc import health_probe
from rpc.address import Address
from rpc.tls import Tls
from scheduler.executor_client import ExecutorClient, ExecutorUnreachableError
from tests.rig.certificates import Authority
from tests.rig.service_process import ServiceProcess, running
from tests.rig.tls_faults import MAX_MESSAGE_BYTES, REFUSALS, serving


async def scheduler_to_executor(address: Address, certificates: Tls | None) -> str:
    client = ExecutorClient(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=certificates)
    try:
        with pytest.raises(ExecutorUnreachableError) as raised:
            await client.open("scheduler-1")
    finally:
        await client.close()
    return str(raised.value)


async def router_to_scheduler(address: Address, certificates: Tls | None) -> str:
    changed = asyncio.Event()
    client = SchedulerClient(
        address,
        router_id="router-1",
        tokenizer=TokenizerIdentity("", 260),
        recovery_timeout_seconds=60.0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        on_serving_changed=changed.set,
        tls=certificates,
    )
    task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(30):
            await changed.wait()
        assert client.refusal is not None
        return client.refusal
    finally:
        task.cancel()
        await asyncio.wait([task])


async def conformance_to_executor(address: Address, certificates: Tls | None) -> str:
    outcomes: list[Outcome] = []
    with pytest.raises(UntestedError, match="could not be tested") as raised:
        await check_conformance(str(address), outcomes.append, certificates=certificates)
    assert outcomes == []  # no verdict on what was not asked
    return str(raised.value)


HOPS = [scheduler_to_executor, router_to_scheduler, conformance_to_executor]


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("case", REFUSALS)
async def test_an_inner_hop_that_does_not_fit_says_why(
    hop: Callable[[Address, Tls | None], "asyncio.Future[str]"], case: str, tmp_path: Path
) -> None:
    server, client, why = REFUSALS[case](Authority(tmp_path), tmp_path)
    async with serving(server) as address:
        assert why in await hop(address, client)


async def test_a_client_of_the_library_is_told_what_is_wrong(tmp_path: Path) -> None:
    ca, stranger = Authority(tmp_path), Authority(tmp_path, "other")
    mine = ca.issue("client")
    async with serving(Tls(ca.issue("server").files(ca.cert))) as address:
        for given, why in (
            ({}, "it may speak TLS alone"),
            ({"tls_ca": str(ca.cert)}, "it may want a certificate of ours"),
            ({"tls_ca": str(stranger.cert)}, "not signed by a CA we believe"),
            ({"tls_ca": str(ca.cert), "tls_server_name": "elsewhere"}, "is for another host"),
        ):
            async with AsyncClient(str(address), max_retries=0, **given) as client:
                with pytest.raises(ChairliftError, match=why) as raised:
                    await client.generate("x")
                assert raised.value.code == "UNAVAILABLE"
        pair = {"tls_cert": str(mine.cert), "tls_key": str(mine.key)}
        async with AsyncClient(str(address), max_retries=0, tls_ca=str(ca.cert), **pair) as client:
            with pytest.raises(ChairliftError) as raised:
                await client.generate("x")
            assert raised.value.code == "UNIMPLEMENTED"  # it was let in: there is no router behind this door
    with pytest.raises(ValueError, match="--tls-cert is given without --tls-key"):
        Client(tls_cert=str(mine.cert))


def until_healthy(process: ServiceProcess, *flags: str) -> None:
    while health_probe.main([process.address, *flags]) != 0:
        assert process.exit_code is None, process.stderr
        time.sleep(0.05)


def test_a_whole_server_speaks_tls_on_every_hop(tiny_model_folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "certs")
    folder = tmp_path / "certs"

    def flags(name: str) -> tuple[str, ...]:
        pair = ("--tls-cert", f"{folder}/{name}.crt", "--tls-key", f"{folder}/{name}.key")
        return ("--tls-ca", f"{folder}/ca.crt", *pair)

    common = ("--listen", "127.0.0.1:0", "--log-format", "json")
    model = ("--model", str(tiny_model_folder))
    with contextlib.ExitStack() as stack:

        def start(name: str, *more: str) -> ServiceProcess:
            return stack.enter_context(running(name, *common, *flags(name), *more, wait=False))

        executor = start("executor", *model, "--dtype", "float32", "--num-threads", "1")
        scheduler = start("scheduler", "--executor", executor.address, "--tls-server-name", "executor")
        router = start("router", *model, "--scheduler", scheduler.address)
        for process in (executor, scheduler, router):
            until_healthy(process, *flags("client"))
        tls = {
            "tls_ca": f"{folder}/ca.crt",
            "tls_cert": f"{folder}/client.crt",
            "tls_key": f"{folder}/client.key",
        }
        with Client(router.address, **tls) as client:
            assert len(client.generate("hello", max_tokens=5, ignore_eos=True).choices[0].token_ids) == 5
        for process in (
            executor,
            scheduler,
            router,
        ):  # nobody is let in in plain text, or without a certificate
            assert health_probe.main([process.address]) == 1
            assert health_probe.main([process.address, "--tls-ca", f"{folder}/ca.crt"]) == 1
        plain = stack.enter_context(running("scheduler", *common, "--executor", executor.address, wait=False))
        with grpc.insecure_channel(plain.address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        while "it may speak TLS alone" not in plain.stderr:
            assert plain.exit_code is None
            time.sleep(0.05)
        assert "waiting_for_executor" in plain.stderr


def test_a_service_is_not_half_secured(tiny_model_folder: Path, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    with pytest.raises(RuntimeError, match="--tls-ca is given without --tls-cert and --tls-key"):
        ServiceProcess("scheduler", "--executor", "127.0.0.1:1", "--tls-ca", str(ca.cert))
