"""`chairlift top`: shows the batch of a running server as a moving picture in the terminal.

The live page's picture, from the same source: the router's Watch. What is drawn is made in `lift` and
`lift_drawing`; here the steps are read and the clock is asked.
"""

import asyncio
import contextlib
import sys
import time

import grpc
from rich.console import Console
from rich.live import Live

from chairlift.calls import Router, router_at
from chairlift.latency_drawing import Waits
from chairlift.lift import Lift
from chairlift.lift_drawing import screen
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.router_flags import add_flags, parsed, run
from chairlift.summaries import frame_of
from chairlift.tables import PlainConsole
from protos.v1 import router_pb2, router_pb2_grpc
from rpc.cancel import heed_cancel

_FRAMES_PER_SECOND = 8
_RETRY_SECONDS = 1.0
_WAITS_SECONDS = 1.0


def _waits_of(histogram: router_pb2.Histogram) -> Waits:
    return Waits(tuple(histogram.bounds), tuple(histogram.counts))


def main(argv: list[str]) -> int:
    """Shows it until Ctrl-C; returns the exit code."""
    parser = Parser(
        prog="chairlift top",
        description="The batch of a running router as a moving picture in the terminal. Ctrl-C ends it.",
    )
    add_flags(parser)
    options, router = parsed(parser, argv)
    console = PlainConsole()
    if not console.is_terminal:
        print("chairlift top draws on a terminal; `chairlift watch` writes lines", file=sys.stderr)
        return 2
    try:
        run(_Top(router, console).follow(), router, options, parser.prog)
    except ChairliftError as error:
        print(f"chairlift top: {error}", file=sys.stderr)
        return 1
    return 0


class _Top:
    """One router, looked at."""

    def __init__(self, router: Router, console: Console) -> None:
        self._router = router
        self._console = console
        self._lifts: dict[str, Lift] = {}
        self._waits: dict[str, Waits] = {}
        self._model = ""
        self._state = "connecting"

    async def follow(self) -> None:
        """Reads and draws, for ever; a router that goes away is asked again.

        Raises:
            ChairliftError: the router does not answer at first, or refuses to show its steps.
        """
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            drawing = asyncio.create_task(self._draw(live))
            try:
                while True:
                    await self._read()
                    heed_cancel()
                    await asyncio.sleep(_RETRY_SECONDS)
            finally:
                drawing.cancel()

    async def _read(self) -> None:
        try:
            async with router_at(self._router) as stub:
                served = await stub.GetModel(router_pb2.GetModelRequest(), metadata=self._router.metadata)
                self._model, self._state = served.model, ""
                asking = asyncio.create_task(self._ask_for_waits(stub))
                try:
                    await self._watch(stub)
                finally:
                    asking.cancel()
        except ChairliftError as error:
            if error.code != "UNAVAILABLE" or not self._model:
                raise
            self._state = str(error)

    async def _watch(self, stub: "router_pb2_grpc.RouterAsyncStub") -> None:
        async for summary in stub.Watch(router_pb2.WatchRequest(), metadata=self._router.metadata):
            lift = self._lifts.setdefault(summary.executor_id, Lift())
            lift.take(frame_of(summary), time.monotonic())
            for other in self._lifts.values():
                if other is not lift:
                    other.lose(lift.boarded)

    async def _ask_for_waits(self, stub: "router_pb2_grpc.RouterAsyncStub") -> None:
        """How long clients wait, once a second; when the router does not say, `_watch` learns why."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await stub.GetStatus(router_pb2.GetStatusRequest(), metadata=self._router.metadata)
                self._waits = {
                    "first token": _waits_of(status.time_to_first_token),
                    "between tokens": _waits_of(status.inter_token),
                }
            heed_cancel()
            await asyncio.sleep(_WAITS_SECONDS)

    async def _draw(self, live: Live) -> None:
        # In the loop that reads, not in a thread of its own: nothing changes under the pen.
        while True:
            width, height = self._console.size
            picture = screen(
                self._lifts,
                title=f"{self._model} at {self._router.address}".removeprefix(" "),
                state=self._state,
                width=width,
                height=height,
                now=time.monotonic(),
                waits=self._waits,
            )
            live.update(picture, refresh=True)
            await asyncio.sleep(1 / _FRAMES_PER_SECOND)
