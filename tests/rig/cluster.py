"""A whole server of real processes, over Unix sockets in one short folder.

    with running(model) as cluster:                      # executor, scheduler, router; all of them SERVING
        cluster.router.Complete(request)
        cluster.kill("executor"); cluster.restart("executor")

Processes are known by name; a test that wants several executors or schedulers starts them one by one.
Whatever happens, none outlives the `with` block; its log is shown when the test fails. Nothing here sleeps:
what must be waited for is asked of health.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import router_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from rpc.address import Address
from rpc.channel import connect
from tests.rig.scrape import Scrape, scrape
from tests.rig.scripted_executor import Script, ScriptedExecutor
from tests.rig.service_process import ServiceProcess

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
LOG_LINES_SHOWN = 60

LIVE: "list[Cluster]" = []
"""Clusters that run now: their logs belong to a failing test's report."""


class Cluster:
    """Processes by name, each of which can be killed, stopped and started again under the same address."""

    def __init__(self, model: Path, *, has_metrics: bool = False, fresh: bool = False) -> None:
        self.model = model
        self._fresh = fresh
        self._has_metrics = has_metrics
        self.folder = Path(tempfile.mkdtemp(prefix="cl-"))  # a socket's path has at most 107 bytes
        self._starts: dict[str, Callable[[], ServiceProcess]] = {}
        self._processes: dict[str, ServiceProcess] = {}
        self._ended: list[tuple[str, ServiceProcess]] = []
        self._channels: dict[str, grpc.Channel] = {}
        LIVE.append(self)

    # --- starting -----------------------------------------------------------------------------------

    def start_executor(self, *flags: str, name: str = "executor") -> None:
        """The real executor with this cluster's model; float32 and one thread unless told otherwise."""
        defaults = ("--dtype", "float32", "--num-threads", "1")
        self._start(name, "executor", "--model", str(self.model), *defaults, *flags)

    def start_scripted_executor(self, script: Script, *flags: str, name: str = "executor") -> None:
        """An executor with a script in place of the model."""
        script = replace(script, log_path=script.log_path or str(self.folder / f"{name}.steps.jsonl"))
        script_path = self.folder / f"{name}.script.json"
        script_path.write_text(script.to_json())
        own = (*self._metrics_flags(name), *flags)
        self._run(
            name, lambda: ScriptedExecutor(script_path, script, self.address(name), *own, fresh=self._fresh)
        )

    def start_scheduler(
        self, *flags: str, name: str = "scheduler", executors: Sequence[str] = ("executor",)
    ) -> None:
        addresses = ",".join(map(self.address, executors))
        self._start(name, "scheduler", "--executor", addresses, *flags)

    def start_router(
        self, *flags: str, name: str = "router", schedulers: Sequence[str] = ("scheduler",)
    ) -> None:
        """Each of `schedulers` is a shard: a scheduler's name, or several parted by `|` that stand by."""
        addresses = ",".join("|".join(map(self.address, shard.split("|"))) for shard in schedulers)
        self._start(name, "router", "--model", str(self.model), "--scheduler", addresses, *flags)

    def wait(self) -> None:
        """Returns when every process says SERVING. Raises RuntimeError, with the log, for one that ends."""
        for process in self._processes.values():
            process.wait_until_serving()

    def _start(self, name: str, module: str, *flags: str) -> None:
        listen = ("--listen", self.address(name), "--log-format", "json", *self._metrics_flags(name))
        self._run(name, lambda: ServiceProcess(module, *listen, *flags, fresh=self._fresh))

    def _run(self, name: str, start: Callable[[], ServiceProcess]) -> None:
        self._starts[name] = start
        self._processes[name] = start()

    def _metrics_flags(self, name: str) -> tuple[str, ...]:
        return ("--metrics-listen", self.metrics_address(name)) if self._has_metrics else ()

    # --- one process --------------------------------------------------------------------------------

    def address(self, name: str) -> str:
        """Where the process of this name listens, or will."""
        return f"unix:{self.folder}/{name}.sock"

    def metrics_address(self, name: str) -> str:
        """Where the process of this name tells its metrics, if the cluster has them."""
        return f"unix:{self.folder}/{name}.metrics"

    def scrape(self, name: str) -> Scrape:
        """What it tells now."""
        return scrape(self.metrics_address(name))

    @property
    def names(self) -> set[str]:
        """Of the processes that were started and neither killed nor stopped."""
        return set(self._processes)

    def process(self, name: str) -> ServiceProcess:
        return self._processes[name]

    def scripted(self, name: str = "executor") -> ScriptedExecutor:
        """A scripted executor, to ask which steps it ran."""
        process = self._processes[name]
        assert isinstance(process, ScriptedExecutor)
        return process

    def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._take(name).kill()

    def stop(self, name: str, timeout_seconds: float = 15.0) -> int:
        """SIGTERM; returns its exit code when it has drained."""
        process = self._take(name)
        process.terminate()
        return process.wait(timeout_seconds)

    def restart(self, name: str) -> None:
        """The same again, once it was killed or stopped. Does not wait until it serves."""
        self._processes[name] = self._starts[name]()

    def is_serving(self, name: str) -> bool:
        """Whether the process answers that it serves; false when it does not answer at once."""
        stub = health_pb2_grpc.HealthStub(self.channel(name))
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def _take(self, name: str) -> ServiceProcess:
        process = self._processes.pop(name)
        self._ended.append((name, process))
        return process

    # --- calling ------------------------------------------------------------------------------------

    @property
    def router(self) -> router_pb2_grpc.RouterStub:
        return router_pb2_grpc.RouterStub(self.channel("router"))

    @property
    def scheduler(self) -> scheduler_pb2_grpc.SchedulerStub:
        return scheduler_pb2_grpc.SchedulerStub(self.channel("scheduler"))

    def load(self) -> scheduler_pb2.GetLoadResponse:
        """How busy the scheduler is."""
        return self.scheduler.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=5)

    def channel(self, name: str) -> grpc.Channel:
        """One blocking channel to each process, kept to the end."""
        if name not in self._channels:
            self._channels[name] = grpc.insecure_channel(
                Address.parse(self.address(name), field="address").target,
                options=[
                    ("grpc.default_authority", "localhost"),
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.max_reconnect_backoff_ms", 200),
                    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ],
            )
        return self._channels[name]

    def aio_channel(self, name: str = "router") -> grpc.aio.Channel:
        """A channel for the running event loop; the caller closes it."""
        return connect(
            Address.parse(self.address(name), field="address"), max_message_bytes=MAX_MESSAGE_BYTES
        )

    # --- the end ------------------------------------------------------------------------------------

    def logs(self) -> str:
        """The end of every process' log, those that were killed included."""
        return "\n".join(
            f"--- {name} (pid {process.pid}) ---\n"
            + "".join(process.stderr.splitlines(True)[-LOG_LINES_SHOWN:])
            for name, process in [*self._ended, *self._processes.items()]
        )

    def close(self) -> None:
        """Ends every process at once and removes the folder."""
        LIVE.remove(self)
        for channel in self._channels.values():
            channel.close()
        for process in reversed(self._processes.values()):
            process.close()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def running(
    model: Path,
    *,
    script: Script | None = None,
    executor_flags: Sequence[str] = (),
    scheduler_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
    has_metrics: bool = False,
) -> Iterator[Cluster]:
    """One executor (scripted when a script is given), one scheduler, one router, all SERVING."""
    with assembling(model, has_metrics=has_metrics) as cluster:
        if script is None:
            cluster.start_executor(*executor_flags)
        else:
            cluster.start_scripted_executor(script)
        cluster.start_scheduler(*scheduler_flags)
        cluster.start_router(*router_flags)
        cluster.wait()
        yield cluster


@contextlib.contextmanager
def assembling(model: Path, *, has_metrics: bool = False, fresh: bool = False) -> Iterator[Cluster]:
    """An empty cluster, for a test that starts its processes itself, `fresh` or not."""
    cluster = Cluster(model, has_metrics=has_metrics, fresh=fresh)
    try:
        yield cluster
    except BaseException as error:
        error.add_note(cluster.logs())
        raise
    finally:
        cluster.close()
