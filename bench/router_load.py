"""The router alone under load: many open streams, one message for each token, on one core.

    python -m bench.router_load [--streams 1000] [--rates 5000,20000] [--seconds 10] [--profile FILE]

A paced scheduler gives one token to `width` sequences with each message, in turn, so many tokens a second; it
has no queue and no executor, so that what is measured is the router's. The router runs on a core of its own
(the first it may use), scheduler and clients elsewhere. For each rate: tokens that clients got in a second,
the latency added to a token (from the scheduler's write to the client's read, their own turns included; all
clocks are the machine's monotonic one), tokens for each message, and the longest time for which the router's
event loop answered nobody. On a machine of few cores clients and router take turns, and figures say nothing.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import common_pb2, router_pb2, router_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from router import model_files
from router.tokenizer import Tokenizer
from rpc.address import Address
from rpc.channel import connect, server_options

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 1 << 20
TOKEN_IDS = range(300, 1300)  # ordinary words in turn

# --- the paced scheduler ----------------------------------------------------------------------------


class PacedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Accepts whatever comes; once it has every stream, gives tokens at the wanted rate for a while."""

    def __init__(self, welcome: scheduler_pb2.Welcome, args: argparse.Namespace, rate: int) -> None:
        self._welcome = welcome
        self._args = args
        self._rate = rate
        self._handles: list[int] = []
        self._all_here = asyncio.Event()
        self.written_at: list[float] = []
        """Of each message with tokens, in order."""
        self.done = asyncio.Event()
        """Every stream has been told its end."""

    async def Connect(  # type: ignore[override]  # noqa: N802 - the contract's; the stubs know no handler that writes
        self, request_iterator: Any, context: Any
    ) -> None:
        """One router's stream."""
        reading = asyncio.ensure_future(self._read(request_iterator, context))
        await self._all_here.wait()
        await self._give(context)
        self.done.set()
        await reading

    async def _read(self, messages: Any, context: Any) -> None:
        async for message in messages:
            if message.HasField("hello"):
                status = scheduler_pb2.ServingStatus(serving=True)
                await context.write(scheduler_pb2.SchedulerMessage(serving_status=status))
                await context.write(scheduler_pb2.SchedulerMessage(welcome=self._welcome))
            if message.HasField("submit"):
                self._handles.append(message.submit.handle)
                if len(self._handles) == self._args.streams:
                    self._all_here.set()

    async def _give(self, context: Any) -> None:
        numbers = itertools.count(1)
        accepted = scheduler_pb2.StepOutput(message_id=next(numbers), accepted=self._handles)
        await context.write(scheduler_pb2.SchedulerMessage(step_output=accepted))
        await asyncio.sleep(2)  # every client has its first event
        width, interval = self._args.width, self._args.width / self._rate
        turns = itertools.cycle(
            self._handles[first : first + width] for first in range(0, len(self._handles), width)
        )
        token_ids = itertools.cycle(TOKEN_IDS)
        begin = time.monotonic()
        for step in range(int(self._args.seconds / interval)):
            await asyncio.sleep(begin + step * interval - time.monotonic())
            handles = next(turns)
            output = scheduler_pb2.StepOutput(
                message_id=next(numbers),
                handles=handles,
                num_tokens=[1] * len(handles),
                token_ids=[next(token_ids)] * len(handles),
            )
            self.written_at.append(time.monotonic())
            await context.write(scheduler_pb2.SchedulerMessage(step_output=output))
        await asyncio.sleep(2)  # what is on the way arrives
        finished = [
            scheduler_pb2.SequenceFinished(handle=handle, reason=common_pb2.FINISH_REASON_STOP)
            for handle in self._handles
        ]
        output = scheduler_pb2.StepOutput(message_id=next(numbers), finished=finished)
        await context.write(scheduler_pb2.SchedulerMessage(step_output=output))


def schedule(address: str, model: str, args: argparse.Namespace, rate: int, cores: set[int]) -> list[float]:
    """A process: serves one router until its streams have ended; returns when it wrote each message."""
    os.sched_setaffinity(0, cores)

    async def serve() -> list[float]:
        tokenizer = Tokenizer(model_files.read(Path(model)))
        welcome = scheduler_pb2.Welcome(
            scheduler_id="paced",
            term=1,
            protocol_revision=1,
            max_total_tokens=2 * MAX_TOKENS,
            vocab_size=tokenizer.vocab_size,
            fingerprints=common_pb2.Fingerprints(tokenizer=tokenizer.fingerprint),
        )
        scheduler = PacedScheduler(welcome, args, rate)  # type: ignore[abstract]  # nobody asks for the rest
        server = grpc.aio.server(options=server_options(max_message_bytes=MAX_MESSAGE_BYTES))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
        server.add_insecure_port(address)
        await server.start()
        await scheduler.done.wait()
        await server.stop(2)
        return scheduler.written_at

    return asyncio.run(serve())


# --- clients ----------------------------------------------------------------------------------------


def listen(address: str, num_streams: int, cores: set[int]) -> list[tuple[int, list[tuple[float, int]]]]:
    """A process of clients: for each stream the token it began with, and (read at, tokens) of each delta."""
    os.sched_setaffinity(0, cores)

    async def one(stub: "router_pb2_grpc.RouterAsyncStub") -> tuple[int, list[tuple[float, int]]]:
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=[1, 2, 3]),
            sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        first, deltas = 0, []
        async for event in stub.Generate(request):
            if event.HasField("delta") and event.delta.token_ids:
                first = first or event.delta.token_ids[0]
                deltas.append((time.monotonic(), len(event.delta.token_ids)))
        return first, deltas

    async def all_of_them() -> list[tuple[int, list[tuple[float, int]]]]:
        async with connect(Address(address), max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return await asyncio.gather(*(one(stub) for _ in range(num_streams)))

    return asyncio.run(all_of_them())


# --- the whole ----------------------------------------------------------------------------------------


def measured(args: argparse.Namespace, rate: int) -> None:
    """Runs one rate and prints its figures."""
    cores = sorted(os.sched_getaffinity(0))
    mine, others = cores[:1], set(cores[1:] or cores)
    with tempfile.TemporaryDirectory(prefix="cl-") as folder:
        scheduler, router = f"unix:{folder}/s.sock", f"unix:{folder}/r.sock"
        lag_path = Path(folder) / "lag"
        with ProcessPoolExecutor(args.clients + 1, mp_context=get_context("spawn")) as pool:
            writing = pool.submit(schedule, scheduler, args.model, args, rate, others)
            watched = [sys.executable, "-m", "bench.watched_router", str(lag_path), args.profile]
            flags = ["--listen", router, "--scheduler", scheduler, "--model", args.model]
            process = subprocess.Popen(
                ["taskset", "-c", str(mine[0]), *watched, *flags, "--log-level", "warning"],
                stdout=subprocess.DEVNULL,
            )
            try:
                _wait_until_serving(router)
                share = args.streams // args.clients
                listening = [pool.submit(listen, router, share, others) for _ in range(args.clients)]
                streams = [stream for part in listening for stream in part.result()]
                written_at = np.array(writing.result())
            finally:
                process.terminate()
                process.wait(30)
        _tell(args, rate, streams, written_at, float(lag_path.read_text()))


def _wait_until_serving(address: str) -> None:
    with grpc.insecure_channel(address, options=[("grpc.default_authority", "localhost")]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(600):
            try:
                if check(health_pb2.HealthCheckRequest(), timeout=5).status == 1:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    raise SystemExit("the router did not come up")


def _tell(
    args: argparse.Namespace,
    rate: int,
    streams: list[tuple[int, list[tuple[float, int]]]],
    written_at: np.ndarray,
    lag_seconds: float,
) -> None:
    """`written_at` of a stream's k-th token: message (its place in the turn) + k * turns."""
    num_turns = -(-args.streams // args.width)
    latencies, num_messages, last = [], 0, 0.0
    for first, deltas in streams:
        token = first - TOKEN_IDS.start  # message numbers and token ids go hand in hand
        for read_at, count in deltas:
            latencies += [read_at - written_at[token + k * num_turns] for k in range(count)]
            token += count * num_turns
            num_messages += 1
            last = max(last, read_at)
    p50, p99, most = np.percentile(np.array(latencies) * 1000, [50, 99, 100])
    read_rate = len(latencies) / (last - written_at[0])
    print(
        f"{args.streams} streams, {rate} tokens/s wanted: {read_rate:,.0f} tokens/s read; added latency "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms; {len(latencies) / num_messages:.2f} tokens "
        f"a message; loop blocked at most {lag_seconds * 1000:.1f} ms",
        flush=True,
    )


def main() -> None:
    """Reads the flags, runs every rate."""
    parser = argparse.ArgumentParser(prog="python -m bench.router_load", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rates", default="5000,20000", help="tokens a second, one run each")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--width", type=int, default=50, help="sequences in one scheduler message")
    parser.add_argument("--clients", type=int, default=4, help="client processes; they divide the streams")
    parser.add_argument("--profile", default="", help="write the router's cProfile here (it slows it down)")
    args = parser.parse_args()
    if args.streams % args.clients or args.streams // args.width > len(TOKEN_IDS):
        parser.error(f"streams must be a multiple of clients, and at most {len(TOKEN_IDS)} times width")
    for rate in map(int, args.rates.split(",")):
        measured(args, rate)


if __name__ == "__main__":
    main()
