"""`chairlift generate "…"`: asks a running router and streams the answer to stdout."""

import argparse
import asyncio
import signal
import sys

from chairlift.client import DEFAULT_ADDRESS, CallError, router_at
from protos.v1 import common_pb2, router_pb2
from rpc.address import Address, AddressError

_WHY = {
    common_pb2.FINISH_REASON_ABORT: "the request was given up by the server",
    common_pb2.FINISH_REASON_DEADLINE: "the time given by --timeout was over",
    common_pb2.FINISH_REASON_ERROR: "the server could not compute it",
}


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, 1 when the call fails or the answer was cut off, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    try:
        address = Address.parse(options.address, field="--address")
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        return asyncio.run(_stream(address, _request(options, prompt), options.timeout))
    except (AddressError, CallError, ValueError) as error:
        print(f"chairlift generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # asyncio has cancelled the call, and with it the request
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chairlift generate",
        description="Asks a running router and streams the answer.",
        epilog="What is not given is the model's own default.",
    )
    parser.add_argument("prompt", help="the text to continue; - reads it from stdin")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the router (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message to the assistant")
    parser.add_argument("--system", help="with --chat: the system message before it")
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token each time")
    parser.add_argument("--top-p", type=float, help="keep the smallest set of tokens of this probability")
    parser.add_argument("--top-k", type=int, help="keep this many most likely tokens")
    parser.add_argument("--min-p", type=float, help="drop tokens below this share of the most likely one")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends the answer; may be repeated"
    )
    parser.add_argument("--n", type=int, default=1, help="how many answers (default: 1)")
    parser.add_argument("--timeout", type=float, help="give up after so many seconds")
    return parser


def _request(options: argparse.Namespace, prompt: str) -> router_pb2.GenerateRequest:
    """The request as asked for; an option that was not given stays absent.

    Raises:
        ValueError: a number that the contract cannot hold.
    """
    request = router_pb2.GenerateRequest(n=options.n, stop=options.stop)
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        value = getattr(options, name)
        if value is not None:
            try:
                setattr(request.sampling, name, value)
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')} does not fit into 64 bits: {value}") from error
    if not options.chat:
        request.text = prompt
        return request
    if options.system is not None:
        request.chat.messages.add(role="system", content=options.system)
    request.chat.messages.add(role="user", content=prompt)
    return request


async def _stream(
    address: Address, request: router_pb2.GenerateRequest, timeout_seconds: float | None
) -> int:
    """Prints the answer as it comes; of several, the first as it comes and the others after it, in order."""
    texts: dict[int, str] = {}
    exit_code = 0
    async with router_at(address) as router:
        async for event in router.Generate(request, timeout=timeout_seconds):
            match event.WhichOneof("event"):
                case "delta" if event.delta.index == 0:
                    print(event.delta.text, end="", flush=True)
                case "delta":
                    texts[event.delta.index] = texts.get(event.delta.index, "") + event.delta.text
                case "finished" if event.finished.reason in _WHY:
                    print(f"\nchairlift generate: {_WHY[event.finished.reason]}", file=sys.stderr)
                    exit_code = 1
    print()
    for index in sorted(texts):
        print(f"\n--- answer {index + 1}\n{texts[index]}")
    return exit_code
