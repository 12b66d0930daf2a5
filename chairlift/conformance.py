"""`chairlift conformance ADDRESS`: checks that an executor keeps the step protocol of docs/protocol.md.

It takes the executor over, so run it on one that nobody uses. The checks are in `protocol_checks`; here they
are run and reported.
"""

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import grpc

from chairlift.checking import Check, Skipped, Subject
from chairlift.flag_numbers import positive
from chairlift.parser import Parser
from chairlift.protocol_checks import CHECKS
from chairlift.step_driver import ExecutorDriver, Failure, ended_by
from rpc import tls, unconnected
from rpc.address import Address, AddressError
from rpc.channel import connect
from rpc.errors import StartError

TIMEOUT_SECONDS: Final = 60.0
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
# An Open that ends so says nothing of how the executor keeps the protocol.
_UNTESTED: Final = {
    grpc.StatusCode.PERMISSION_DENIED: "a scheduler holds it; stop that first",
    grpc.StatusCode.UNAUTHENTICATED: "it lets in others than us",
    grpc.StatusCode.UNAVAILABLE: "it cannot be reached",
    grpc.StatusCode.UNIMPLEMENTED: "there is something else than an executor",
}


class Verdict(Enum):
    """What a check found."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check's end, with a sentence that says what was asked or what was found instead."""

    name: str
    verdict: Verdict
    sentence: str


class UntestedError(Exception):
    """Nothing was found out about the executor; the text says why, as a sentence for people."""


async def run(
    address: str,
    report: Callable[[Outcome], None],
    *,
    certificates: tls.Tls | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> int:
    """Check the executor at `address`, tell `report` of each check as it ends; 0 when none failed, else 1.

    `timeout_seconds` is how long it may take over one answer.

    Raises:
        AddressError: `address` is none.
        UntestedError: no executor is to be had there.
    """
    channel = connect(
        Address.parse(address, field="ADDRESS"), max_message_bytes=_MAX_MESSAGE_BYTES, tls=certificates
    )
    tag = secrets.token_hex(4)
    subject = Subject(
        ExecutorDriver(channel, timeout_seconds=timeout_seconds),
        channel,
        scheduler_id=f"conformance-{tag}-a",
        rival_id=f"conformance-{tag}-b",
        timeout_seconds=timeout_seconds,
    )
    async with channel:
        try:
            await subject.driver.open(subject.scheduler_id)
        except grpc.aio.AioRpcError as error:
            why = unconnected.explained(error.details() or "", certificates) or str(ended_by(error))
            if error.code() in _UNTESTED:
                raise UntestedError(
                    f"the executor at {address} could not be tested: {_UNTESTED[error.code()]} ({why})"
                ) from error
            report(Outcome("open", Verdict.FAILED, f"the executor at {address} cannot be opened ({why})"))
            return 1
        outcomes = []
        for check in CHECKS:
            outcomes.append(await judged(check, subject))
            report(outcomes[-1])
    return int(any(outcome.verdict is Verdict.FAILED for outcome in outcomes))


async def judged(check: Check, subject: Subject) -> Outcome:
    """Run one check and say how it ended."""
    name = getattr(check, "__name__", "check").replace("_", " ")
    try:
        await check(subject)
    except Failure as failure:
        return Outcome(name, Verdict.FAILED, str(failure))
    except Skipped as skipped:
        return Outcome(name, Verdict.SKIPPED, str(skipped))
    except grpc.aio.AioRpcError as error:
        return Outcome(name, Verdict.FAILED, f"a call ended with {ended_by(error)}")
    except Exception as error:  # noqa: BLE001 - whatever an executor answers is its own fault, and a verdict
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        return Outcome(name, Verdict.FAILED, f"what the executor answered could not be read ({what})")
    return Outcome(name, Verdict.PASSED, (check.__doc__ or "").strip())


def print_outcome(outcome: Outcome) -> None:
    """One line for people."""
    print(f"{outcome.verdict.value:>7}  {outcome.name}: {outcome.sentence}", flush=True)


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code: 0 it conforms, 1 it does not, 2 nothing was found out."""
    parser = Parser(
        prog="chairlift conformance",
        description="Checks that an executor keeps the step protocol. It takes the executor over. "
        "Exit code 1 when it does not, 2 when it could not be tested.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT or unix:PATH of the executor")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive,
        default=TIMEOUT_SECONDS,
        help="how long one answer is waited for; a check that misses one fails, and the next one runs "
        "(default: %(default)g)",
    )
    tls.add_flags(parser)
    options = parser.parse_args(argv)
    try:
        certificates = tls.from_flags(options)
        running = run(
            options.address, print_outcome, certificates=certificates, timeout_seconds=options.timeout
        )
        code = asyncio.run(running)
    except (AddressError, StartError, UntestedError) as error:
        print(f"chairlift conformance: {error}", file=sys.stderr)
        return 2
    print("the executor conforms" if code == 0 else "the executor does not conform", flush=True)
    return code
