"""`python -m scheduler`: runs one scheduler process."""

import rpc.early_stop  # noqa: F401 # isort: skip - before the imports that take seconds

import asyncio
import functools
import secrets
import sys
from pathlib import Path

import structlog

from protos.v1 import scheduler_pb2, scheduler_pb2_grpc
from rpc import collector, log, server, tracing
from rpc.address import Address
from rpc.errors import StartError
from rpc.health import Health
from rpc.settings import load
from rpc.tracing import Tracer
from scheduler import wire
from scheduler.config import SchedulerSettings
from scheduler.core import SchedulerCore
from scheduler.executor_directory import ExecutorDirectory
from scheduler.executor_loop import ExecutorLoop
from scheduler.leadership import Leadership
from scheduler.lease import Lease
from scheduler.lease_file import LeaseFile
from scheduler.metrics import SchedulerMetrics
from scheduler.recorder import Recorder, RecordingCore
from scheduler.running_scheduler import RunningScheduler
from scheduler.servicer import SchedulerServicer
from scheduler.traces import SequenceTraces

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name


async def run(argv: list[str]) -> int:
    """Serves until told to stop; returns the exit code."""
    settings = load(SchedulerSettings, argv, prog="chairlift scheduler")
    log.configure("scheduler", fmt=settings.log_format, level=settings.log_level)
    with tracing.opened(settings, "scheduler") as tracer:
        return await _serve(settings, tracer)


async def _serve(settings: SchedulerSettings, tracer: Tracer | None) -> int:
    certificates = settings.tls()
    health = Health([SERVICE])
    recorder = _recorder(settings) if settings.record else None
    make_core = SchedulerCore if recorder is None else functools.partial(RecordingCore, recorder)
    core = make_core(
        settings.limits,
        settings.batching,
        padding_sampling=wire.padding_sampling(),
        cache_secret=secrets.token_bytes(32),
    )
    core.witness = None if tracer is None else SequenceTraces(tracer)
    scheduler = RunningScheduler(core, on_serving=health.serving)
    servicer = SchedulerServicer(
        scheduler, scheduler_id=settings.name, router_stall_seconds=settings.router_stall_seconds
    )

    async def lead(term: int) -> None:
        def executor_loop(address: Address) -> ExecutorLoop:
            return ExecutorLoop(
                scheduler,
                address,
                scheduler_id=settings.name,
                reattach_seconds=settings.reattach_seconds,
                max_message_bytes=settings.max_message_bytes,
                step_timeout_seconds=settings.step_timeout,
                tls=certificates,
                term=term,
                on_held=None if leadership is None else leadership.fenced,
            )

        structlog.get_logger().info("waiting_for_executor", executor=settings.executor)
        await ExecutorDirectory(settings.executor_addresses, executor_loop).run()

    leadership = None
    if settings.lease:
        lease = Lease(settings.name, settings.lease_seconds)
        leadership = Leadership(lease, LeaseFile(Path(settings.lease)), scheduler, lead)

    collector.configure()

    async def background() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scheduler.run_timers())
            tasks.create_task(lead(term=0) if leadership is None else leadership.run())

    try:
        return await server.serve(
            settings,
            services={
                SERVICE: lambda grpc_server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(
                    servicer, grpc_server
                )
            },
            health=health,
            metrics=[SchedulerMetrics(scheduler).families],
            run=background,
            drain=scheduler.drained if leadership is None else leadership.drained,
        )
    finally:
        if recorder is not None:
            recorder.close()


def _recorder(settings: SchedulerSettings) -> Recorder:
    """Opens the file of `--record`. Raises StartError."""
    path = Path(settings.record)
    try:
        recorder = Recorder(path, settings.limits, settings.batching, scheduler_id=settings.name)
    except OSError as error:
        raise StartError(
            f"--record is {settings.record!r}: the file cannot be made ({error.strerror or error})"
        ) from error
    structlog.get_logger().info("recording", file=str(recorder.path))
    return recorder


def main() -> None:
    """Entry point of the process."""
    server.main("chairlift scheduler", lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
