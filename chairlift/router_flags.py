"""The flags of every command that asks a router, and what they ask for: which router, and to wait for it."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from chairlift.calls import API_KEY_VARIABLE, DEFAULT_ADDRESS, Router
from chairlift.flag_numbers import positive
from chairlift.waiting import until_serving
from rpc import tls
from rpc.address import Address, AddressError
from rpc.errors import StartError

ADDRESS_VARIABLE = "CHAIRLIFT_ADDRESS"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them. A key is no flag: all users of a machine see those."""
    parser.add_argument(
        "--address",
        default=os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS),
        help=f"the router (default: %(default)s; {ADDRESS_VARIABLE})",
    )
    parser.add_argument(
        "--wait", metavar="SECONDS", type=positive, help="wait until it serves, at most so long"
    )
    tls.add_flags(parser)
    epilog = f"The API key, where one is wanted, is the environment variable {API_KEY_VARIABLE}."
    parser.epilog = f"{parser.epilog} {epilog}" if parser.epilog else epilog


def from_flags(options: argparse.Namespace) -> Router:
    """What the flags of `add_flags` say. Raises ValueError with a sentence."""
    try:
        return Router(
            Address.parse(options.address, field="--address"),
            tls.from_flags(options),
            os.environ.get(API_KEY_VARIABLE, ""),
        )
    except StartError as error:
        raise AddressError(str(error)) from error


def given_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Which flags of `add_flags` were given, as far as they change anything."""
    own = [name for name in ("address", "wait") if getattr(options, name) != parser.get_default(name)]
    return [*(f"--{name}" for name in own), *tls.given_flags(parser, options)]


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, Router]:
    """The options, those of `add_flags` among them; a wrong one ends the process with its sentence."""
    options = parser.parse_args(argv)
    try:
        return options, from_flags(options)
    except AddressError as error:
        parser.error(str(error))


async def waited_for(router: Router, options: argparse.Namespace, prog: str) -> None:
    """Does what `--wait` says. `prog` is who waits."""

    def say(sentence: str) -> None:
        print(f"{prog}: {sentence}", file=sys.stderr, flush=True)

    if options.wait is not None:
        await until_serving(router.address, router.certificates, seconds=options.wait, say=say)


Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result], router: Router, options: argparse.Namespace, prog: str) -> Result:
    """Does a command's work once the router serves, as far as `--wait` asks for that."""

    async def waited() -> Result:
        with contextlib.closing(work):
            await waited_for(router, options, prog)
            return await work

    return asyncio.run(waited())
