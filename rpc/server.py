"""The life of a service process: bind, announce, serve, drain at SIGTERM, end.

The service says what is served, and when it is healthy; nothing here knows.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc
import structlog
import uvloop
from grpc_reflection.v1alpha import reflection

from rpc import descriptors, log
from rpc import health as health_service
from rpc.address import AddressError
from rpc.announcing import announce
from rpc.channel import server_options
from rpc.door import Admit, Door, admit_all
from rpc.errors import StartError
from rpc.health import Health
from rpc.listening import bind
from rpc.metrics import Source
from rpc.metrics_door import MetricsDoor
from rpc.settings import ServiceSettings
from rpc.stop_signals import stop_signals

# After a complete drain: time for last messages to leave. Only streams that never end use it up.
_FAREWELL_SECONDS = 0.5
_log = structlog.get_logger()


class SideDoor(Protocol):
    """Another server in the same process and event loop, for clients that do not speak gRPC."""

    name: str

    async def open(self) -> str:
        """Begins to listen; returns the address. Raises StartError."""

    def close(self) -> None:
        """Refuses new calls from now on; running ones go on."""

    async def stop(self) -> None:
        """Ends what still runs, and the server."""


async def serve(
    settings: ServiceSettings,
    *,
    services: Mapping[str, Callable[[grpc.aio.Server], None]],
    health: Health,
    run: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    side_doors: Sequence[SideDoor] = (),
    metrics: Sequence[Source] = (),
    admit: Admit = admit_all,
    max_received_bytes: int | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    Args:
        settings: where to listen, limits, grace.
        services: full service name to what adds it to the server. They and health are what reflection shows.
        health: the service's health; the service itself says SERVING.
        run: the service's own background work. If it raises, the process ends with 1; if it returns, serving
            goes on.
        drain: returns when no request is left. From SIGTERM on, health says NOT_SERVING and new calls are
            refused with UNAVAILABLE; once `drain` has returned or `grace_seconds` are over, what still runs
            is ended (clients see UNAVAILABLE). Without it, open calls are waited for.
        side_doors: opened, closed and stopped along with the gRPC server; `drain` waits for their calls too.
        admit: looks at the headers of each call before anything else of it is read; health and reflection
            are open to all.
        max_received_bytes: the largest message taken, where that is less than what the setting says.
        metrics: what the service tells of itself at `--metrics-listen`, beside what every process does.

    SIGHUP drains too: there is nothing to reload, and a terminal that closes ends what runs in it. A second
    SIGTERM or SIGINT ends the process at once. Each bound address is announced on stdout as one line,
    `listening on ADDRESS`, in the order of the setting, and that of each side door as another, `NAME on
    ADDRESS`.

    Raises:
        StartError: the address cannot be had, or `run` found that the service cannot start.
    """
    descriptors.raise_limit()
    door = Door(admit)
    server = grpc.aio.server(
        interceptors=[door],
        options=server_options(
            max_message_bytes=settings.max_message_bytes, max_received_bytes=max_received_bytes
        ),
    )
    for add_to in services.values():
        add_to(server)
    await health.register(server)
    reflection.enable_server_reflection([*services, health_service.SERVICE_NAME], server)
    if settings.metrics_listen:
        side_doors = [*side_doors, MetricsDoor(settings.metrics_listen, [door.metrics, *metrics])]
    certificates = settings.tls()
    addresses = [
        bind(server, listen, certificates, demand_certificates=settings.demands_certificates)
        for listen in settings.listen.split(",")
    ]
    with stop_signals(_end_at_once) as stop_asked:
        work = None
        watching = asyncio.create_task(descriptors.watch())
        try:
            await server.start()
            for address in addresses:
                announce(f"listening on {address}")
                secured = certificates is not None and address.unix_path is None
                _log.info("listening", address=str(address), tls=secured)
            for side_door in side_doors:
                where = await side_door.open()
                announce(f"{side_door.name} on {where}")
                _log.info("listening", door=side_door.name, address=where)
            work = asyncio.ensure_future(run()) if run is not None else None
            failure = await _failure_before(stop_asked, work)
            await health.shut_down()
            door.close()
            for side_door in side_doors:
                side_door.close()
            if failure is None:
                await _drain(server, drain, settings.grace_seconds)
        finally:
            watching.cancel()
            await asyncio.gather(server.stop(0), *(side_door.stop() for side_door in side_doors))
            if work is not None:
                work.cancel()
                await asyncio.wait([work])
    if isinstance(failure, StartError):
        raise failure
    if failure is not None:
        _log.error("failed", exc_info=failure)
        return 1
    _log.info("stopped")
    return 0


def main(prog: str, service: Callable[[], Coroutine[None, None, int]]) -> NoReturn:
    """Runs a service to its end. What keeps it from starting is one line on stderr and exit code 2."""
    # Until `serve` drains at this signal. Process 1 of a container would not even hear of it.
    signal.signal(signal.SIGTERM, _end_at_once)
    try:
        code = uvloop.run(service())
    except (StartError, AddressError) as error:
        log.write(f"{prog}: {' '.join(str(error).split())}")
        code = 2
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends the process when what is registered for its exit is done.

    The interpreter would go on to wait for threads and to take every module apart: with torch loaded that is
    half a second of a processor, in which a process that has said that it stopped is still there. A thread at
    work inside of torch would even be unwound from there, which ends the process with an abort.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - there is no other name for it
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _end_at_once(number: int, _frame: object = None) -> NoReturn:
    log.flush()
    os._exit(128 + number)  # no handler, no thread may hold it up


async def _failure_before(
    stop_asked: asyncio.Event, work: asyncio.Future[Any] | None
) -> BaseException | None:
    """Waits for the signal to stop; returns what the background work failed with if that comes first."""
    signalled: asyncio.Future[Any] = asyncio.ensure_future(stop_asked.wait())
    if work is not None:
        await asyncio.wait([signalled, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception() is not None:
            signalled.cancel()
            return _lone(work.exception())
    await signalled
    return None


def _lone(failure: BaseException | None) -> BaseException | None:
    """A failure that a task group has wrapped alone, by itself: so that a StartError is known as one."""
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    return failure


async def _drain(
    server: grpc.aio.Server, drain: Callable[[], Awaitable[None]] | None, grace_seconds: float
) -> None:
    _log.info("draining", grace_seconds=grace_seconds)
    if drain is None:
        await server.stop(grace_seconds)
        return
    try:
        async with asyncio.timeout(grace_seconds):
            await drain()
    except TimeoutError:
        _log.warning("grace_over", grace_seconds=grace_seconds)
    else:
        await server.stop(_FAREWELL_SECONDS)
