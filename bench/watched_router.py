"""A router that tells how long its event loop answered nobody.

    python -m bench.watched_router LAG PROFILE FLAGS…

LAG gets the longest pause in seconds when the router ends, PROFILE (if not empty) its cProfile.
"""

import asyncio
import cProfile
import sys
import time
from pathlib import Path

from router.__main__ import run_router
from rpc.server import main

_LOOK_SECONDS = 0.002
_START_SECONDS = 3.0  # loading and the first connections are no part of it


class _Watch:
    """Looks often, and remembers the longest time between two looks beyond what it asked for."""

    longest_seconds = 0.0

    async def run(self) -> None:
        await asyncio.sleep(_START_SECONDS)
        while True:
            began = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
            late = time.monotonic() - began - _LOOK_SECONDS
            self.longest_seconds = max(self.longest_seconds, late)


async def _watched(watch: _Watch) -> int:
    watching = asyncio.create_task(watch.run())
    try:
        return await run_router()
    finally:
        watching.cancel()


if __name__ == "__main__":
    _, lag, profile, *flags = sys.argv
    sys.argv = ["router", *flags]
    watch, profiler = _Watch(), cProfile.Profile()
    if profile:
        profiler.enable()
    try:
        main("watched router", lambda: _watched(watch))
    finally:
        Path(lag).write_text(str(watch.longest_seconds))
        if profile:
            profiler.dump_stats(profile)
