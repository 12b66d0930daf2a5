"""Lets process 1 of a container be stopped while it is still importing. Import it before all that takes long.

Linux gives process 1 no default action for a signal: without a handler, SIGTERM is lost. Ours comes with the
event loop, seconds after the start. A stop before that would have to wait for SIGKILL, until the container's
grace is over. Nothing has been begun yet that would have to be ended in order.
"""

import os
import signal
from types import FrameType


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


if os.getpid() == 1:
    for _number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(_number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(_number, _end)
