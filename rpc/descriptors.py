"""File descriptors: a process takes as many as it may have, and says when none is left.

Each connection takes one. When none is left, no client can connect, nor can a probe, and files cannot be read
again; and nobody would learn of it, because no error is reported to whoever listens.
"""

import asyncio
import contextlib
import os
import resource
from typing import Final

import structlog

_LOOK_SECONDS: Final = 1.0
_log = structlog.get_logger()


def raise_limit() -> None:
    """Supervisors and shells give 1024, and leave it to the process to take more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _log.info("descriptors", limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0])


async def watch(look_seconds: float = _LOOK_SECONDS) -> None:
    """Looks whether one is left, until cancelled; tells when none is, and when there is one again."""
    was_left = True
    while True:
        await asyncio.sleep(look_seconds)
        is_left = _is_one_left()
        if was_left and not is_left:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            _log.error("descriptors_used_up", limit=limit)
        elif is_left and not was_left:
            _log.info("descriptors_free")
        was_left = is_left


def _is_one_left() -> bool:
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError:
        return False
    return True
