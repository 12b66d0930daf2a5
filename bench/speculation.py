"""What guessing tokens brings: the same requests with and without it, by kind of text and width.

    python -m bench.speculation [--model smollm2] [--rounds 3] [--out bench/results/speculation.json]

Two services on the same cores, of which one works at a time; rounds alternate. Every answer must be the same
in both. Texts to rewrite and to sum up are files of this project; questions are free. A first round, which is
not counted, leaves the prompts in the cache: guesses are about what follows them. Machines differ in what a
token costs beside the weights, so the figures are ratios of one run.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench.stack import service
from chairlift import AsyncClient
from rpc.address import Address

ROOT = Path(__file__).parent.parent
MAX_TOKENS = 160
WIDTHS = (1, 4)
TEMPERATURES = (0.0, 0.7)
CODE = ("scheduler/counters.py", "scheduler/token_ids.py", "scheduler/doubt.py", "executor/philox.py")
PAGES = ("docs/determinism.md", "docs/quickstart.md", "docs/failures.md", "docs/traces.md")
QUESTIONS = (
    "Tell me a story about a dog that crosses a river.",
    "What should I see in Lisbon in three days?",
    "Explain how a steam engine works to a child.",
    "Write a letter to a neighbour whose music is too loud.",
)


def prompts() -> dict[str, list[str]]:
    """By kind of text."""
    code = [(ROOT / name).read_text()[:1500] for name in CODE]
    pages = [(ROOT / name).read_text()[:3000] for name in PAGES]
    return {
        "rewrite code": [
            f"Rewrite this Python code with type hints and docstrings:\n\n{text}" for text in code
        ],
        "sum up a page": [f"Summarize the following text:\n\n{text}" for text in pages],
        "free questions": list(QUESTIONS),
    }


Answers = list[list[int]]


async def answers(
    client: AsyncClient, texts: list[str], width: int, temperature: float
) -> tuple[float, Answers]:
    """Seconds for all, `width` at a time, and their ids."""
    began = time.monotonic()
    ids: Answers = []
    for start in range(0, len(texts), width):
        calls = [
            client.chat(
                [{"role": "user", "content": text}], max_tokens=MAX_TOKENS, temperature=temperature, seed=7
            )
            for text in texts[start : start + width]
        ]
        ids += [list(result.choices[0].token_ids) for result in await asyncio.gather(*calls)]
    return time.monotonic() - began, ids


async def measured(plain: Address, guessing: Address, rounds: int) -> list[dict[str, Any]]:
    """One entry for each kind, width and temperature."""
    found = []
    async with AsyncClient(str(plain)) as without, AsyncClient(str(guessing)) as with_guesses:
        for temperature in TEMPERATURES:
            for kind, texts in prompts().items():
                for width in WIDTHS:
                    seconds: dict[str, list[float]] = {"without": [], "with": []}
                    outputs = []
                    for round_number in range(rounds + 1):
                        for name, client in (("without", without), ("with", with_guesses)):
                            took, ids = await answers(client, texts, width, temperature)
                            outputs.append(ids)
                            if round_number:
                                seconds[name].append(took)
                    ratios = [a / b for a, b in zip(seconds["without"], seconds["with"], strict=True)]
                    found.append(
                        {
                            "kind": kind,
                            "width": width,
                            "temperature": temperature,
                            "output_tokens": sum(map(len, outputs[0])),
                            "seconds_without": round(statistics.median(seconds["without"]), 2),
                            "seconds_with": round(statistics.median(seconds["with"]), 2),
                            "times_as_fast": round(statistics.median(ratios), 2),
                            "all_rounds": [round(ratio, 2) for ratio in ratios],
                            "same_answers": all(ids == outputs[0] for ids in outputs),
                        }
                    )
                    print(json.dumps(found[-1]), flush=True)
    return found


async def main() -> None:
    """Measures, prints a line for each entry, and writes them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = ("--model", options.model)
    async with (
        service(*flags) as (plain, _),
        service(*flags, "--num-speculative-tokens", "8") as (guessing, _),
    ):
        found = await measured(plain, guessing, options.rounds)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
