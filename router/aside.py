"""Runs work whose length depends on what a client sent, or gets: in a thread if it is long, else at once.

The caller says whether it is long: for little work, a thread costs more than the work. What runs in a thread
must be made of short pieces, since each call into C holds the GIL to its end and with it the event loop. This
module must not know what the work is.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

# What is no longer than this is looked at, or made, at once: that takes a millisecond or less.
INLINE_BYTES: Final = 64 * 1024
INLINE_TOKENS: Final = 2048
# Not many: each that computes may be the next to get the lock, in place of the loop.
_THREADS: Final = ThreadPoolExecutor(3, "aside")
_SWITCH_SECONDS: Final = 0.001

_T = TypeVar("_T")


def configure() -> None:
    """Called once, at start: a thread that computes lets the loop have its turn within a millisecond."""
    sys.setswitchinterval(_SWITCH_SECONDS)


async def run(work: Callable[[], _T], *, is_long: bool) -> _T:
    """What the work returns, or raises. It goes on to its end when nobody waits for it any more."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work) if is_long else work()
