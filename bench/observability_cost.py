"""What it costs to be looked at: CPU seconds for 1,000 tokens, watched against unwatched.

    python -m bench.observability_cost [--model models/smollm2] [--with metrics page traces] [--rounds 9]
                                       [--streams 32] [--tokens 64] [--out FILE]

Two servers of three processes stand side by side. One has metrics (each process scraped once a second, much
oftener than usual), its live page open, and traces of every request sent to a collector, or what of these
`--with` names; the other has none. The same load goes to one and the other in turn, the first of each round
alternating. What is compared is the CPU time of the processes, by the median of the rounds' ratios; who looks
is not counted. With a tiny model the executor computes next to nothing: the largest share there can be.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from bench.stack import Work, one
from chairlift.calls import Router, router_at
from rpc.address import Address
from rpc.channel import connect

TIERS = ("executor", "scheduler", "router")
WAYS = ("metrics", "page", "traces")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, and counts them."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 - the contract's
        """A batch of them."""
        self.num_spans += sum(
            len(scope.spans) for of_process in request.resource_spans for scope in of_process.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting(address: str) -> Iterator[Collector]:
    """A collector at this address."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    server.start()
    yield collector
    server.stop(0).wait()


class Server:
    """Three processes; `ports` are those of their metrics, `page` is the socket of the live page."""

    def __init__(self, folder: Path, model: Path, *, ways: Collection[str], collector: str) -> None:
        self.ports: list[str] = []
        self.page = f"{folder}/http.sock" if "page" in ways else ""
        self._processes: list[subprocess.Popen[str]] = []
        self.address = Address(f"unix:{folder}/router.sock")
        sockets = {tier: f"unix:{folder}/{tier}.sock" for tier in TIERS}
        flags = {
            "executor": ["--model", str(model)],
            "scheduler": ["--executor", sockets["executor"]],
            "router": ["--model", str(model), "--scheduler", sockets["scheduler"]],
        }
        for tier in TIERS:
            own = ["--listen", sockets[tier], "--log-level", "warning", *flags[tier]]
            if "metrics" in ways:
                own += ["--metrics-listen", "127.0.0.1:0"]
            if "traces" in ways:
                own += ["--traces", collector]
            if tier == "router" and self.page:
                own += ["--http", f"unix:{self.page}"]
            process = subprocess.Popen([sys.executable, "-m", tier, *own], stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()
            if tier == "router" and self.page:
                process.stdout.readline()
            if "metrics" in ways:
                self.ports.append(process.stdout.readline().strip().removeprefix("metrics on "))

    async def ready(self) -> None:
        """Returns when requests are served."""
        async with connect(self.address, max_message_bytes=1 << 20) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for answer in watch:
                if answer.status == answer.SERVING:
                    watch.cancel()
                    return

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process so far, in nanoseconds' resolution."""
        return {
            tier: time.clock_gettime(_clock_of(process.pid))
            for tier, process in zip(TIERS, self._processes, strict=True)
        }

    async def scrape(self) -> None:
        """Asks every process once a second, until cancelled."""
        while True:
            for port in self.ports:
                await asyncio.to_thread(
                    lambda where: urllib.request.urlopen(where).read(), f"http://{port}/metrics"
                )
            await asyncio.sleep(1.0)

    async def look(self) -> None:
        """Reads what the live page reads, until cancelled."""
        transport = httpx2.AsyncHTTPTransport(uds=self.page)
        async with (
            httpx2.AsyncClient(transport=transport, base_url="http://router", timeout=None) as client,
            client.stream("GET", "/live") as response,
        ):
            async for _ in response.aiter_bytes():
                pass

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _clock_of(pid: int) -> int:
    """A process's CPU clock, as clock_getcpuclockid(3) makes it on Linux: all threads, ended ones too."""
    return (~pid << 3) | 2


@contextlib.asynccontextmanager
async def looked_at(server: Server) -> AsyncIterator[None]:
    """A server while somebody looks at its metrics and its page, as far as it has them."""
    looking = [asyncio.create_task(server.scrape())] if server.ports else []
    if server.page:
        looking.append(asyncio.create_task(server.look()))
    try:
        yield
        assert not any(task.done() for task in looking), "somebody looked until the end"
    finally:
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)


async def round_of(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds for 1,000 tokens, by tier."""
    works = [Work([5 + i, 6, 7, 8], args.tokens) for i in range(args.streams)]
    async with router_at(Router(server.address)) as router, looked_at(server):
        before = server.cpu_seconds
        for _ in range(args.waves):
            await asyncio.gather(*(one(router, work, time.monotonic()) for work in works))
        after = server.cpu_seconds
    num_thousands = args.waves * args.streams * args.tokens / 1000
    return {tier: (after[tier] - before[tier]) / num_thousands for tier in TIERS}


async def compare(args: argparse.Namespace) -> None:
    """Prints medians of both, and of their ratio within a round."""
    with (
        tempfile.TemporaryDirectory() as plain_folder,
        tempfile.TemporaryDirectory() as told_folder,
        collecting(where := f"unix:{told_folder}/otlp.sock") as collector,
    ):
        plain = Server(Path(plain_folder), args.model, ways=(), collector=where)
        told = Server(Path(told_folder), args.model, ways=args.ways, collector=where)
        try:
            rounds: dict[Server, list[dict[str, float]]] = {plain: [], told: []}
            for server in rounds:
                await server.ready()
                await round_of(server, args)
            for number in range(args.rounds):
                for server in (plain, told) if number % 2 else (told, plain):
                    rounds[server].append(await round_of(server, args))
        finally:
            plain.close()
            told.close()
    told_of = {tier: _measured(rounds[plain], rounds[told], tier) for tier in (*TIERS, "all")}
    result = {
        "watched_by": list(args.ways),
        "model": args.model.name,
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "num_spans": collector.num_spans,
        "cpu_seconds_per_1000_tokens": told_of,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"watched by {', '.join(args.ways)}; {collector.num_spans} spans were sent")
    print(f"{'CPU s / 1,000 tokens':<22} {'without':>9} {'with':>9} {'ratio':>8} {'half of the rounds':>20}")
    for tier, figures in told_of.items():
        print(
            f"{tier:<22} {figures['without']:>9.4f} {figures['with']:>9.4f} {figures['ratio']:>8.3f}"
            f" {figures['ratio_low']:>13.3f}-{figures['ratio_high']:.3f}"
        )


def _measured(plain: list[dict[str, float]], told: list[dict[str, float]], tier: str) -> dict[str, float]:
    """Medians, and the quartiles of the ratios within a round: the two of a round saw the same machine."""
    without, with_ = (
        [sum(one.values()) if tier == "all" else one[tier] for one in rounds] for rounds in (plain, told)
    )
    low, middle, high = statistics.quantiles([b / a for a, b in zip(without, with_, strict=True)])
    figures = {
        "without": statistics.median(without),
        "with": statistics.median(with_),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }
    return {name: round(value, 5) for name, value in figures.items()}


def main() -> None:
    """Reads the flags and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--with", dest="ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--waves", type=int, default=2, help="loads one after the other in a round")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="the same as JSON")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
