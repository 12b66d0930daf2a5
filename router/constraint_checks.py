"""Checks, before a request is taken in, whether its output can be held to its constraint.

The trial runs in a process of its own (`constraint_worker`), which ends when it computes too long or takes
too much: whatever a client sends, the event loop goes on and the router's memory stays. What is said of the
constraint is kept, for programs send the same schema with each request; what befell its trial is not. The
processes are started when they are first needed.
"""

import asyncio
import hashlib
import json
import signal
from collections import OrderedDict
from typing import Any, Final

import grpc
import structlog

from router.constraints import Choice, Constraint, JsonOrTagged, JsonSchema, Regex, field_of
from router.worker_processes import WorkerProcesses
from rpc.errors import RequestError, invalid

MAX_SECONDS: Final = 10.0
"""For one trial, the process being there: it computes for less, so this is a machine that is busy."""
MAX_WAITING: Final = 256
_NUM_PROCESSES: Final = 2
_MAX_KEPT: Final = 1024
_MAX_LINE_BYTES: Final = 1 << 20
_RETRY_AFTER_SECONDS: Final = 1.0
# The system that lacks memory, and operators; whatever else a process dies of, it has done itself.
_ENDED_BY_OTHERS: Final = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}

Fault = tuple[str, str]
"""Which part of the constraint it is, as the rest of its name, and why, as the rest of a sentence."""

_log = structlog.get_logger()


class ConstraintChecks:
    """Trials of constraints, few at a time. Use it on one event loop, and close it."""

    def __init__(self, *, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._processes = WorkerProcesses(
            "router.constraint_worker", num_processes=_NUM_PROCESSES, line_bytes=_MAX_LINE_BYTES
        )
        self._faults: OrderedDict[bytes, asyncio.Task[Fault | None]] = OrderedDict()
        self._num_waiting = 0

    async def check(self, constraint: Constraint) -> None:
        """Returns when an output can be held to the constraint, whose form is right.

        Raises RequestError: INVALID_ARGUMENT with the library's reason, RESOURCE_EXHAUSTED when too many
        wait, UNAVAILABLE when it cannot be known now.
        """
        asked = json.dumps(_as_asked(constraint))
        key = hashlib.sha256(asked.encode()).digest()
        trial = self._faults.get(key)
        if trial is None or (trial.done() and (trial.cancelled() or trial.exception() is not None)):
            if self._num_waiting >= MAX_WAITING:
                raise RequestError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MAX_WAITING} constraints wait to be checked; try again",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            self._num_waiting += 1
            trial = self._faults[key] = asyncio.create_task(self._tried(asked))
            if len(self._faults) > _MAX_KEPT:
                self._faults.popitem(last=False)
        self._faults.move_to_end(key)
        field = field_of(constraint)
        try:
            fault = await asyncio.shield(trial)  # others may wait for it too
        except _DiedError as error:
            raise _unkept(field, str(error)) from error
        if fault is not None:
            part, why = fault
            raise _unkept(field + part, why)

    async def close(self) -> None:
        """Ends the processes; returns when they have ended."""
        for trial in self._faults.values():
            trial.cancel()
        await asyncio.gather(*self._faults.values(), return_exceptions=True)
        await self._processes.close()

    async def _tried(self, asked: str) -> Fault | None:
        try:
            async with self._processes.one() as process:
                assert process.stdin is not None
                assert process.stdout is not None
                async with asyncio.timeout(self._max_seconds):
                    process.stdin.write(asked.encode() + b"\n")
                    line = await process.stdout.readline()
                    return _fault(line) if line else _fault_of_the_dead(await process.wait())
        except (OSError, RuntimeError) as error:  # none comes up, or answers in time; or it was ended
            _log.error("constraint_not_checked", error=repr(error))
            raise _cannot_check() from error
        finally:
            self._num_waiting -= 1


class _DiedError(Exception):
    """The trial ended by the constraint's doing, perhaps; the text is the rest of a sentence."""


def _fault(line: bytes) -> Fault | None:
    fault = json.loads(line)
    return None if fault is None else tuple(fault)


def _fault_of_the_dead(exit_code: int) -> Fault:
    """What a process's end tells of what it tried. Raises _DiedError, and RuntimeError if it was ended."""
    if exit_code == -signal.SIGXCPU:  # the limit that it has put on itself
        return "", "it takes too long to build; make it simpler"
    if exit_code in _ENDED_BY_OTHERS:
        raise RuntimeError(f"the process that tried it was ended ({exit_code})")
    raise _DiedError("it takes too much memory to build; make it simpler")


def _unkept(field: str, why: str) -> RequestError:
    return invalid(field, f"{field} cannot be kept to: {why}")


def _cannot_check() -> RequestError:
    return RequestError(
        grpc.StatusCode.UNAVAILABLE,
        "constraints cannot be checked now; try again",
        retry_after_seconds=_RETRY_AFTER_SECONDS,
    )


def _as_asked(constraint: Constraint) -> list[Any]:
    match constraint:
        case JsonSchema(text):
            return ["json_schema", text]
        case Regex(pattern):
            return ["regex", pattern]
        case Choice(values):
            return ["choice", values]
        case JsonOrTagged():
            return [
                "json_or_tagged",
                {
                    "json_schema": constraint.text,
                    "tags": [(tag.begin, tag.text, tag.end) for tag in constraint.tags],
                    "opening": constraint.opening,
                    "separator": constraint.separator,
                    "closing": constraint.closing,
                    "max_tags": constraint.max_tags,
                },
            ]
