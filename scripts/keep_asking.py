"""Clients that ask the same things again and again until SIGTERM: does any stream fail, any answer change?

    python scripts/keep_asking.py --address 127.0.0.1:50051

Ends with exit code 0 and a line of what was answered, or with 1 at the first stream that fails or answer that
differs from the first one to the same question. Nothing is asked again: no retry hides a failure.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

import chairlift

QUESTIONS = ("What is snow?", "Count from one to twenty.", "Name three rivers.", "Why is the sky blue?")
MAX_TOKENS = 64


class Asking:
    """All clients, and what they have seen."""

    def __init__(self, address: str) -> None:
        self.num_answers = 0
        self.failure = ""
        self._address = address
        self._first: dict[str, Sequence[int]] = {}
        self._over = asyncio.Event()

    def stop(self) -> None:
        """Each client ends with the answer that it is reading."""
        self._over.set()

    async def run(self, num_clients: int) -> None:
        """Asks until told to stop, or until something fails."""
        await asyncio.gather(*(self._ask_on(QUESTIONS[i % len(QUESTIONS)]) for i in range(num_clients)))

    async def _ask_on(self, question: str) -> None:
        async with chairlift.AsyncClient(self._address, max_retries=0) as client:
            while not self._over.is_set():
                try:
                    answer = await client.generate(
                        question, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0
                    )
                except chairlift.ChairliftError as error:
                    self._fail(f"{question!r} failed after {self.num_answers} answers: {error}")
                    return
                token_ids = list(answer.choices[0].token_ids)
                if self._first.setdefault(question, token_ids) != token_ids:
                    self._fail(f"{question!r} was answered otherwise than before")
                    return
                self.num_answers += 1

    def _fail(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._over.set()


async def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051", help="the router")
    parser.add_argument("--clients", type=int, default=8, help="how many ask at once")
    told = parser.parse_args()
    asking = Asking(told.address)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asking.stop)
    await asking.run(told.clients)
    if asking.failure:
        print(asking.failure, file=sys.stderr)
        return 1
    print(f"{asking.num_answers} answers, each like the first one to its question; no stream failed")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
