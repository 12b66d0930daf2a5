"""The nine workloads, as files for `chairlift bench offline`: random ids from a seed, the same everywhere.

    python -m bench.workloads FOLDER

64-N is N requests of 64 tokens in and 64 out; the others mix lengths, prefill, or share a beginning.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 49_152
Request = tuple[list[int], int]


def ids(rng: random.Random, count: int) -> list[int]:
    """Random ids that are no control tokens."""
    return [rng.randrange(1000, VOCAB_SIZE) for _ in range(count)]


def same(count: int, num_in: int, num_out: int) -> Callable[[random.Random], list[Request]]:
    """All of one length."""
    return lambda rng: [(ids(rng, num_in), num_out) for _ in range(count)]


def between(
    count: int, num_in: tuple[int, int], num_out: tuple[int, int]
) -> Callable[[random.Random], list[Request]]:
    """Lengths that differ, evenly spread."""
    return lambda rng: [(ids(rng, rng.randint(*num_in)), rng.randint(*num_out)) for _ in range(count)]


def shared_prefix(rng: random.Random) -> list[Request]:
    """32 requests that begin alike."""
    beginning = ids(rng, 512)
    return [(beginning + ids(rng, 32), 32) for _ in range(32)]


WORKLOADS: dict[str, Callable[[random.Random], list[Request]]] = {
    **{f"64-{count}": same(count, 64, 64) for count in (1, 8, 32, 64, 128)},
    "mixed": between(64, (16, 128), (8, 128)),
    "orca": between(64, (32, 512), (1, 128)),
    "long-prefill": same(8, 1024, 32),
    "shared-prefix": shared_prefix,
}


def workload(name: str, seed: int = 0) -> dict[str, Any]:
    """What a workload file holds."""
    requests = WORKLOADS[name](random.Random(f"{name} {seed}"))
    return {
        "name": name,
        "seed": seed,
        "requests": [
            {"id": number, "prompt": prompt, "max_tokens": num_out}
            for number, (prompt, num_out) in enumerate(requests)
        ],
    }


def main() -> None:
    """Writes all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in WORKLOADS:
        path = options.folder / f"{name}.json"
        path.write_text(json.dumps(workload(name, options.seed)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
