"""API keys: who a caller is, and what it may ask for.

A key is random and long, so its SHA-256 alone is kept: the file of tenants tells nobody a key. Each table of
the file is a tenant; `keys`, `best_priority` and `admin` are read here, the rest is the scheduler's, and is
checked here too.

    [acme]
    keys = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    best_priority = -10
    admin = true

Pure. It must not know: files, transports, proto types.
"""

import hashlib
import hmac
import re
import tomllib
from collections import abc
from dataclasses import dataclass
from typing import Any, Final

import grpc

from router.validation import MAX_PRIORITY
from rpc.errors import RequestError, invalid

MAX_TENANT_CHARACTERS: Final = 128
DEFAULT_BEST_PRIORITY: Final = 0
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME: Final = "bearer "
# The scheduler's part of a table. It reads that at its start alone: what is wrong is refused here, when it is
# written, and not found out at a failover.
_LIMITS: Final = frozenset(
    {
        "weight",
        "max_running",
        "max_blocks",
        "max_queued",
        "max_queued_tokens",
        "requests_per_minute",
        "tokens_per_minute",
    }
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `best_priority` is the least number its requests may bear; None: any."""

    tenant: str
    best_priority: int | None
    is_admin: bool


ANYBODY: Final = Caller("", None, is_admin=True)
"""Whoever comes to a door that wants no keys."""


class KeyRing:
    """The keys of all tenants, by their hashes."""

    def __init__(self, callers: abc.Mapping[str, Caller]) -> None:
        """`callers` by `sha256:HEX` of a key."""
        self._num_keys = len(callers)
        self._shelves: dict[str, list[tuple[str, Caller]]] = {}
        for known, caller in callers.items():
            self._shelves.setdefault(_shelf(known), []).append((known, caller))

    def __len__(self) -> int:
        return self._num_keys

    def caller(self, authorization: str) -> Caller:
        """Who sends this `Authorization: Bearer KEY`; it may be empty. Raises RequestError, UNAUTHENTICATED.

        How long it takes depends on a few digits of the hash of what was sent, and tells nothing of how near
        a wrong key came.
        """
        if not authorization:
            raise _unknown("an API key is required: send `authorization: Bearer KEY`")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise _unknown("the authorization is no `Bearer KEY`")
        key = authorization[len(_SCHEME) :].strip()
        shown = hashed(key)
        for known, caller in self._shelves.get(_shelf(shown), []):
            if hmac.compare_digest(known, shown):
                return caller
        raise _unknown("the API key is not known here")


def hashed(key: str) -> str:
    """What the file of tenants holds of a key."""
    return "sha256:" + hashlib.sha256(key.encode(errors="replace")).hexdigest()


def parsed(text: str) -> KeyRing:
    """The keys of a file of tenants. Raises ValueError with a sentence."""
    callers: dict[str, Caller] = {}
    for name, table in tomllib.loads(text).items():
        if not isinstance(table, dict):
            raise ValueError(f"{name} is no table: write [{name}] and what it may below")  # noqa: TRY004  (one kind of error)
        for key in table.keys() - _LIMITS - {"keys", "best_priority", "admin"}:
            raise ValueError(
                f"[{name}] has {key}, which is none of: keys, best_priority, admin, {_LIMITS_TOLD}"
            )
        _check_limits(name, table)
        if not (name.isprintable() and 1 <= len(name) <= MAX_TENANT_CHARACTERS):
            raise ValueError(
                f"a tenant's name has 1 to {MAX_TENANT_CHARACTERS} printable characters: {name!r}"
            )
        caller = Caller(name, _best_priority(name, table), _is_admin(name, table))
        for entry in _hashes(name, table):
            if entry in callers:
                raise ValueError(f"[{name}] has a key that [{callers[entry].tenant}] has: {entry}")
            callers[entry] = caller
    return KeyRing(callers)


def check_priority(caller: Caller, priority: int) -> None:
    """Refuses what is more important than the key allows. Raises RequestError, PERMISSION_DENIED."""
    best = caller.best_priority
    if best is not None and priority < best:
        raise RequestError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"priority is {priority}; the key of tenant {caller.tenant!r} allows {best} and higher numbers",
            field="priority",
        )


def check_admin(caller: Caller, what: str) -> None:
    """Refuses what shows the requests of all tenants. Raises RequestError, PERMISSION_DENIED."""
    if not caller.is_admin:
        raise RequestError(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{what} shows the requests of every tenant; the key of tenant {caller.tenant!r} is no admin's",
        )


def asked_of(caller: Caller, tenant: str) -> str:
    """Whose request is asked for: the caller's own, unless an admin's key comes with the name of a tenant.

    Raises RequestError, INVALID_ARGUMENT, for anybody else who names one.
    """
    if tenant and not (caller.is_admin and caller.tenant):
        raise invalid("tenant", "tenant is for admins' keys to set; for others it comes from the API key")
    return tenant or caller.tenant


def _shelf(key_hash: str) -> str:
    """Where a hash stands among many."""
    return key_hash[: len("sha256:") + 4]


def _check_limits(name: str, table: dict[str, Any]) -> None:
    """Refuses what the scheduler would not start with."""
    for key in sorted(table.keys() & _LIMITS):
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"[{name}] {key} is {value!r}: it must be a number")  # noqa: TRY004  (one kind of error)
        if not value > 0:
            raise ValueError(f"[{name}] {key} is {value}: it must be more than 0")


def _best_priority(name: str, table: dict[str, Any]) -> int:
    best = table.get("best_priority", DEFAULT_BEST_PRIORITY)
    if type(best) is not int or not -MAX_PRIORITY <= best <= MAX_PRIORITY:
        raise ValueError(f"[{name}] best_priority is {best!r}: from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return best


def _is_admin(name: str, table: dict[str, Any]) -> bool:
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise ValueError(f"[{name}] admin is {admin!r}: it must be true or false")  # noqa: TRY004  (one kind of error)
    return admin


def _hashes(name: str, table: dict[str, Any]) -> list[str]:
    entries = table.get("keys", [])
    if not isinstance(entries, list):
        raise ValueError(f'[{name}] keys is no list: write keys = ["sha256:…"]')  # noqa: TRY004  (one kind of error)
    for position, entry in enumerate(entries):
        # The entry is not shown: what stands there by mistake may be a key.
        if not isinstance(entry, str) or not _HASH.fullmatch(entry):
            raise ValueError(
                f"[{name}] keys[{position}] must be sha256: and 64 hexadecimal digits (`chairlift key`)"
            )
    return entries


def _unknown(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNAUTHENTICATED, message)


_LIMITS_TOLD: Final = ", ".join(sorted(_LIMITS))
