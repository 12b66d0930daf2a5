"""Writes lines to a file descriptor, and nothing waits for it: a thread writes what the others hand over.

While the reader is stuck, lines are kept up to a bound and dropped beyond it; when it reads again, the owner
of the writer is told how many were dropped. That the reader is gone is not reported.
"""

import os
import select
import threading
from collections.abc import Callable
from typing import Final

MAX_WAITING_CHARACTERS: Final = 4 * 1024 * 1024
FLUSH_SECONDS: Final = 1.0


class LineWriter:
    """Writes lines in the order in which it was given them.

    To a descriptor, not to a stream: an interpreter that exits waits for the lock of a stream that is being
    written to.
    """

    def __init__(self, fd: int, tell_dropped: Callable[[int], None] = lambda _num_lines: None) -> None:
        """`tell_dropped` is called in the writer's thread, between what came before the gap and after it."""
        self._fd = fd
        self._tell_dropped = tell_dropped
        self._lines: list[str] = []
        self._num_characters = 0  # not written yet, of `_lines` and of what is being written
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_on, name="lines", daemon=True)
        self._thread.start()

    def take(self, line: str) -> None:
        """Keeps a line to be written, or drops it: one beyond the bound by itself too. Waits for nothing."""
        with self._changed:
            # Once one is dropped all are, until those before it are written and the gap is told of.
            is_full = self._num_dropped or self._num_characters + len(line) > MAX_WAITING_CHARACTERS
            if is_full and threading.current_thread() is not self._thread:
                self._num_dropped += 1
            else:
                self._lines.append(line)
                self._num_characters += len(line)
            self._changed.notify_all()

    def flush(self) -> bool:
        """Waits until all is written, for FLUSH_SECONDS at most; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._lines or self._num_dropped or self._is_writing), FLUSH_SECONDS
            )

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._num_dropped)
                self._is_writing = True
                lines, self._lines = self._lines, []
            for line in lines:  # each by itself, so that it stays whole beside those of other processes
                _write(self._fd, line.encode(errors="backslashreplace"))
            with self._changed:
                self._num_characters -= sum(map(len, lines))
                num_dropped = 0 if self._lines else self._num_dropped
            if num_dropped:
                self._tell_dropped(num_dropped)
                with self._changed:
                    self._num_dropped -= num_dropped


def _write(fd: int, data: bytes) -> None:
    """Writes all of it, however long that takes; nothing where nobody can ever read it."""
    try:
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another holder of the same pipe has made it so
                select.select([], [fd], [])
    except OSError:
        return
