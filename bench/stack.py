"""What benchmarks share: a real service of three processes, and a load through its gRPC door."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from chairlift.calls import Router, router_at
from chairlift.own_service import own_service
from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from rpc.address import Address

NOTHING_GUESSED = ("--num-speculative-tokens", "0")


@dataclass
class Work:
    """One request: random ids in, exactly so many tokens out."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass
class Done:
    """What it got; seconds since the load began."""

    num_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass
class Run:
    """A load's answers and the steps that made them."""

    seconds: float
    done: list[Done]
    steps: list[router_pb2.StepSummary] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Useful output tokens a second, prefill included."""
        return sum(item.num_tokens for item in self.done) / self.seconds


@contextlib.asynccontextmanager
async def service(*flags: str) -> AsyncIterator[tuple[Address, float]]:
    """`chairlift serve` with these flags; yields its address and the seconds from start to ready.

    Unless the flags say otherwise no tokens are guessed, so that a step brings one token to each sequence.
    """
    started = time.monotonic()
    own = ["--log-level", "warning", *NOTHING_GUESSED]
    async with own_service([*own, *flags], tell=lambda _: None) as address:
        yield address, time.monotonic() - started


async def one(router: "router_pb2_grpc.RouterAsyncStub", work: Work, started: float) -> Done:
    """Sends one request and reads its stream to the end."""
    done = Done()
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=work.prompt_token_ids),
        sampling=common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=work.max_tokens),
    )
    async for event in router.Generate(request):
        if event.HasField("delta"):
            done.num_tokens += len(event.delta.token_ids)
            done.first_token_seconds = done.first_token_seconds or time.monotonic() - started
    done.total_seconds = time.monotonic() - started
    assert done.num_tokens == work.max_tokens
    return done


async def load(address: Address, works: list[Work], *, watch: bool = False) -> Run:
    """Sends everything at once; returns when all have ended. `watch` collects every step's summary."""
    async with router_at(Router(address)) as router:
        await one(router, Work([1, 2, 3, 4], 4), time.monotonic())
        steps: list[router_pb2.StepSummary] = []
        watching = asyncio.ensure_future(_watch(router, steps)) if watch else None
        await asyncio.sleep(0.5 if watch else 0)
        started = time.monotonic()
        done = await asyncio.gather(*(one(router, work, started) for work in works))
        seconds = time.monotonic() - started
        if watching is not None:
            await asyncio.sleep(0.2)
            watching.cancel()
            await asyncio.wait([watching])
        return Run(seconds, list(done), steps)


async def _watch(router: "router_pb2_grpc.RouterAsyncStub", steps: list[router_pb2.StepSummary]) -> None:
    async for summary in router.Watch(router_pb2.WatchRequest()):
        steps.append(summary)  # noqa: PERF401  (a comprehension would keep nothing when it is cancelled)
