import asyncio
import contextlib
import hashlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from chairlift import ChairliftError, Client, serve
from chairlift.certs import write
from chairlift.child_process import Service
from chairlift.serve import ALL, TAKEN_BY, ServeSettings, services
from rpc.settings import ServiceSettings, load
from scheduler.config import SchedulerSettings


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """`chairlift serve` in a process of its own, killed at the end if need be."""
    command = [sys.executable, "-m", "chairlift", "serve", "--log-format", "json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith("router ready"):
            return lines
    raise AssertionError(process.communicate()[1])


def children_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids of the three services by name."""
    found = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it ended since the list was read
            continue
        if len(words) > 4:  # a process that has ended has no words left
            found[words[4].decode()] = int(pid)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: object, *, within_seconds: float = 20) -> None:
    end = time.monotonic() + within_seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chairlift", "generate", "Hello", "--max-tokens", "4", "--address", address],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_flag_is_known_to_the_services_it_is_handed_to() -> None:
    for name in ALL:
        config = importlib.import_module(f"{name}.config")
        (settings_class,) = {
            one
            for one in vars(config).values()
            if isinstance(one, type) and issubclass(one, ServiceSettings) and one is not ServiceSettings
        }
        for field, takers in TAKEN_BY.items():
            if name in takers:
                assert field in settings_class.model_fields, f"--{field} is no flag of the {name}"
    assert set(TAKEN_BY) | {"listen", "metrics_listen", "standby"} == set(ServeSettings.model_fields)


def test_a_flag_goes_to_those_that_take_it_and_to_no_other(tmp_path: Path) -> None:
    argv = [
        "--model",
        "m",
        "--listen",
        "127.0.0.1:7",
        "--max-num-seqs",
        "4",
        "--max-step-ms",
        "50",
        "--dtype",
        "float32",
        "--window",
        "1",
        "--http-hosts",
        "chairlift.example, localhost",
    ]
    settings = load(ServeSettings, argv, prog="chairlift serve")
    executor, scheduler, router = services(settings, Path("m.gguf"), tmp_path)
    assert [one.name for one in (executor, scheduler, router)] == ["executor", "scheduler", "router"]
    assert executor.argv[:2] == ("--listen", f"unix:{tmp_path}/executor.sock")
    assert scheduler.argv[:4] == (
        *("--listen", f"unix:{tmp_path}/scheduler.sock"),
        *("--executor", f"unix:{tmp_path}/executor.sock"),
    )
    assert router.argv[:4] == (
        *("--listen", f"127.0.0.1:7,unix:{tmp_path}/router.sock"),
        *("--scheduler", f"unix:{tmp_path}/scheduler.sock"),
    )

    def given(flag: str) -> list[str]:
        return [one.name for one in (executor, scheduler, router) if flag in one.argv]

    assert given("--max-num-seqs") == ["executor", "scheduler"]
    assert given("--max-step-ms") == ["scheduler"]
    assert given("--dtype") == ["executor"]
    assert given("--model") == ["executor", "router"]
    assert given("--http-hosts") == ["router"]
    assert given("--num-blocks") == []
    assert router.argv[router.argv.index("--model") + 1] == "m.gguf"


@pytest.mark.parametrize(
    "flag", ["--late-plans", "--no-late-plans", "--prefix-caching", "--no-prefix-caching"]
)
def test_a_switch_is_handed_on_as_the_scheduler_reads_it(flag: str, tmp_path: Path) -> None:
    settings = load(ServeSettings, ["--model", "m", flag], prog="chairlift serve")
    _, scheduler, _ = services(settings, Path("m.gguf"), tmp_path)
    assert flag in scheduler.argv
    read = load(SchedulerSettings, list(scheduler.argv), prog="chairlift scheduler")
    field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    assert getattr(read, field) is not flag.startswith("--no-")


def test_metrics_take_three_ports_in_a_row_the_routers_first(tmp_path: Path) -> None:
    argv = ["--model", "m", "--metrics-listen", "[::1]:9464"]
    settings = load(ServeSettings, argv, prog="chairlift serve")
    where = {
        one.name: one.argv[one.argv.index("--metrics-listen") + 1]
        for one in services(settings, Path("m.gguf"), tmp_path)
    }
    assert where == {"router": "[::1]:9464", "scheduler": "[::1]:9465", "executor": "[::1]:9466"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        ([], "--model is missing"),
        (["--model", ".", "--metrics-listen", "127.0.0.1:0"], "--metrics-listen is '127.0.0.1:0'"),
        (["--model", ".", "--metrics-listen", "unix:/tmp/m"], "--metrics-listen is 'unix:/tmp/m'"),
        (["--model", ".", "--listen", "here"], "--listen is 'here'"),
        (["--model", ".", "--listen", "unix:/" + "x" * 120], "107"),
        (["--model", ".", "--seats", "4"], "unrecognized arguments: --seats 4"),
        (["--model", ".", "--max-num-seqs", "four"], "--max-num-seqs is four: it must be a whole number"),
    ],
)
def test_b120_what_cannot_start_says_why_in_one_line(flags: list[str], says: str) -> None:
    with serving(*flags) as process:
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 2
    assert says in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [("--max-num-seqs", "0", "--max-num-seqs is 0"), ("--device", "abacus", "--device is abacus")],
)
def test_b120_a_service_that_dies_before_it_is_ready_ends_all_and_its_words_are_the_last(
    tiny_model_folder: Path, flag: str, value: str, says: str
) -> None:
    with serving("--model", str(tiny_model_folder), "--listen", "127.0.0.1:0", flag, value) as process:
        until(lambda: children_of(process) or process.poll() is not None)
        output, errors = process.communicate(timeout=15)
    assert process.returncode == 2
    assert "router ready" not in output
    last = errors.splitlines()[-1]
    assert last.startswith("chairlift serve: ")
    assert says in last


def test_b120_a_port_in_use_is_told_and_ends_all(tiny_model_folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with serving("--model", str(tiny_model_folder), "--listen", listen) as process:
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"--listen is {listen}: the port is in use" in errors.splitlines()[-1]


def test_it_serves_restarts_what_dies_and_stops_cleanly(tiny_model_folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    with serving("--model", str(tiny_model_folder), "--listen", address, "--dtype", "float32") as process:
        lines = until_ready(process)
        assert [line.split()[:2] for line in lines] == [[name, "ready"] for name in ALL]
        assert lines[-1].endswith(f"listening on {address}")
        assert ask(address).returncode == 0
        before = children_of(process)
        assert set(before) == set(ALL)
        os.kill(before["router"], signal.SIGKILL)
        until(lambda: children_of(process).get("router", before["router"]) != before["router"])
        until(lambda: ask(address).returncode == 0)
        after = children_of(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "the router was killed by signal 9; starting it again in 0.5 s" in errors
    assert not any(is_alive(pid) for pid in after.values())


def test_with_a_standby_there_are_two_schedulers_of_one_lease(tmp_path: Path) -> None:
    argv = ["--model", "m", "--standby", "--policy", "fair", "--metrics-listen", "127.0.0.1:9100"]
    settings = load(ServeSettings, argv, prog="chairlift serve")
    executor, first, second, router = services(settings, Path("m.gguf"), tmp_path)
    assert (first.name, second.name) == ("scheduler", "standby")
    for number, one in enumerate((first, second), start=1):
        assert (one.module, one.ready_when) == ("scheduler", "liveness")
        assert one.argv[one.argv.index("--lease") + 1] == f"{tmp_path}/lease"
        assert one.argv[one.argv.index("--scheduler-id") + 1] == one.name
        assert one.argv[one.argv.index("--metrics-listen") + 1] == f"127.0.0.1:{9100 + number}"
        assert "fair" in one.argv
    known = router.argv[router.argv.index("--scheduler") + 1]
    assert known == f"unix:{tmp_path}/scheduler.sock|unix:{tmp_path}/standby.sock"
    assert executor.argv[-1] != "fair"


def test_with_a_standby_a_killed_scheduler_is_not_missed(tiny_model_folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    flags = ("--model", str(tiny_model_folder), "--listen", address, "--dtype", "float32", "--standby")
    with serving(*flags) as process:
        until_ready(process)
        with Client(address) as client:
            options = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
            whole = client.generate("hi", **options)  # type: ignore[arg-type]
            for name in ("scheduler", "standby"):  # one of them leads
                with client.stream("hi", **options) as stream:  # type: ignore[arg-type]
                    token_ids = list(next(stream).token_ids)
                    os.kill(scheduler_of(process, name), signal.SIGKILL)
                    token_ids += [token_id for piece in stream for token_id in piece.token_ids]
                assert token_ids == list(whole.choices[0].token_ids)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def scheduler_of(process: subprocess.Popen[str], name: str) -> int:
    """The process of that id, once there is one."""
    while True:
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--scheduler-id" in words and words[words.index(b"--scheduler-id") + 1] == name.encode():
                    return int(pid)
        time.sleep(0.05)


def test_with_certificates_and_keys_it_serves_those_who_have_both(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "certs")
    folder, key = tmp_path / "certs", "chairlift-secret"
    (tmp_path / "tenants.toml").write_text(
        f'[acme]\nkeys = ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]\nweight = 2\n'
    )
    pair = ("--tls-cert", f"{folder}/router.crt", "--tls-key", f"{folder}/router.key")
    flags = ("--tls-ca", f"{folder}/ca.crt", *pair, "--tenants", f"{tmp_path}/tenants.toml")
    model = ("--model", str(tiny_model_folder), "--dtype", "float32")
    with serving(*model, "--listen", "127.0.0.1:0", *flags) as process:
        address = until_ready(process)[-1].rpartition(" ")[2]
        mine = {"tls_cert": f"{folder}/client.crt", "tls_key": f"{folder}/client.key"}
        for more, code in (({"api_key": key}, None), ({"api_key": ""}, "UNAUTHENTICATED")):
            with Client(address, tls_ca=f"{folder}/ca.crt", **mine, **more) as client:
                if code is None:
                    answer = client.generate("hi", max_tokens=2, ignore_eos=True)
                    assert len(answer.choices[0].token_ids) == 2
                else:
                    with pytest.raises(ChairliftError, match="an API key is required"):
                        client.generate("hi")
        with (
            Client(address, api_key=key, max_retries=0) as plain,
            pytest.raises(ChairliftError, match="it may speak TLS alone"),
        ):
            plain.generate("hi")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert key not in errors


def test_no_orphan_survives_a_killed_parent(tiny_model_folder: Path) -> None:
    with serving("--model", str(tiny_model_folder), "--listen", "127.0.0.1:0") as process:
        until(lambda: len(children_of(process)) == len(ALL))
        children = list(children_of(process).values())
        process.kill()
        process.wait()
        until(lambda: not any(is_alive(pid) for pid in children))


@pytest.mark.parametrize("reader", ["gone", "still"])
def test_whoever_reads_or_not_it_serves_restarts_what_dies_and_stops(
    reader: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Of its log nothing is read from the start, of stdout until it is ready."""
    leave = fill if reader == "still" else lambda stream: stream.close()
    flags = (
        "--model",
        str(tiny_model_folder),
        "--http",
        f"unix:{tmp_path}/http.sock",
        "--log-level",
        "debug",
    )
    address = f"unix:{tmp_path}/router.sock"
    with serving(*flags, "--listen", address) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        leave(process.stderr)
        until_ready(process)
        leave(process.stdout)
        before = children_of(process)
        os.kill(before["router"], signal.SIGKILL)
        until(lambda: children_of(process).get("router", before["router"]) != before["router"])
        until(lambda: ask(address).returncode == 0)
        after = children_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not any(is_alive(pid) for pid in after.values())


def fill(stream: IO[str]) -> None:
    """As much as the pipe holds that is read here."""
    writes = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writes, b"x" * size)
    finally:
        os.close(writes)


class FakeChild:
    """A process that is ready at once, and ends when the test says so."""

    def __init__(self, service: Service) -> None:
        self.name, self.address = service.name, "unix:/fake"
        self.num_starts = 0
        self.killed = asyncio.Event()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stopping, self.drained = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        self.num_starts += 1
        if self.num_starts > 1:
            raise OSError("no process can be started")

    async def serving(self) -> None:
        pass

    async def last_words(self) -> str:
        return "it is over"

    async def stop(self, _kill_after_seconds: float) -> None:
        self.stopping.set()
        await self.drained.wait()

    def kill(self) -> None:
        self.killed.set()


class Fakes:
    """`_serve` with one fake child, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: list[FakeChild] = []
        self.ready = asyncio.Event()
        monkeypatch.setattr(serve, "ChildProcess", self._child)
        monkeypatch.setattr(serve, "announce", lambda _line: self.ready.set())
        monkeypatch.setattr(serve, "_FIRST_RESTART_SECONDS", 0.0)
        settings = load(ServeSettings, ["--model", "m"], prog="chairlift serve")
        self.running = asyncio.ensure_future(serve._serve(settings, [Service("router", (), "router")]))

    def _child(self, service: Service) -> FakeChild:
        self.children.append(FakeChild(service))
        return self.children[-1]


async def test_a_second_sighup_harms_nothing_and_a_second_sigterm_kills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes = Fakes(monkeypatch)
    await fakes.ready.wait()
    (child,) = fakes.children
    signal.raise_signal(signal.SIGHUP)
    await child.stopping.wait()
    signal.raise_signal(signal.SIGHUP)
    await asyncio.sleep(0.05)
    assert not child.killed.is_set()
    signal.raise_signal(signal.SIGTERM)
    await child.killed.wait()
    child.drained.set()
    assert await fakes.running == 0


async def test_who_ignores_sighup_goes_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fakes = Fakes(monkeypatch)
        await fakes.ready.wait()
        (child,) = fakes.children
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not child.stopping.is_set()
        signal.raise_signal(signal.SIGTERM)
        child.drained.set()
        assert await fakes.running == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_what_cannot_be_started_again_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(monkeypatch)
    await fakes.ready.wait()
    (child,) = fakes.children
    child.drained.set()
    child.ended.set_result(1)
    with pytest.raises(OSError, match="no process can be started"):
        await fakes.running
    assert child.stopping.is_set()
