"""The file that holds a lease, locked by the leader's process for as long as it lives.

The kernel frees the lock when the process ends, however it ends; so a standby learns of a crash at its next
look. A frozen leader keeps its lock, but it is not waited for: a new file replaces the old one, and when the
old leader continues, it finds that the path leads to a file that is not its own.

Knows how a record is stored, not what it means. Calls may block for as long as the file system does.
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

from scheduler.lease import Record

# Records have one length: one write replaces one, and a reader finds either the old or the new.
RECORD_BYTES = 512


class LeaseFileError(Exception):
    """The file is not one of ours; the text is a sentence."""


class LeaseFile:
    """The lease file at one path, as one process sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None  # of the file that this process has locked

    def look(self) -> tuple[Record | None, bool]:
        """What the file says (None: nothing yet), and whether it is free; if so, it is locked from now on.

        Raises LeaseFileError, OSError.
        """
        if self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if not (_try_lock(fd) and _leads_to(self._path, fd)):
                    return self._read(fd), False
                self._fd, fd = fd, -1
            finally:
                if fd >= 0:
                    os.close(fd)
        assert self._fd is not None
        return self._read(self._fd), True

    def claim(self, record: Record) -> bool:
        """Writes a record: into the file that this process has locked, or in place of another's.

        Returns whether the file at the path is now this process's own: another may have been quicker, and
        then has its term to itself. Raises LeaseFileError, OSError.
        """
        if self._fd is None:
            self._usurp(record)
        else:
            _write(self._fd, record)
        return self.is_mine()

    def _usurp(self, record: Record) -> None:
        """Puts a new file in place of the old one, unless another process is doing so, or has done so."""
        new_path = self._path.with_name(f"{self._path.name}.next")
        fd = os.open(new_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not (_try_lock(fd) and _leads_to(new_path, fd)):
                return
            there = self.read()
            if there is not None and there.term >= record.term:
                new_path.unlink()
                return
            _write(fd, record)
            new_path.replace(self._path)
            self._fd, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)

    def is_mine(self) -> bool:
        """Whether the file at the path is the one that this process has locked."""
        return self._fd is not None and _leads_to(self._path, self._fd)

    def write(self, record: Record) -> None:
        """Replaces the record in the locked file. Raises OSError."""
        assert self._fd is not None
        _write(self._fd, record)

    def let_go(self) -> None:
        """Unlocks the file, if it is locked."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self) -> Record | None:
        """What the file at the path says, whoever has it; locks nothing. Raises LeaseFileError, OSError."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self._read(fd)
        finally:
            os.close(fd)

    def _read(self, fd: int) -> Record | None:
        data = os.pread(fd, RECORD_BYTES + 1, 0)
        if not data:
            return None
        try:
            return Record(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise LeaseFileError(
                f"{self._path} is no lease file: name a file that is the lease's alone"
            ) from error


def _leads_to(path: Path, fd: int) -> bool:
    mine = os.fstat(fd)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _try_lock(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _write(fd: int, record: Record) -> None:
    os.pwrite(fd, json.dumps(asdict(record)).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)
