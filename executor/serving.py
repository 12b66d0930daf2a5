"""The life of the process that serves a runner: load it, warm it up, serve, drain; and what ends it early.

The port opens before the model is there, and health tells when it is. Two things end the process before its
time: a device that cannot make a token any more, and the loss of whatever else the runner needs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from executor.device import Runner
from executor.device_thread import DeviceThread
from executor.model import ModelError
from executor.servicer import SERVICE_NAME, ExecutorServicer
from executor.traces import StepTraces
from protos.v1 import executor_pb2_grpc
from rpc import server as rpc_server
from rpc.errors import StartError
from rpc.health import Health
from rpc.settings import ServiceSettings


async def serve(
    settings: ServiceSettings,
    load: Callable[[], Runner],
    *,
    max_num_seqs: int,
    token_budget: Callable[[str], int],
    max_window: int,
    watch: Callable[[], Awaitable[NoReturn]] | None = None,
    traces: StepTraces | None = None,
) -> tuple[int, bool]:
    """Serve the runner that `load` makes until SIGTERM.

    The port opens at once; health says SERVING when the runner has made a real token. `watch` raises when
    something else that the runner needs is gone: it is the end, whatever the device does.

    Returns the exit code, and whether the device's thread is still at work: loading, or in a step that never
    returns.
    """
    health = Health([SERVICE_NAME])
    device = DeviceThread()
    device_lost: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    def lose_device(error: BaseException) -> None:
        health.serving(False, "the device cannot make a token any more")
        if not device_lost.done():
            device_lost.set_exception(error)

    servicer = ExecutorServicer(
        device,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_window=max_window,
        grace_seconds=settings.grace_seconds,
        on_device_lost=lose_device,
        traces=traces,
    )

    async def run() -> None:
        work = [asyncio.ensure_future(serve_runner())]
        if watch is not None:
            work.append(asyncio.ensure_future(watch()))
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            # What is watched first: it is why the device fails, if both do.
            for each in reversed(work):
                if each.done():
                    await each
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def serve_runner() -> None:
        runner = await _warm(device, load)
        device.work_ahead = runner.work_ahead
        servicer.ready(runner)
        health.serving(True)
        await device_lost

    try:
        code = await rpc_server.serve(
            settings,
            services={
                SERVICE_NAME: lambda server: executor_pb2_grpc.add_ExecutorServicer_to_server(
                    servicer, server
                )
            },
            health=health,
            metrics=[servicer.metrics.families],
            run=run,
            drain=servicer.drain,
        )
    finally:
        has_ended = device.close()
    return code, not has_ended


async def _warm(device: DeviceThread, load: Callable[[], Runner]) -> Runner:
    """The runner that `load` makes, when it has made a real token. Raises StartError when it cannot."""
    runner = await device.call(load)
    try:
        await device.call(runner.warm_up)
    except ModelError as error:
        raise StartError(str(error)) from error
    return runner
