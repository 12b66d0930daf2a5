"""Waits until a router serves, for commands typed right after the one that starts it.

Only what passes by itself is waited for: nobody answers yet, or has nobody to compute yet. Whoever asks
next is told of everything else.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import tls, unconnected
from rpc.address import Address
from rpc.cancel import heed_cancel
from rpc.channel import connect

_PAUSE_SECONDS: Final = 0.2
_MAX_MESSAGE_BYTES: Final = 64 * 1024


async def until_serving(
    address: Address, certificates: tls.Tls | None, *, seconds: float, say: Callable[[str], None]
) -> None:
    """Returns when a request sent now would be computed or fail for another reason, or `seconds` are over.

    `say` gets one sentence, if there is anything to wait for.
    """
    since = time.strftime("%H:%M:%S")
    async with connect(address, max_message_bytes=_MAX_MESSAGE_BYTES, tls=certificates) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                is_first = True
                while (missing := await _missing(health, certificates)) is not None:
                    if is_first:
                        say(
                            f"waiting since {since}, at most {seconds:g} s, for the router at {address} "
                            f"to serve: {missing}"
                        )
                    is_first = False
                    await asyncio.sleep(_PAUSE_SECONDS)


async def _missing(health: "health_pb2_grpc.HealthAsyncStub", certificates: tls.Tls | None) -> str | None:
    """What time may bring, as the end of a sentence; None when nothing is missing, or time will not help."""
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError as error:
        heed_cancel()
        why = unconnected.explained(error.details() or "", certificates)
        return why if why is not None and why.startswith((unconnected.NOBODY, unconnected.CLOSES)) else None
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return None if is_serving else "it has nobody to compute yet"
