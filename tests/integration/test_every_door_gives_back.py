"""B31 as one table: whichever door a call came by, and wherever it is, giving it up gives everything back.

What the scheduler and the executor did is read from their own logs, by the prompt's length, which is unique.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.prompts import prompt
from tests.rig import cluster
from tests.rig.client import Client, client_of, request
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_all_leave, check_quiet, wait_until_idle
from tests.rig.scripted_executor import Script

WINDOW = 2
SEATS, BUDGET = 2, 32
SCRIPT = Script(max_num_batched_tokens=BUDGET, step_seconds=0.01)
WAIT_SECONDS = 30.0

_lengths = itertools.count(40)


@pytest.fixture(scope="module")
def running(tiny_model_folder: Path) -> Iterator[Cluster]:
    with cluster.assembling(tiny_model_folder) as assembled:
        assembled.start_scripted_executor(SCRIPT)
        assembled.start_scheduler("--max-num-seqs", str(SEATS))
        assembled.start_router("--http", f"unix:{assembled.folder}/http.sock")
        assembled.wait()
        yield assembled


@dataclass(frozen=True)
class Asked:
    """A request that all doors can put."""

    length: int
    max_tokens: int
    priority: int = 0

    @property
    def message(self) -> Any:
        return request(prompt(self.length), max_tokens=self.max_tokens, priority=self.priority)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": prompt(self.length),
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            "ignore_eos": True,
        }


# --- doors: each holds its call open until it is cancelled ----------------------------------------------


async def grpc_unary(client: Client, _http: httpx2.AsyncClient, asked: Asked) -> None:
    await client.stub.Complete(asked.message)
    await asyncio.Event().wait()


async def grpc_stream(client: Client, _http: httpx2.AsyncClient, asked: Asked) -> None:
    call = client.stub.Generate(asked.message)
    try:
        await asyncio.Event().wait()  # reads nothing
    finally:
        call.cancel()


async def http_unary(_client: Client, http: httpx2.AsyncClient, asked: Asked) -> None:
    await http.post("/v1/completions", json=asked.body)
    await asyncio.Event().wait()


async def http_stream(_client: Client, http: httpx2.AsyncClient, asked: Asked) -> None:
    async with http.stream("POST", "/v1/completions", json=asked.body | {"stream": True}):
        await asyncio.Event().wait()  # reads nothing


# --- states ---------------------------------------------------------------------------------------------


class Stage:
    """One call and what stands around it."""

    def __init__(self, running: Cluster, client: Client, http: httpx2.AsyncClient, door: Any) -> None:
        self.running, self.client, self.http, self.door = running, client, http, door
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, asked: Asked) -> None:
        self.asked = asked
        self.task = asyncio.create_task(self.door(self.client, self.http, asked))

    async def occupy(self) -> None:
        """Takes every seat for long."""
        for _ in range(SEATS):
            asked = Asked(next(_lengths), 4000)
            self.tasks.append(asyncio.create_task(grpc_stream(self.client, self.http, asked)))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await asyncio.to_thread(holds):
                pass

    def load_is(self, num_running: int, num_waiting: int) -> bool:
        load = self.running.load()
        return (load.num_running, load.num_waiting) == (num_running, num_waiting)

    def admissions(self) -> list[int]:
        """The seq_ids under which the call has run."""
        return [
            seq_id
            for step in self.running.scripted().steps()
            for seq_id, _, num_prompt_tokens, _ in step["admitted"]
            if num_prompt_tokens == self.asked.length
        ]

    def released_at(self, seq_id: int) -> int | None:
        """The step whose plan told the executor to forget this sequence."""
        steps = self.running.scripted().steps()
        return next((int(step["step_id"]) for step in steps if seq_id in step["released"]), None)

    def num_sampled(self) -> int:
        seq_ids = {str(seq_id) for seq_id in self.admissions()}
        return sum(
            len(ids)
            for step in self.running.scripted().steps()
            for seq_id, ids in step["sampled"].items()
            if seq_id in seq_ids
        )


async def waiting(stage: Stage) -> None:
    await stage.occupy()
    await stage.until(lambda: stage.load_is(SEATS, 0))
    stage.start(Asked(next(_lengths), 1000))
    await stage.until(lambda: stage.load_is(SEATS, 1))


async def between_chunks(stage: Stage) -> None:
    stage.start(Asked(6000 + next(_lengths), 1000))
    await stage.until(lambda: bool(stage.admissions()))


async def decoding(stage: Stage) -> None:
    stage.start(Asked(next(_lengths), 1000))
    await stage.until(lambda: stage.num_sampled() > 3)


async def preempted(stage: Stage) -> None:
    stage.start(Asked(next(_lengths), 1000, priority=5))
    await stage.until(lambda: stage.num_sampled() > 12)
    await stage.occupy()
    await stage.until(lambda: stage.released_at(stage.admissions()[0]) is not None)


async def finished_and_not_read(stage: Stage) -> None:
    stage.start(Asked(next(_lengths), 3))
    await stage.until(lambda: stage.num_sampled() == 3 and stage.load_is(0, 0))


STATES: list[Callable[[Stage], Awaitable[None]]] = [
    waiting,
    between_chunks,
    decoding,
    preempted,
    finished_and_not_read,
]


@asynccontextmanager
async def stage_of(running: Cluster, door: Any) -> AsyncIterator[Stage]:
    transport = httpx2.AsyncHTTPTransport(uds=f"{running.folder}/http.sock")
    async with (
        client_of(running) as client,
        httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
    ):
        stage = Stage(running, client, http, door)
        try:
            yield stage
        finally:
            for task in [*stage.tasks, stage.task]:
                task.cancel()
            await asyncio.gather(*stage.tasks, stage.task, return_exceptions=True)


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("door", [grpc_unary, grpc_stream, http_unary, http_stream])
async def test_b31_whatever_the_door_and_the_state_all_is_given_back_within_window_plus_one_plans(
    running: Cluster, door: Any, reach: Callable[[Stage], Awaitable[None]]
) -> None:
    async with stage_of(running, door) as stage:
        await reach(stage)
        num_admissions = len(stage.admissions())
        stage.task.cancel()
        await asyncio.gather(stage.task, return_exceptions=True)
        if reach is finished_and_not_read:
            return
        others = len(stage.tasks)
        await stage.until(lambda: stage.load_is(others, 0))
        cancelled_at = await _cancelled_after_step(running, stage.asked.length)
        admissions = stage.admissions()
        assert len(admissions) == num_admissions == (0 if reach is waiting else 1), "it did not come back"
        if reach in {between_chunks, decoding}:
            await stage.until(lambda: stage.released_at(admissions[0]) is not None)
            assert stage.released_at(admissions[0]) <= cancelled_at + WINDOW + 1  # type: ignore[operator]
        if reach is between_chunks:
            assert stage.num_sampled() == 0
    await asyncio.to_thread(wait_until_idle, running)


def _log(running: Cluster, name: str) -> list[dict[str, Any]]:
    *lines, _ = running.process(name).stderr.split("\n")  # the last one may not be whole yet
    return [json.loads(line) for line in lines if line.startswith("{")]


async def _cancelled_after_step(running: Cluster, length: int) -> int:
    """The newest step that the scheduler had applied when the cancel came to it."""
    async with asyncio.timeout(30):
        while True:
            log = _log(running, "scheduler")
            (request_id,) = {
                entry["request_id"]
                for entry in log
                if entry["event"] == "sequence_submitted" and entry["num_prompt_tokens"] == length
            }
            step_ids = [
                entry["step_id"]
                for entry in log
                if entry["event"] == "sequence_cancelled" and entry["request_id"] == request_id
            ]
            if step_ids:
                (step_id,) = step_ids
                return int(step_id)
            await asyncio.sleep(0.01)  # it has happened, and the log says it in a moment


def test_b31_nothing_is_left_and_nobody_complained(running: Cluster) -> None:
    check_quiet(running)
    for name in ("router", "scheduler"):
        assert not [entry for entry in _log(running, name) if entry["level"] in {"error", "critical"}]
    check_all_leave(running)
