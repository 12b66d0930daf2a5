"""The signals that tell a process to come to its end: SIGTERM, SIGINT and SIGHUP."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals(end_at_once: Callable[[signal.Signals], None]) -> Iterator[asyncio.Event]:
    """An event that the first of the signals sets; a second SIGTERM or SIGINT ends at once.

    A second SIGHUP does not: a terminal that closes may send two. Where it is ignored (`nohup`) it stays so.
    """
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if stop_asked.is_set() and number is not signal.SIGHUP:
            end_at_once(number)
        stop_asked.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stop_asked
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
