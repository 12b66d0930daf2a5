"""The client library in one page.

chairlift serve --model smollm2 &
python examples/python_client.py [ADDRESS]
"""

import asyncio
import sys

import chairlift

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
QUESTIONS = ["What is a chairlift?", "Name three rivers.", "Why is the sky blue?"]


def one_answer() -> None:
    """Asks, waits, and looks at what came back."""
    with chairlift.Client(ADDRESS) as client:
        answer = client.chat("What is the capital of France?", max_tokens=32, temperature=0)
        choice = answer.choices[0]
        print(answer.text)
        print(f"  ({choice.finish_reason}, {choice.usage.num_output_tokens} tokens, seed {answer.seed})")


def as_it_comes() -> None:
    """Prints each piece at once. A stream that breaks goes on where it stopped, by itself."""
    with chairlift.Client(ADDRESS) as client, client.stream("Once upon a time", max_tokens=32) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
        print()


async def many_at_once() -> None:
    """Many requests share the server's batch: each enters and leaves it at its own step."""
    async with chairlift.AsyncClient(ADDRESS) as client:
        answers = await asyncio.gather(*(client.chat(question, max_tokens=24) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer.text!r}")


def a_refusal() -> None:
    """What is wrong is named; what may be tried again has been tried again already."""
    with chairlift.Client(ADDRESS) as client:
        try:
            client.generate("Hi", temperature=-1)
        except chairlift.ChairliftError as error:
            print(f"{error.code}: {error.message} (field {error.field})")


if __name__ == "__main__":
    one_answer()
    as_it_comes()
    asyncio.run(many_at_once())
    a_refusal()
