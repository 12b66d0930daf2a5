"""`chairlift bench offline`: sends a workload all at once through a service of its own, and times it.

    chairlift bench offline [FLAGS OF SERVE] WORKLOAD.json RESULT.json

    workload    {"name": ..., "seed": ..., "requests": [{"id": 0, "prompt": [ids...], "max_tokens": 57}, ...]}
    result      {"seconds": 8.13, "requests": [{"n_in": 64, "n_out": 57, "tokens": [ids...]}, ...]}

Greedy, end tokens ignored. Results stand in the order of the requests; `seconds` run from handing over all of
them to the last token. Loading, a short warm-up and two seconds in which nothing is asked are outside: an
executor that is idle takes memory ahead. All of it goes over gRPC, with this process on the same cores:
nothing is measured that a client would not get.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.calls import Router, router_at
from chairlift.flag_files import to_write
from chairlift.own_service import own_service
from chairlift.results import ChairliftError
from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from rpc.errors import StartError

NUM_WARM_UP_REQUESTS = 4
NUM_WARM_UP_TOKENS = 16
IDLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """One request of a workload."""

    prompt: tuple[int, ...]
    max_tokens: int


def main(argv: list[str]) -> int:
    """Runs the workload; returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    *flags, workload, result = argv if len(argv) > 1 else ["-", "-"]
    if workload.startswith("-") or result.startswith("-"):
        print("chairlift bench offline: two files come last: WORKLOAD.json RESULT.json", file=sys.stderr)
        return 2
    try:
        to_write(result)
        works = read_workload(Path(workload))
        seconds, outputs = asyncio.run(_measure(flags, works))
    except argparse.ArgumentTypeError as error:
        print(f"chairlift bench offline: RESULT.json: {error}", file=sys.stderr)
        return 2
    except (StartError, ChairliftError) as error:
        print(f"chairlift bench offline: {error}", file=sys.stderr)
        return 2
    Path(result).write_text(json.dumps(report(seconds, works, outputs)) + "\n", encoding="utf-8")
    num_tokens = sum(map(len, outputs))
    print(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")
    return 0


def read_workload(path: Path) -> list[Work]:
    """The requests of the workload in `path`.

    Raises:
        StartError: what in the file is not as it must be.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}") from error
    requests = raw.get("requests") if isinstance(raw, Mapping) else None
    if not isinstance(requests, list) or not requests:
        raise StartError(f"{path}: requests is missing or empty; it must be a list of requests")
    return [_work(path, place, request) for place, request in enumerate(requests)]


def report(seconds: float, works: list[Work], outputs: list[list[int]]) -> dict[str, Any]:
    """What is written to RESULT.json."""
    return {
        "seconds": seconds,
        "requests": [
            {"n_in": len(work.prompt), "n_out": len(tokens), "tokens": tokens}
            for work, tokens in zip(works, outputs, strict=True)
        ],
    }


def _work(path: Path, place: int, request: Any) -> Work:
    prompt = request.get("prompt") if isinstance(request, Mapping) else None
    if not isinstance(prompt, list) or not prompt or not all(type(each) is int for each in prompt):
        raise StartError(f"{path}: requests[{place}].prompt must be a list of at least one token id")
    max_tokens = request.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 1:
        raise StartError(
            f"{path}: requests[{place}].max_tokens is {max_tokens!r}; it must be a whole number of at least 1"
        )
    return Work(tuple(prompt), max_tokens)


async def _measure(flags: list[str], works: list[Work]) -> tuple[float, list[list[int]]]:
    given = any(flag.partition("=")[0] == "--log-level" for flag in flags)
    quiet = [] if given else ["--log-level", "error"]
    async with (
        own_service([*flags, *quiet], tell=lambda line: print(line, file=sys.stderr)) as address,
        router_at(Router(address)) as router,
    ):
        await _all(router, _warm_up(works))
        await asyncio.sleep(IDLE_SECONDS)
        started = time.monotonic()
        outputs = await _all(router, works)
        return time.monotonic() - started, outputs


def _warm_up(works: list[Work]) -> list[Work]:
    """A few short requests of ids that the workload uses, in another order: no cache gains by them."""
    rng = random.Random(0)  # noqa: S311 - nothing secret
    ids = sorted({each for work in works[:64] for each in work.prompt})
    return [
        Work(tuple(rng.choices(ids, k=NUM_WARM_UP_TOKENS)), NUM_WARM_UP_TOKENS)
        for _ in range(NUM_WARM_UP_REQUESTS)
    ]


async def _all(router: "router_pb2_grpc.RouterAsyncStub", works: list[Work]) -> list[list[int]]:
    return await asyncio.gather(*(_one(router, work) for work in works))


async def _one(router: "router_pb2_grpc.RouterAsyncStub", work: Work) -> list[int]:
    answer = await router.Complete(
        router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=work.prompt),
            sampling=common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=work.max_tokens),
        )
    )
    tokens = list(answer.choices[0].token_ids)
    if len(tokens) != work.max_tokens:
        reason = common_pb2.FinishReason.Name(answer.choices[0].finished.reason)
        raise ChairliftError(
            "INTERNAL", f"a request of {work.max_tokens} tokens got {len(tokens)} ({reason})"
        )
    return tokens
