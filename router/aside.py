"""Work that may take long for the size of what a client sent, or gets: aside, while the event loop goes on.

Whoever asks for it says whether it is long: a thread costs more than little work does. What runs here must be
made of short pieces, for each call into C holds the interpreter's lock to its end. It must not know what the
work is.
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


def settle() -> None:
    """Called once, at start: a thread that computes lets the loop have its turn within a millisecond."""
    sys.setswitchinterval(_SWITCH_SECONDS)


async def done(work: Callable[[], _T], *, is_long: bool) -> _T:
    """What the work returns, or raises. It goes on to its end when nobody waits for it any more."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work) if is_long else work()
