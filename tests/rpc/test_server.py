import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.v1 import router_pb2, router_pb2_grpc
from rpc.address import Address
from rpc.channel import MAX_HEADER_BYTES, connect
from rpc.errors import from_call
from tests.rpc.conftest import Greeter, StartGreeter

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_serving(channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == SERVING:
            watch.cancel()
            return


async def until_not_serving(channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == NOT_SERVING:
            watch.cancel()
            return


async def failure_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


async def count(router: Any, number: int, started: asyncio.Event) -> tuple[int, grpc.StatusCode]:
    """Deltas received and the code the stream ended with."""
    received = 0
    try:
        async for _ in router.Generate(router_pb2.GenerateRequest(text=str(number))):
            received += 1
            started.set()
    except grpc.aio.AioRpcError as error:
        return received, error.code()
    return received, grpc.StatusCode.OK


async def under_way(channel: grpc.aio.Channel, number: int) -> asyncio.Task[tuple[int, grpc.StatusCode]]:
    """A stream of so many deltas, of which the first has come; what `count` tells of it."""
    started = asyncio.Event()
    running = asyncio.create_task(count(router_pb2_grpc.RouterStub(channel), number, started))
    await started.wait()
    return running


async def test_b89_health_knows_the_empty_name_and_each_service_and_nothing_else(
    greeter: StartGreeter,
) -> None:
    async with greeter().connect() as channel:
        await until_serving(channel)
        assert await health_of(channel) == SERVING
        assert await health_of(channel, "chairlift.v1.Router") == SERVING
        unknown = await failure_of(health_of(channel, "chairlift.v1.Nobody"))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_b89_reflection_lists_the_public_service_and_health_and_describes_both(
    greeter: StartGreeter,
) -> None:
    async with greeter().connect() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest
        names = ["chairlift.v1.Router", "grpc.health.v1.Health"]
        requests = [asked(list_services=""), *(asked(file_containing_symbol=name) for name in names)]
        listed, *described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
        assert sorted(service.name for service in listed.list_services_response.service) == names
        for answer in described:
            assert answer.file_descriptor_response.file_descriptor_proto


async def test_b81_a_message_of_five_megabytes_passes_and_one_above_the_limit_names_limit_and_size(
    greeter: StartGreeter,
) -> None:
    server = greeter()
    async with server.connect() as channel, server.connect(2**31 - 1) as unlimited:
        stub = router_pb2_grpc.RouterStub(channel)
        answer = await stub.Tokenize(router_pb2.TokenizeRequest(text="x" * 5_000_000))
        assert answer.token_ids == [5_000_000]
        over = router_pb2.TokenizeRequest(text="x" * (64 * 1024 * 1024))
        refusal = await failure_of(router_pb2_grpc.RouterStub(unlimited).Tokenize(over))
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "67108864" in refusal.details()
        assert str(over.ByteSize()) in refusal.details()
        again = await router_pb2_grpc.RouterStub(unlimited).Tokenize(router_pb2.TokenizeRequest(text="abc"))
        assert again.token_ids == [3]


async def test_a_message_of_millions_of_parts_is_refused_before_it_is_taken_apart(
    greeter: StartGreeter,
) -> None:
    server = greeter()
    parts = b"\x2a" + b"\x80\x80\x80\x02" + b"\x0a\x00" * (1 << 21)  # chat { messages {} messages {} … }
    async with server.connect() as channel:
        for call in (
            channel.unary_unary("/chairlift.v1.Router/Complete")(parts),
            channel.unary_stream("/chairlift.v1.Router/Generate")(parts).read(),
        ):
            refusal = await failure_of(call)
            assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "more than 65536 fields" in refusal.details()
    assert b"Traceback" not in server.close()


async def test_who_is_not_let_in_has_no_message_of_his_read(greeter: StartGreeter) -> None:
    server = greeter("--word", "sesame", "--max-received-bytes", "100000")
    over = router_pb2.TokenizeRequest(text="x" * 200_000)
    async with server.connect() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for call in (stub.Tokenize(over), stub.Generate(router_pb2.GenerateRequest(text="1")).read()):
            refusal = await failure_of(call)
            assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED  # and nothing is said of its size
            assert refusal.details() == "say the word"
        await until_serving(channel)
        word = (("word", "sesame"),)
        answer = await stub.Tokenize(router_pb2.TokenizeRequest(text="abc"), metadata=word)
        assert answer.token_ids == [3]
        refusal = await failure_of(stub.Tokenize(over, metadata=word))
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "100000" in refusal.details()


# Behind a field of 300,000 bytes that nobody knows it is not parsed on the loop.
@pytest.mark.parametrize("before", [b"", b"\xfa\x7f\xe0\xa7\x12" + b"x" * 300_000], ids=["short", "long"])
async def test_b90_bytes_that_are_no_text_are_refused_without_a_crash_in_the_log(
    greeter: StartGreeter, before: bytes
) -> None:
    server = greeter()
    broken = before + b"\x0a\x02\xff\xfe\x12\x02\xff\xfe\x1a\x02\xff\xfe"
    async with server.connect() as channel:
        unary = channel.unary_unary("/chairlift.v1.Router/Tokenize")
        stream = channel.unary_stream("/chairlift.v1.Router/Generate")
        for call in (unary(broken), stream(broken).read()):
            refusal = await failure_of(call)
            assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "not a valid message" in refusal.details()
        answer = await router_pb2_grpc.RouterStub(channel).Tokenize(router_pb2.TokenizeRequest(text="ab"))
        assert answer.token_ids == [2]
    assert b"Traceback" not in server.close()


async def test_a_refusal_comes_back_as_it_was_made(greeter: StartGreeter) -> None:
    async with greeter().connect() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        refusal = from_call(await failure_of(stub.Tokenize(router_pb2.TokenizeRequest(text=""))))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.field == "text"
    assert refusal.message == "text is empty: it must hold a character"


async def test_b87_running_streams_end_whole_new_calls_are_unavailable_and_the_exit_code_is_zero(
    greeter: StartGreeter,
) -> None:
    server = greeter()
    async with server.connect() as channel:
        await until_serving(channel)
        stub = router_pb2_grpc.RouterStub(channel)
        running = await under_way(channel, 40)
        server.terminate()
        await until_not_serving(channel)
        assert await health_of(channel) == NOT_SERVING
        assert await health_of(channel, "chairlift.v1.Router") == NOT_SERVING
        for call in (
            stub.Tokenize(router_pb2.TokenizeRequest(text="x")),
            stub.Generate(router_pb2.GenerateRequest(text="1")).read(),
        ):
            refusal = await failure_of(call)
            assert refusal.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in refusal.details()
        assert await running == (40, grpc.StatusCode.OK)
    assert await server.ended() == 0


async def test_b87_what_outlasts_the_grace_is_unavailable_and_keeps_what_it_had(
    greeter: StartGreeter,
) -> None:
    server = greeter("--grace-seconds", "0.5")
    async with server.connect() as channel:
        running = await under_way(channel, 10_000)
        server.terminate()
        received, code = await running
    assert received >= 1
    assert code is grpc.StatusCode.UNAVAILABLE
    assert await server.ended() == 0


async def test_b87_a_second_signal_ends_at_once(greeter: StartGreeter) -> None:
    server = greeter("--grace-seconds", "600")
    async with server.connect() as channel:
        await until_serving(channel)
        running = await under_way(channel, 10_000)
        server.terminate()
        await until_not_serving(channel)
        server.terminate()
        assert await server.ended() == 128 + signal.SIGTERM
        assert (await running)[1] is grpc.StatusCode.UNAVAILABLE


async def test_a_terminal_that_closes_drains_however_often_it_says_so(greeter: StartGreeter) -> None:
    server = greeter("--grace-seconds", "600")
    async with server.connect() as channel:
        await until_serving(channel)
        running = await under_way(channel, 20)
        server.process.send_signal(signal.SIGHUP)
        await until_not_serving(channel)
        server.process.send_signal(signal.SIGHUP)
        assert await running == (20, grpc.StatusCode.OK)
    assert await server.ended() == 0


def test_a_service_that_has_not_begun_to_serve_ends_at_once_when_it_is_told_to() -> None:
    """Process 1 of a container hears of no signal for which it has no handler."""
    script = (
        "import asyncio; from rpc import server\n"
        "async def service():\n    print('begun', flush=True)\n    await asyncio.sleep(600)\n"
        "server.main('late', service)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def test_what_is_registered_for_the_exit_is_done_and_then_the_process_is_gone_whatever_its_threads_do() -> (
    None
):
    script = (
        "import atexit, threading; from rpc import server\n"
        "async def service():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    atexit.register(print, 'farewell')\n"
        "    return 3\n"
        "server.main('brief', service)"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (3, "farewell\n")


async def test_who_has_closed_stdout_hears_no_more_and_the_service_goes_on(tmp_path: Path) -> None:
    address, (reads, writes) = f"unix:{tmp_path}/greeter.sock", os.pipe()
    os.close(reads)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.rpc.greeter", "--listen", address),
        stdout=writes,
        stderr=subprocess.PIPE,
    )
    os.close(writes)
    try:
        async with connect(Address.parse(address, field=""), max_message_bytes=1 << 20) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            request = router_pb2.TokenizeRequest(text="abc")
            answer = await stub.Tokenize(request, wait_for_ready=True, timeout=20)
            assert answer.token_ids == [3]
        process.terminate()
        _, told = await asyncio.wait_for(process.communicate(), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert b"BrokenPipe" not in told
    assert process.returncode == 0


@pytest.mark.parametrize("times", [1, 2])
async def test_a_reader_of_the_log_that_stands_still_stops_nothing(greeter: StartGreeter, times: int) -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    server = greeter("--grace-seconds", "600", stderr=writes)
    try:
        async with server.connect() as channel:
            await until_serving(channel)
            running = await under_way(channel, 10)
            server.terminate()
            await until_not_serving(channel)
            if times == 2:
                server.terminate()
            code = grpc.StatusCode.OK if times == 1 else grpc.StatusCode.UNAVAILABLE
            assert (await running)[1] is code
        assert await server.ended() == (0 if times == 1 else 128 + signal.SIGTERM)
    finally:
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("how", ["start", "start-together"])
async def test_work_that_cannot_start_is_one_line_and_exit_code_2(greeter: StartGreeter, how: str) -> None:
    server = greeter("--fail", how)
    assert await server.ended() == 2
    assert server.close().decode().splitlines()[-1] == "greeter: the rope is missing"


async def test_work_that_crashes_ends_the_process_with_1_and_is_logged_on_one_line(
    greeter: StartGreeter,
) -> None:
    server = greeter("--fail", "crash")
    assert await server.ended() == 1
    last = json.loads(server.close().decode().splitlines()[-1])
    assert last["exception"][0]["exc_value"] == "snap"


async def test_work_that_returns_leaves_the_service_serving(greeter: StartGreeter) -> None:
    server = greeter("--fail", "return")
    async with server.connect() as channel:
        await until_serving(channel)
        assert await health_of(channel) == SERVING
    server.terminate()
    assert await server.ended() == 0


async def test_b86_a_channel_finds_a_restarted_server_by_itself(
    greeter: StartGreeter, tmp_path: Path
) -> None:
    path = f"unix:{tmp_path}/greeter.sock"
    first = greeter("--listen", path)
    async with first.connect() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.TokenizeRequest(text="abc")
        assert (await stub.Tokenize(request)).token_ids == [3]
        first.process.kill()
        first.process.wait()
        away = await failure_of(stub.Tokenize(request))
        assert away.code() is grpc.StatusCode.UNAVAILABLE
        greeter("--listen", path)
        answer = await stub.Tokenize(request, wait_for_ready=True, timeout=3)
        assert answer.token_ids == [3]


async def test_a_service_listens_on_a_free_port_or_a_socket_file(
    greeter: StartGreeter, tmp_path: Path
) -> None:
    for server in (greeter(), greeter("--listen", f"unix:{tmp_path}/a.sock"), greeter("--listen", "[::1]:0")):
        async with server.connect() as channel:
            await until_serving(channel)


@pytest.mark.soak
async def test_b80_pings_every_ten_seconds_through_a_silent_minute_keep_the_connection(
    greeter: StartGreeter,
) -> None:
    server = greeter()
    async with server.connect() as channel:
        await until_serving(channel)
        await asyncio.sleep(60)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        assert await health_of(channel) == SERVING


async def cancelled_streams(stub: "router_pb2_grpc.RouterAsyncStub", count: int) -> None:
    """So many streams, 50 at once, each cancelled by its client after one message."""

    async def one() -> None:
        call = stub.Generate(router_pb2.GenerateRequest(text="1000"))
        await call.read()
        call.cancel()

    for _ in range(count // 50):
        await asyncio.gather(*(one() for _ in range(50)))


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def check_b84(server: Greeter, warm_up: int, count: int) -> None:
    async with server.connect() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        tasks = len(asyncio.all_tasks())
        await cancelled_streams(stub, warm_up)
        before = resident_bytes(server.process.pid)
        await cancelled_streams(stub, count)
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > tasks:  # noqa: ASYNC110 - the last ones are ending
                await asyncio.sleep(0.01)
        assert resident_bytes(server.process.pid) - before < 20 * 1024 * 1024
        server.terminate()  # it drains at once only when it has let every stream go
    assert await server.ended() == 0


async def test_b84_cancelled_streams_leave_nothing_behind(greeter: StartGreeter) -> None:
    await check_b84(greeter("--grace-seconds", "600"), 200, 500)


@pytest.mark.soak
async def test_b84_thirty_thousand_cancelled_streams_leave_nothing_behind(greeter: StartGreeter) -> None:
    await check_b84(greeter("--grace-seconds", "600"), 5_000, 30_000)


async def check_b85(server: Greeter, count: int) -> None:
    async with server.connect() as channel:  # gRPC is up in this process, too, when children are started
        await until_serving(channel)
        for _ in range(count):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rpc.health_probe", server.address
            )
            assert await asyncio.wait_for(child.wait(), 60) == 0
        await until_serving(channel)


async def test_b85_processes_started_while_grpc_is_up_call_as_any_other(greeter: StartGreeter) -> None:
    await check_b85(greeter(), 3)


@pytest.mark.soak
async def test_b85_a_hundred_processes_started_while_grpc_is_up(greeter: StartGreeter) -> None:
    await check_b85(greeter(), 100)


def test_b85_nothing_of_ours_forks_without_exec() -> None:
    root = Path(__file__).parents[2]
    for package in ("rpc", "router", "scheduler", "executor", "chairlift"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            for word in ("os.fork", "multiprocessing", "ProcessPoolExecutor", "preexec_fn"):
                assert word not in text, f"{path} uses {word}"


async def test_headers_beyond_the_limit_are_refused_and_the_connection_stays(greeter: StartGreeter) -> None:
    async with greeter().connect() as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        request = router_pb2.TokenizeRequest(text="abc")
        long = (("x-long", "a" * MAX_HEADER_BYTES),)
        refusal = await failure_of(stub.Tokenize(request, metadata=long))
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Tokenize(request, metadata=(("x-short", "a" * 8192),))).token_ids == [3]


async def test_a_service_may_listen_at_several_places(greeter: StartGreeter, tmp_path: Path) -> None:
    server = greeter("--listen", f"127.0.0.1:0,unix:{tmp_path}/g.sock")
    for address in (server.address, f"unix:{tmp_path}/g.sock"):
        async with connect(Address.parse(address, field=""), max_message_bytes=1 << 20) as channel:
            await until_serving(channel)
