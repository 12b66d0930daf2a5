"""How long one client's long prompt, or answer, holds up everybody else: pauses of the event loop.

    python -m bench.long_bodies [--model models/smollm2] [--repeat 5]

A task of the loop asks for its turn every half millisecond; told is the longest it waited while one body was
read, one text tokenized, or one answer put into words, by what the router does and by what it would do in a
thread alone. Both take turns, so that a busy machine slows both; the median of the repeats is told.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import abc
from functools import partial
from pathlib import Path
from typing import Any

from router import aside, model_files
from router.http.encoding import encoded
from router.http.fields import parsed
from router.http.reading import Bodies
from router.http.reading_worker import READERS
from router.tokenizer import Tokenizer, TooManyTokensError
from rpc.errors import RequestError

MAX_TOTAL_TOKENS = 131_072
PIECE_BYTES = 65_536
SENTENCE = "Grüße aus Köln, the sky is blue. "


async def longest_pause(work: abc.Awaitable[Any]) -> float:
    """Milliseconds for which the loop did nothing else."""
    longest, task = 0.0, asyncio.ensure_future(work)
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(0.0005)
        longest = max(longest, time.perf_counter() - before - 0.0005)
    await task
    return longest * 1000


def bodies() -> dict[str, bytes]:
    """What a client may send."""
    ids = [token % 49_152 for token in range(0, 7 * (MAX_TOTAL_TOKENS - 1), 7)]
    prompts = {
        "131,071 ids": ids,
        "16 prompts of 131,071 ids": [ids] * 16,
        "a million ids, which are refused": ids * 8,
        "4 MiB of text": SENTENCE * (4 * 1024 * 1024 // len(SENTENCE.encode())),
    }
    return {name: json.dumps({"prompt": p}, ensure_ascii=False).encode() for name, p in prompts.items()}


def answers() -> dict[str, Any]:
    """What a client may ask for."""
    entry = {"token": " sky", "logprob": -1.2345678, "bytes": list(b" sky")}
    content = [entry | {"top_logprobs": [entry] * 20} for _ in range(4096)]
    choice = {"index": 0, "logprobs": {"content": content, "refusal": None}}
    return {
        "4,096 tokens with 20 alternatives": {"choices": [choice]},
        "262,144 ids": {"tokens": list(range(262_144))},
    }


async def read(opened: Bodies, body: bytes) -> None:
    """As the router does."""
    pieces = [body[first : first + PIECE_BYTES] for first in range(0, len(body), PIECE_BYTES)]
    with contextlib.suppress(RequestError):  # a refusal is an answer too
        await opened.read("completion", pieces, MAX_TOTAL_TOKENS)


def read_at_once(body: bytes) -> None:
    """As it would in a thread alone."""
    with contextlib.suppress(RequestError):
        READERS["completion"](parsed(body))


def tokenized(tokenizer: Tokenizer, text: str) -> None:
    """As the router does."""
    with contextlib.suppress(TooManyTokensError):
        tokenizer.encode(text, at_most=MAX_TOTAL_TOKENS)


async def measured(args: argparse.Namespace) -> None:
    """Prints a line for each kind of prompt, and of answer."""
    aside.configure()
    opened, tokenizer = Bodies(), Tokenizer(model_files.read(Path(args.model)))
    await read(opened, bodies()["131,071 ids"])  # its process has started
    for name, body in bodies().items():
        await _told(
            f"read {name} ({len(body) / 2**20:.1f} MiB)",
            args.repeat,
            partial(read, opened, body),
            partial(asyncio.to_thread, read_at_once, body),
        )
    text = SENTENCE * (512 * 1024 // len(SENTENCE.encode()))
    await _told(
        "tokenize 512 KiB of text",
        args.repeat,
        lambda: asyncio.to_thread(tokenized, tokenizer, text),
        lambda: asyncio.to_thread(lambda: tokenizer._tokenizer.encode(text).ids),  # noqa: SLF001 - what it was
    )
    for name, value in answers().items():
        await _told(
            f"answer {name}",
            args.repeat,
            partial(aside.run, partial(encoded, value, is_long=True), is_long=True),
            partial(asyncio.to_thread, encoded, value),
        )
    await opened.close()


async def _told(
    what: str,
    repeat: int,
    ours: abc.Callable[[], abc.Awaitable[Any]],
    thread: abc.Callable[[], abc.Awaitable[Any]],
) -> None:
    pauses: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for found, work in zip(pauses, (ours, thread), strict=True):
            found.append(await longest_pause(work()))
    here, there = map(statistics.median, pauses)
    print(f"{what}: loop paused for {here:.1f} ms; in a thread {there:.1f} ms", flush=True)


def main() -> None:
    """Reads the flags, measures."""
    parser = argparse.ArgumentParser(prog="python -m bench.long_bodies", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--repeat", type=int, default=5)
    asyncio.run(measured(parser.parse_args()))


if __name__ == "__main__":
    main()
