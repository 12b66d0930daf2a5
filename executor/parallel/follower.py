"""A rank that is not the first: it loads its shard, and computes the steps that the first rank leads.

It speaks no gRPC and holds no sequence. It ignores the signals that end a service: the first rank drains
while this one computes, and this one ends when the first one says so, or is gone.
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable

import structlog

from executor.parallel.errors import RankLostError
from executor.parallel.place import Place
from rpc import log
from rpc.errors import StartError

_log = structlog.get_logger()


def follow(place: Place, serve_steps: Callable[[], None]) -> int:
    """Run `serve_steps`, which loads the model and makes steps until the first rank ends; the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if place.is_guarded:
        threading.Thread(target=_end_with_first_rank, args=(place,), name="guard", daemon=True).start()
    try:
        serve_steps()
    except (RankLostError, StartError) as error:
        _log.error("rank_ended", rank=place.rank, size=place.size, reason=str(error))
        return 1
    except Exception:  # noqa: BLE001 - the end of a process: all of it is logged
        _log.exception("rank_failed", rank=place.rank, size=place.size)
        return 1
    return 0


def _end_with_first_rank(place: Place) -> None:
    """Whatever the main thread does: it may wait for the others in a call that nothing interrupts.

    A first rank that was killed has left the folder behind in which they met.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(place.meeting_folder, ignore_errors=True)
    log.flush()
    os._exit(0)
