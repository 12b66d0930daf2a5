"""`chairlift generate "…"`: asks a running router and streams the answer to stdout."""

import argparse
import sys

from chairlift.asking import Options, Prompt
from chairlift.client import AsyncClient
from chairlift.flag_numbers import positive
from chairlift.parser import Parser
from chairlift.results import ChairliftError, FinishReason, Message
from chairlift.router_flags import add_flags, parsed, run

_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n")
_CONSTRAINTS = ("json_schema", "regex", "choice")
_WHY = {
    FinishReason.ABORT: "the request was given up by the server",
    FinishReason.DEADLINE: "the time given by --timeout was over",
    FinishReason.ERROR: "the server could not compute it",
}


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 when the call fails or the answer was cut off."""
    parser = _parser()
    options, router = parsed(parser, argv)
    if options.system is not None and not options.chat:
        parser.error("--system without --chat: a text to continue has no system message; give --chat too")
    try:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        return run(_stream(_prompt(options, text), options), router, options, parser.prog)
    except (ChairliftError, ValueError) as error:
        print(f"chairlift generate: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="chairlift generate",
        description="Asks a running router and streams the answer.",
        epilog="What is not given is the model's own default.",
    )
    parser.add_argument("prompt", help="the text to continue; - reads it from stdin")
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
    held = parser.add_mutually_exclusive_group()
    held.add_argument("--json-schema", help="the answer is JSON under this schema; {} is any object")
    held.add_argument("--regex", help="the whole answer matches this regular expression")
    held.add_argument("--choice", action="append", help="the answer is one of these; may be repeated")
    parser.add_argument("--n", type=int, default=1, help="how many answers (default: %(default)s)")
    parser.add_argument("--timeout", type=positive, help="give up after so many seconds")
    add_flags(parser)
    return parser


def _prompt(options: argparse.Namespace, text: str) -> Prompt:
    """The text, or the conversation it is the last message of."""
    if not options.chat:
        return text
    system = [] if options.system is None else [Message("system", options.system)]
    return [*system, Message("user", text)]


async def _stream(prompt: Prompt, options: argparse.Namespace) -> int:
    """Prints the answer as it comes; of several, the first as it comes and the others after it, in order.

    Raises:
        ChairliftError: what the router, or the way to it, said.
        ValueError: a number that the contract cannot hold.
    """
    given = Options(**{name: getattr(options, name) for name in (*_OPTIONS, *_CONSTRAINTS)})  # type: ignore[typeddict-item]
    texts: dict[int, str] = {}
    exit_code = 0
    async with (
        AsyncClient(
            options.address,
            tls_ca=options.tls_ca,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            tls_server_name=options.tls_server_name,
        ) as client,
        client.stream(prompt, timeout_seconds=options.timeout, **given) as stream,
    ):
        async for piece in stream:
            if piece.index == 0:
                print(piece.text, end="", flush=True)
            else:
                texts[piece.index] = texts.get(piece.index, "") + piece.text
            if piece.finish_reason in _WHY:
                print(f"\nchairlift generate: {_WHY[piece.finish_reason]}", file=sys.stderr)
                exit_code = 1
    print()
    for index in sorted(texts):
        print(f"\n--- answer {index + 1}\n{texts[index]}")
    return exit_code
