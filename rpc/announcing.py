"""Lines on stdout for whoever started this process: where it listens, that it is ready.

The reader may close it, or stop reading: neither holds this process up, or ends it.
"""

import atexit
import functools
import sys

from rpc.line_writer import LineWriter


def announce(line: str) -> None:
    """Writes the line, if stdout was open at the start. Waits for nothing."""
    if sys.stdout is not None:
        _writer().take(line + "\n")


@functools.cache
def _writer() -> LineWriter:
    writer = LineWriter(sys.stdout.fileno())
    atexit.register(writer.flush)
    return writer
