"""`chairlift demo`: asks twelve questions at once on four seats, and shows what the batch did.

A real service is started, asked and stopped three times: with the batch re-formed at every iteration, and
with both kinds of request-level batching. It uses what any client has: Generate and Watch.
"""

import asyncio
import contextlib
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift.about import about
from chairlift.calls import Router, router_at
from chairlift.figures import Answer, figures
from chairlift.own_service import own_service
from chairlift.parser import Parser
from chairlift.results import ChairliftError
from chairlift.seats import Step, picture
from chairlift.summaries import step_of
from chairlift.tables import PlainConsole
from protos.v1 import common_pb2, router_pb2, router_pb2_grpc
from rpc.address import Address
from rpc.errors import StartError

NUM_SEATS = 4
# Very different lengths: a word, a sentence, a story. The limit only keeps a small model from rambling.
QUESTIONS = (
    ("What is the capital of France?", 48),
    ("Tell me a short story about a fox who learns to ski.", 160),
    ("What is 2 + 2?", 48),
    ("Explain how rain forms, step by step.", 128),
    ("Which season comes after winter?", 48),
    ("Why is the sky blue?", 128),
    ("Who wrote Romeo and Juliet?", 48),
    ("What should I pack for a day of hiking?", 128),
    ("What is the opposite of hot?", 48),
    ("Explain what a computer does.", 128),
    ("How many days are there in a week?", 48),
    ("Give three tips for learning a new language.", 160),
)
LETTERS = tuple(string.ascii_uppercase[: len(QUESTIONS)])
_WARM_UP = "demo-warm-up"
_WARM_UP_ATTEMPTS = 5
_STEP_WAIT_SECONDS = 2.0
_TAIL_CHARACTERS = 60
_BATCHINGS = {
    "iteration": "batch re-formed at every iteration",
    "request": "request-level, finished rows dropped",
    "request-padded": "request-level, finished rows padded",
}


@dataclass(slots=True)
class Run:
    """What one service made of the questions."""

    answers: list[Answer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 when every question was answered three times."""
    parser = Parser(prog="chairlift demo", description=about(__doc__))
    parser.add_argument(
        "--model", default="smollm2", help="what `chairlift serve --model` takes (%(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="number type of the computation (%(default)s)")
    options = parser.parse_args(argv)
    console = PlainConsole()
    try:
        return asyncio.run(_demo(options.model, options.dtype, console))
    except (StartError, ChairliftError) as error:
        console.print(f"chairlift demo: {error}", style="red", soft_wrap=True)
        return 1


async def _demo(model: str, dtype: str, console: Console) -> int:
    runs: dict[str, Run] = {}
    for batching, description in _BATCHINGS.items():
        console.rule(f"{description} (--batching {batching})")
        async with _service(model, dtype, batching, console) as address:
            show = _Board(console) if batching == "iteration" else contextlib.nullcontext(_ignore)
            async with router_at(Router(address)) as router:
                runs[batching] = await _ask_all(router, show)
        if batching == "iteration":
            _print_picture(runs[batching], console)
    console.rule("figures")
    for batching, run in runs.items():
        console.print(f"{batching:<15}{figures(run.answers, run.steps)}", soft_wrap=True)
    return 0


def _service(
    model: str, dtype: str, batching: str, console: Console
) -> contextlib.AbstractAsyncContextManager[Address]:
    """A service of the demo's own, its lines printed while it starts."""
    flags = ["--model", model, "--dtype", dtype, "--batching", batching, "--max-num-seqs", str(NUM_SEATS)]
    flags += ["--num-speculative-tokens", "0"]  # one token a step and seat: that is what is drawn

    def tell(line: str) -> None:
        console.print(line, style="dim", soft_wrap=True)

    return own_service([*flags, "--log-level", "error"], tell=tell)


async def _ask_all(
    router: "router_pb2_grpc.RouterAsyncStub",
    show: contextlib.AbstractContextManager[Callable[[str, str, bool], None]],
) -> Run:
    """Asks everything at once, in the order of the letters, and watches the steps."""
    run = Run()
    seen = asyncio.Condition()
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(_watch(router, run.steps, seen))]
    try:
        await _warm_up(router, run.steps, seen)
        started = time.monotonic()
        with show as tell:
            asked: list[asyncio.Future[Answer]] = []
            for letter, (question, max_tokens) in zip(LETTERS, QUESTIONS, strict=True):
                accepted = asyncio.Event()
                request = _request(letter, question, max_tokens)
                asked.append(asyncio.ensure_future(_ask(router, request, started, accepted, tell)))
                await accepted.wait()  # so that the queue's order is the order of the letters
            tasks += asked
            run.answers = list(await asyncio.gather(*asked))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    run.steps[:] = [step for step in run.steps if any(member.name in LETTERS for member in step.members)]
    return run


def _request(letter: str, question: str, max_tokens: int) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(
        request_id=letter,
        chat=router_pb2.Chat(messages=[router_pb2.Message(role="user", content=question)]),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
    )


async def _ask(
    router: "router_pb2_grpc.RouterAsyncStub",
    request: router_pb2.GenerateRequest,
    started: float,
    accepted: asyncio.Event,
    tell: Callable[[str, str, bool], None],
) -> Answer:
    """Streams one answer; `accepted` is set at its first event, or when there will be none.

    Raises:
        ChairliftError: it ended otherwise than by STOP or LENGTH.
    """
    text, first_token_seconds = "", 0.0
    finished = router_pb2.Finished()
    try:
        async for event in router.Generate(request):
            accepted.set()
            match event.WhichOneof("event"):
                case "delta":
                    first_token_seconds = first_token_seconds or time.monotonic() - started
                    text += event.delta.text
                    tell(request.request_id, text, False)
                case "finished":
                    finished = event.finished
    finally:
        accepted.set()
    if finished.reason not in {common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH}:
        reason = common_pb2.FinishReason.Name(finished.reason)
        raise ChairliftError("INTERNAL", f"question {request.request_id} ended with {reason}")
    tell(request.request_id, text, True)
    seconds = time.monotonic() - started
    return Answer(request.request_id, text, finished.usage.num_output_tokens, first_token_seconds, seconds)


async def _watch(
    router: "router_pb2_grpc.RouterAsyncStub", steps: list[Step], seen: asyncio.Condition
) -> None:
    async for summary in router.Watch(router_pb2.WatchRequest()):
        steps.append(step_of(summary))
        async with seen:
            seen.notify_all()


async def _warm_up(
    router: "router_pb2_grpc.RouterAsyncStub", steps: list[Step], seen: asyncio.Condition
) -> None:
    """Asks for one token until the watch has shown a step: from then on it misses none.

    Raises:
        ChairliftError: no step was ever shown.
    """
    for attempt in range(_WARM_UP_ATTEMPTS):
        request = _request(f"{_WARM_UP}-{attempt}", "Hello", 1)
        async for _ in router.Generate(request):
            pass
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STEP_WAIT_SECONDS), seen:
                await seen.wait_for(lambda: bool(steps))
                return
    raise ChairliftError("INTERNAL", "the router's Watch shows no steps")


class _Board:
    """The answers as they grow: a live table on a terminal, one finished answer after the other elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._answers = dict.fromkeys(LETTERS, Text(""))
        self._growing = True
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8)

    def __enter__(self) -> Callable[[str, str, bool], None]:
        if self._console.is_terminal:
            self._live.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._growing = False
        if self._console.is_terminal:
            self._live.stop()

    def _tell(self, letter: str, text: str, finished: bool) -> None:  # noqa: FBT001 - one callback, two phases
        self._answers[letter] = Text(text.strip(), style="" if finished else "cyan")
        if finished and not self._console.is_terminal:
            question = QUESTIONS[LETTERS.index(letter)][0]
            self._console.print(f"{letter}  {question}\n   {text.strip()}\n", soft_wrap=True, markup=False)

    def _table(self) -> Table:
        table = Table("", "question", "answer", expand=True, show_lines=True)
        for letter, (question, _) in zip(LETTERS, QUESTIONS, strict=True):
            answer = self._answers[letter]
            # While it grows, the newest line of each is what fits on a screen.
            table.add_row(letter, question, answer[-_TAIL_CHARACTERS:] if self._growing else answer)
        return table


def _ignore(_letter: str, _text: str, _finished: bool) -> None:  # noqa: FBT001 - stands in for _Board's
    """Shows nothing: the baselines are for the figures alone."""


def _print_picture(run: Run, console: Console) -> None:
    console.rule("who sat in which of the four seats, a row for each change")
    rows = picture(run.steps, num_seats=NUM_SEATS, letters={letter: letter for letter in LETTERS})
    for row in rows:
        console.print(str(row), soft_wrap=True)
    console.print(f"{len(run.steps)} steps in all; after the last one all have left.", style="dim")
