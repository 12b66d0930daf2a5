"""What commands and the client library share for calling a router: its address, credentials, and errors."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from chairlift.flag_numbers import positive
from chairlift.results import ChairliftError
from chairlift.waiting import until_serving
from protos.v1 import router_pb2_grpc
from rpc import tls
from rpc.address import Address, AddressError
from rpc.channel import connect
from rpc.errors import RequestError, StartError, from_call

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
ADDRESS_VARIABLE = "CHAIRLIFT_ADDRESS"
API_KEY_VARIABLE = "CHAIRLIFT_API_KEY"

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Router:
    """Where a router is, by which certificates it is spoken to, and whose key is shown; empty: none."""

    address: Address
    certificates: tls.Tls | None = None
    api_key: str = ""

    @property
    def metadata(self) -> Metadata:
        """What goes with each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that asks a router. A key is no flag: all users of a machine see those."""
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


@contextlib.asynccontextmanager
async def router_at(router: Router) -> "AsyncIterator[router_pb2_grpc.RouterAsyncStub]":
    """A stub of the router; its calls take `router.metadata`. One that fails inside raises ChairliftError.

    Raises:
        ChairliftError: what the router, or the way to it, said.
    """
    async with connect(
        router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=router.certificates
    ) as channel:
        try:
            yield router_pb2_grpc.RouterStub(channel)
        except grpc.aio.AioRpcError as error:
            raise failure(from_call(error), router) from error


def failure(refusal: RequestError, router: Router) -> ChairliftError:
    """A refusal as the caller gets it; gRPC's own words for what it notices itself become ours."""
    message = refusal.message
    if refusal.code is grpc.StatusCode.UNAVAILABLE:
        why = tls.explained(message, router.certificates)
        if why == tls.NOBODY:
            message = f"nobody answers at {router.address} (is `chairlift serve` running there?)"
        elif why is not None:
            message = f"no connection to the router at {router.address}: {why}"
    elif refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # in one of gRPC's many ways, or the router's
        message = f"the time given was over before the router at {router.address} had answered"
    elif refusal.code is grpc.StatusCode.UNAUTHENTICATED and not router.api_key:
        message = f"{message} (set {API_KEY_VARIABLE})"
    return ChairliftError(
        refusal.code.name,
        message,
        field=refusal.field,
        retry_after_seconds=refusal.retry_after_seconds,
    )
