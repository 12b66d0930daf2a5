"""`chairlift serve`: router, scheduler and executor on one machine, as processes that live and end together.

They speak over Unix sockets in a private folder; only the router can be reached from outside, and it alone
takes certificates. What a flag means is known by the service that takes it: here it is only handed on.

Whoever reads what they and we say may stand still or go: we watch over them all the same.
"""

import asyncio
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from chairlift.child_process import ChildProcess, Service
from chairlift.models_dir import default_models_dir, resolve
from rpc import log
from rpc.address import Address, AddressError
from rpc.announcing import announce
from rpc.errors import StartError
from rpc.settings import Settings, load
from rpc.stop_signals import stop_signals

SECRET = "cluster-secret"  # noqa: S105 - the name of a file
_FIRST_RESTART_SECONDS = 0.5
_LONGEST_RESTART_SECONDS = 10.0
_STEADY_SECONDS = 60.0
_LAST_PORT = 65_535
# A service that has had its grace and does not end is killed after this long.
_KILL_AFTER_SECONDS = 5.0


class ServeSettings(Settings):
    """Flags and CHAIRLIFT_ environment variables; what is not given is the service's own default."""

    model: str = Field(description="A folder, a GGUF file, or the name of a pulled model such as smollm2.")
    listen: str = Field(
        default="127.0.0.1:50051", description="Where clients connect: HOST:PORT or unix:PATH."
    )
    http: str | None = Field(
        default=None, description="Where to serve OpenAI's HTTP too: HOST:PORT or unix:PATH."
    )
    http_hosts: str | None = Field(
        default=None, description="Names that the HTTP door answers to as Host, separated by commas; *: any."
    )
    dtype: str | None = Field(
        default=None, description="Number type of the computation: float32 or bfloat16."
    )
    quantization: str | None = Field(
        default=None, description="Form of the matrices in memory, on cpu: none, int8 or stored."
    )
    device: str | None = Field(default=None, description="Where it runs: auto, cpu or cuda.")
    attention: str | None = Field(
        default=None, description="What computes attention: flash3, flash2, triton or reference."
    )
    gpu_memory_utilization: float | None = Field(
        default=None, description="Share of a GPU's memory that the executor may fill."
    )
    num_blocks: int | None = Field(default=None, description="KV blocks.")
    block_size: int | None = Field(default=None, description="Tokens in a KV block.")
    num_threads: int | None = Field(default=None, description="Threads of the executor's computation.")
    tensor_parallel: int | None = Field(
        default=None, description="Processes of the executor, which share the model out among them."
    )
    max_num_seqs: int | None = Field(
        default=None, description="Most sequences in a batch; never more than --max-num-batched-tokens."
    )
    max_num_batched_tokens: int | None = Field(default=None, description="Most tokens in one step.")
    max_step_ms: float | None = Field(
        default=None, description="Wanted duration of a step while anything decodes, ms."
    )
    window: int | None = Field(default=None, description="Most plans under way at once: 1 or 2.")
    late_plans: bool | None = Field(
        default=None, description="Whether plans leave as late as they can (default: yes)."
    )
    batching: str | None = Field(
        default=None, description="iteration, or for comparison request, request-padded."
    )
    policy: str | None = Field(default=None, description="Who is served next: fcfs, fair or deadline.")
    admission: str | None = Field(
        default=None, description="Room a newcomer must find: reserve, forecast or optimistic."
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        description="Most tokens of a sequence that are guessed for one step (default: 8; 0: none).",
    )
    prefix_caching: bool | None = Field(
        default=None, description="Whether equal beginnings of prompts are computed once (default: yes)."
    )
    aging_seconds: float | None = Field(
        default=None, description="Waiting this long is worth one importance class."
    )
    max_queued: int | None = Field(default=None, description="Most waiting requests beyond the free seats.")
    max_queued_tokens: int | None = Field(default=None, description="Most prompt tokens of all that wait.")
    record: str | None = Field(
        default=None, description="A file that the scheduler's inputs are written to, for `chairlift replay`."
    )
    tenants: str | None = Field(
        default=None,
        description="A TOML file of tenants: API keys (every request needs one), limits, weights.",
    )
    tls_cert: str | None = Field(default=None, description="Certificate (PEM): clients must speak TLS.")
    tls_key: str | None = Field(default=None, description="The certificate's key (PEM, not encrypted).")
    tls_ca: str | None = Field(
        default=None, description="CA certificates (PEM): clients must show a certificate of it."
    )
    tls_clients: str | None = Field(
        default=None, description="With --tls-ca: certificate, or any client (keys tell who it is)."
    )
    model_name: str | None = Field(default=None, description="The name that clients call the model by.")
    generation_config: str | None = Field(
        default=None, description="model: its generation config fills in what a request leaves out; or none."
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="How the model writes calls of tools: auto (as its chat template shows), hermes, "
        "llama3_json, mistral; none: text stays text.",
    )
    default_max_tokens: int | None = Field(
        default=None, description="Most tokens when a request does not say."
    )
    recovery_timeout: float | None = Field(
        default=None,
        description="How long a running request waits for what was lost, scheduler or executor, seconds.",
    )
    client_stall_seconds: float | None = Field(
        default=None, description="A client that takes nothing for this long is cut."
    )
    metrics_listen: str | None = Field(
        default=None,
        description="Where to serve Prometheus metrics, HOST:PORT: the router's there, the scheduler's and "
        "the executor's at the next two ports (a standby's between those).",
    )
    standby: bool = Field(
        default=False,
        description="Whether a second scheduler stands by, and goes on at once when the first one dies.",
    )
    traces: str | None = Field(
        default=None,
        description="Collector to send traces to (OpenTelemetry, OTLP over gRPC): HOST:PORT or https://HOST:PORT.",
    )
    trace_steps: int | None = Field(
        default=None, description="With --traces, every how many steps one gets a span; 0: none."
    )
    grace_seconds: float = Field(
        default=30.0, ge=0, description="How long running requests may go on after SIGTERM."
    )
    max_message_bytes: int | None = Field(default=None, description="Largest message sent or taken, bytes.")
    max_request_bytes: int | None = Field(
        default=None, description="Largest message or body taken from a client, bytes."
    )
    log_format: Literal["console", "json"] = Field(
        default="console" if sys.stderr.isatty() else "json", description="console or json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error."
    )


ALL = ("executor", "scheduler", "router")
STANDBY = "standby"
# Which services take which flag.
TAKEN_BY: dict[str, tuple[str, ...]] = {
    "model": ("executor", "router"),
    "dtype": ("executor",),
    "quantization": ("executor",),
    "device": ("executor",),
    "attention": ("executor",),
    "gpu_memory_utilization": ("executor",),
    "num_blocks": ("executor", "scheduler"),
    "block_size": ("executor",),
    "num_threads": ("executor",),
    "tensor_parallel": ("executor",),
    "max_num_seqs": ("executor", "scheduler"),
    "max_num_batched_tokens": ("executor", "scheduler"),
    "max_step_ms": ("scheduler",),
    "window": ("executor", "scheduler"),
    "late_plans": ("scheduler",),
    "batching": ("scheduler",),
    "policy": ("scheduler",),
    "admission": ("scheduler",),
    "num_speculative_tokens": ("scheduler",),
    "prefix_caching": ("scheduler",),
    "aging_seconds": ("scheduler",),
    "max_queued": ("scheduler",),
    "max_queued_tokens": ("scheduler",),
    "record": ("scheduler",),
    "tenants": ("scheduler", "router"),
    "tls_cert": ("router",),
    "tls_key": ("router",),
    "tls_ca": ("router",),
    "tls_clients": ("router",),
    "http": ("router",),
    "http_hosts": ("router",),
    "model_name": ("router",),
    "generation_config": ("router",),
    "tool_call_parser": ("router",),
    "default_max_tokens": ("router",),
    "recovery_timeout": ("scheduler", "router"),
    "client_stall_seconds": ("router",),
    "traces": ALL,
    "trace_steps": ("executor",),
    "grace_seconds": ALL,
    "max_message_bytes": ALL,
    "max_request_bytes": ("router",),
    "log_format": ALL,
    "log_level": ALL,
}


def services(settings: ServeSettings, model: Path, folder: Path) -> list[Service]:
    """The processes, in the order in which they become ready. `folder` has sockets, lease and secret."""
    schedulers = ("scheduler", STANDBY) if settings.standby else ("scheduler",)
    modules = {"executor": "executor"} | dict.fromkeys(schedulers, "scheduler") | {"router": "router"}
    sockets = {name: f"unix:{folder}/{name}.sock" for name in modules}
    own = {
        "executor": ["--listen", sockets["executor"]],
        **{name: ["--listen", sockets[name], "--executor", sockets["executor"]] for name in schedulers},
        # Its own socket too: by it we see how it is, whatever certificates clients must show.
        "router": [
            *("--listen", f"{settings.listen},{sockets['router']}"),
            *("--scheduler", "|".join(sockets[name] for name in schedulers)),
            *("--cluster-secret-file", str(folder / SECRET)),
        ],
    }
    if settings.standby:
        for name in schedulers:
            own[name] += ["--lease", str(folder / "lease"), "--scheduler-id", name]
    for name, listen in zip(
        ("router", *schedulers, "executor"),
        _metrics_ports(settings.metrics_listen, len(modules)),
        strict=False,
    ):
        own[name] += ["--metrics-listen", listen]
    given = settings.model_dump(exclude_none=True) | {"model": str(model)}
    for field, names in TAKEN_BY.items():
        if field in given:
            for name, module in modules.items():
                if module in names:
                    own[name] += _flag(field.replace("_", "-"), given[field])
    # Of two schedulers one stands by, and does not serve: they are ready when they answer.
    ready_when = {"scheduler": "liveness"} if settings.standby else {}
    return [
        Service(name, tuple(own[name]), module, ready_when.get(module, ""))
        for name, module in modules.items()
    ]


def _flag(name: str, value: object) -> list[str]:
    """As the services' command lines have it."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _metrics_ports(listen: str | None, count: int) -> list[str]:
    """So many ports in a row from that of `listen` on. Raises AddressError."""
    if listen is None:
        return []
    host, _, port = str(Address.parse(listen, field="--metrics-listen")).rpartition(":")
    last = _LAST_PORT - count + 1
    if not port.isdecimal() or not 0 < int(port) <= last:
        raise AddressError(
            f"--metrics-listen is {listen!r}: it must be HOST:PORT with a port from 1 to {last}, "
            f"since {count} in a row are taken"
        )
    return [f"{host}:{int(port) + i}" for i in range(count)]


def main(argv: list[str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        settings = load(ServeSettings, argv, prog="chairlift serve")
        Address.parse(settings.listen, field="--listen")
        model = resolve(settings.model, default_models_dir())
        log.configure("serve", fmt=settings.log_format, level=settings.log_level)
        with tempfile.TemporaryDirectory(prefix="chairlift-") as name:
            folder = Path(name)
            # A router that is started again goes on with the streams of the one before.
            (folder / SECRET).write_bytes(secrets.token_bytes(32))
            wanted = services(settings, model, folder)
            for service in wanted:
                Address.parse(service.listens_at[-1], field=f"the {service.name}'s socket (see TMPDIR)")
            return asyncio.run(_serve(settings, wanted))
    except (StartError, AddressError) as error:
        log.write(f"chairlift serve: {str(error).removeprefix('chairlift ')}")
        return 2


async def _serve(settings: ServeSettings, wanted: list[Service]) -> int:
    started = time.monotonic()
    children = [ChildProcess(service) for service in wanted]

    def kill_all(_number: object) -> None:
        for child in children:
            child.kill()

    with stop_signals(kill_all) as stop_asked:
        stopped = asyncio.ensure_future(stop_asked.wait())
        keepers: list[asyncio.Future[Any]] = []
        try:
            for child in children:
                await child.start()
            for child in children:
                if not await _ready_before(child, children, stopped):
                    return 0
                where = f", listening on {child.address}" if child is children[-1] else ""
                announce(f"{child.name} ready after {time.monotonic() - started:.1f} s{where}")
            keepers += [asyncio.ensure_future(_keep_alive(child)) for child in children]
            # A keeper ends by an exception alone: its process cannot be started again, and all end.
            await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
        finally:
            stopped.cancel()
            for keeper in keepers:
                keeper.cancel()
            # From the door inwards: each tier drains while those it needs are still there.
            for child in reversed(children):
                await child.stop(settings.grace_seconds + _KILL_AFTER_SECONDS)
    return 0


async def _ready_before(
    child: ChildProcess, children: list[ChildProcess], stopped: "asyncio.Future[Any]"
) -> bool:
    """Waits until `child` is SERVING; False when it was told to stop first.

    Raises:
        StartError: one of the processes ended, with the last words of that one.
    """
    ready = asyncio.ensure_future(child.serving())
    try:
        await asyncio.wait(
            [ready, stopped, *(other.ended for other in children)], return_when=asyncio.FIRST_COMPLETED
        )
        if stopped.done():
            return False
        for other in children:
            if other.ended.done():
                raise StartError(await other.last_words())
        return True
    finally:
        ready.cancel()


async def _keep_alive(child: ChildProcess) -> None:
    """Starts a process again whenever it ends, after a pause that grows while it keeps ending early."""
    pause = _FIRST_RESTART_SECONDS
    while True:
        started = time.monotonic()
        await asyncio.wait([child.ended])
        if time.monotonic() - started > _STEADY_SECONDS:
            pause = _FIRST_RESTART_SECONDS
        log.write(f"{await child.last_words()}; starting it again in {pause:g} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_RESTART_SECONDS)
        await child.start()
