"""Lines on stdout for whoever started this process: where it listens, that it is ready.

One that has heard enough may close it, or read no further: neither stops or ends anything.
"""

import atexit
import functools
import sys

from rpc.line_writer import LineWriter


def announce(line: str) -> None:
    """Says it, where stdout was open at the start. Waits for nothing."""
    if sys.stdout is not None:
        _writer().take(line + "\n")


@functools.cache
def _writer() -> LineWriter:
    writer = LineWriter(sys.stdout.fileno())
    atexit.register(writer.flush)
    return writer
