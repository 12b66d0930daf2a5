"""The gRPC door under messages of any kind: each is answered in its way, and nothing of them stays."""

import asyncio
import contextlib
import itertools
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos.v1 import router_pb2
from tests.rig.scripted_scheduler import ScriptedScheduler
from tests.router import sending
from tests.router.afar import number_told_by
from tests.router.stack import Start, letters

MAX_GROWTH_BYTES = 64 * 1024 * 1024


@contextlib.asynccontextmanager
async def at_an_address(start: Start, folder: Path) -> AsyncIterator[str]:
    """The door's address, for a client that calls from a thread of its own."""
    scheduler = ScriptedScheduler(script=letters("ok"))
    assert scheduler.welcome is not None
    scheduler.welcome.features.extend(
        ["constraints", "penalties", "logit_bias", "token_lists", "prompt_logprobs", "logprobs"]
    )
    async with start(scheduler) as router:
        request = router_pb2.GenerateRequest(text="Hi")
        request.sampling.choice.values.append("x")
        async with asyncio.timeout(100):  # until what tries constraints has started
            while not await _is_served(router.stub.Complete(request)):
                pass
        yield f"unix:{folder}/router.sock"
        async with asyncio.timeout(60):
            await router.quiet()


async def _is_served(call: "grpc.aio.UnaryUnaryCall[object, object]") -> bool:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call
        return True
    return False


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_is_sent_is_served_or_refused_with_a_sentence(
    start: Start, tmp_path: Path, seed: int
) -> None:
    async with at_an_address(start, tmp_path) as address:
        await asyncio.to_thread(sending.send, address, 40, seed)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
async def test_20_000_messages_leave_nothing_behind(start: Start, tmp_path: Path) -> None:
    num_sent, before = 0, 0
    async with at_an_address(start, tmp_path) as address:
        for seed in itertools.count():
            num_sent += await number_told_by("tests.router.sending", address, 200, seed)
            if num_sent >= 20_000:
                break
            if num_sent <= 4_000:  # until then everything has been met that is kept
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MAX_GROWTH_BYTES
