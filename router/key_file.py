"""The file of tenants on disk: read at start, and again when it has changed, so that keys can be revoked.

A change that cannot be used is logged and the keys of before stay. What cannot be read now (a right is
missing, no descriptor is left) is tried again with the next call: nobody knows yet what it takes back.

It must not know: transports, requests.
"""

import os
from pathlib import Path

import structlog

from router import keys
from router.keys import ANYBODY, Caller, KeyRing
from rpc.errors import StartError

_log = structlog.get_logger()


class Doorkeeper:
    """Tells every door who its callers are."""

    def __init__(self, path: str) -> None:
        """An empty path lets everybody in. Raises StartError when the file has no keys that can be used."""
        self._path = Path(path) if path else None
        self._ring: KeyRing | None = None
        self._stamp = (0, 0, 0)
        self._told: object = None
        if self._path is None:
            return
        self._stamp = self._present_stamp(self._path)
        try:
            self._ring = _read(self._path)
        except (OSError, ValueError) as error:
            raise StartError(f"--tenants is {path}: {_sentence(error)}") from error
        if not self._ring:
            raise StartError(
                f"--tenants is {path}: no table has keys, so nobody could enter; `chairlift key` makes one, "
                "and without --tenants the router wants none"
            )

    def caller(self, authorization: str) -> Caller:
        """Who sends this header, which may be empty. Raises RequestError, UNAUTHENTICATED."""
        if self._path is None or self._ring is None:
            return ANYBODY
        stamp = self._present_stamp(self._path)
        if stamp != self._stamp:
            self._read_again(self._path, stamp)
        return self._ring.caller(authorization)

    def _read_again(self, path: Path, stamp: tuple[int, int, int]) -> None:
        try:
            self._ring = _read(path)
        except (OSError, ValueError) as error:
            told = (stamp, _sentence(error))
            if told != self._told:
                _log.warning("keys_kept", reason=_sentence(error))
            self._told = told
            if isinstance(error, OSError):
                return
        else:
            _log.info("keys_read", num_keys=len(self._ring))
        self._stamp = stamp

    @staticmethod
    def _present_stamp(path: Path) -> tuple[int, int, int]:
        try:
            status = os.stat(path)  # noqa: PTH116 - with every call
        except OSError:
            return (0, 0, 0)
        return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: Path) -> KeyRing:
    """Raises OSError, or ValueError with a sentence."""
    return keys.parsed(path.read_text(encoding="utf-8"))


def _sentence(error: OSError | ValueError) -> str:
    return f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
