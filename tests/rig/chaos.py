"""A whole server under load, of which anything may be killed, frozen or cut: who is lost, who is doubled?

Two routers, a scheduler and its standby, several executors behind ways that can be cut. Clients ask the same
requests again and again through the client library; each answer must be the one that was got before anything
went wrong, to the last id.
"""

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import chairlift
from protos.v1 import router_pb2, scheduler_pb2_grpc
from tests.rig import cluster
from tests.rig.cluster import Cluster
from tests.rig.way import Way

ROUTERS = ("router0", "router1")
SCHEDULERS = ("scheduler0", "scheduler1")
LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; its seed makes the answer a function of it."""

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)


Answer = list[tuple[list[int], str, str | None]]
"""Ids, text and reason of each choice."""


@dataclass(slots=True)
class Tally:
    """What came of it."""

    num_answered: int = 0
    num_delivered: int = 0  # tokens
    num_prompt: int = 0  # tokens, of those answered
    num_computed: int = 0  # tokens, as far as anybody watched
    wrong: list[str] = field(default_factory=list)


class Chaos:
    """The server, its clients, and what is done to them."""

    def __init__(
        self, running: Cluster, ways: dict[str, Way], questions: Sequence[Question], lease_seconds: float
    ) -> None:
        self.cluster = running
        self.ways = ways
        self.executors = tuple(ways)
        self.questions = questions
        self.lease_seconds = lease_seconds
        self.tally = Tally()
        self._right: dict[int, Answer] = {}
        self._is_over = asyncio.Event()
        self._leaving = 0.0

    # --- clients --------------------------------------------------------------------------------------

    async def learn(self) -> None:
        """Asks every question while nothing goes wrong."""
        async with self._client(0) as client:
            answers = await asyncio.gather(*(self._ask(client, question) for question in self.questions))
        self._right = dict(enumerate(answers))

    @contextlib.asynccontextmanager
    async def load(self, num_clients: int, at_least: int, *, leaving: float = 0.0) -> AsyncIterator[Tally]:
        """Clients ask as long as the block runs, and until `at_least` answers are there.

        `leaving`: the share of calls that are given up in the middle.
        """
        self._leaving = leaving
        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(self._watch(name)) for name in SCHEDULERS]
            clients = [
                group.create_task(self._ask_on(first, numbers, at_least)) for first in range(num_clients)
            ]
            yield self.tally
            self._is_over.set()
            await asyncio.wait(clients)
            for watcher in watchers:
                watcher.cancel()

    def _client(self, first: int) -> chairlift.AsyncClient:
        order = ROUTERS[first % 2 :] + ROUTERS[: first % 2]
        return chairlift.AsyncClient(",".join(map(self.cluster.address, order)), max_retries=60)

    async def _ask_on(self, first: int, numbers: "itertools.count[int]", at_least: int) -> None:
        async with self._client(first) as client:
            while True:
                number = next(numbers)
                if self._is_over.is_set() and number >= at_least:
                    return
                index = number % len(self.questions)
                if random.Random(number).random() < self._leaving:
                    await self._ask_and_leave(client, self.questions[index])
                    continue
                try:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        answer = await self._ask(client, self.questions[index])
                except (chairlift.ChairliftError, TimeoutError) as error:
                    self.tally.wrong.append(f"question {index} is lost: {error!r}")
                    continue
                if answer != self._right[index]:
                    self.tally.wrong.append(f"question {index}: {answer}, right is {self._right[index]}")
                self.tally.num_answered += 1
                self.tally.num_prompt += len(answer) * len(self.questions[index].prompt)
                self.tally.num_delivered += sum(len(token_ids) for token_ids, _, _ in answer)

    @staticmethod
    async def _ask_and_leave(client: chairlift.AsyncClient, question: Question) -> None:
        async with client.stream(question.prompt, **question.options) as stream:
            async for _ in stream:
                return

    @staticmethod
    async def _ask(client: chairlift.AsyncClient, question: Question) -> Answer:
        num_choices = question.options.get("n", 1)
        ids: list[list[int]] = [[] for _ in range(num_choices)]
        reasons: list[str | None] = [None] * num_choices
        async with client.stream(question.prompt, **question.options) as stream:
            async for piece in stream:
                assert reasons[piece.index] is None, "something comes after the end"
                ids[piece.index] += piece.token_ids
                reasons[piece.index] = piece.finish_reason
            texts = [choice.text for choice in stream.answer.choices]
        assert all(reasons), "a stream ended without an end"
        return list(zip(ids, texts, reasons, strict=True))

    async def _watch(self, name: str) -> None:
        """Counts what is computed, by the summaries of a scheduler, whenever it is there."""
        async with self.cluster.aio_channel(name) as channel:
            stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for summary in stub.Watch(router_pb2.WatchRequest()):
                        self.tally.num_computed += sum(member.num_tokens for member in summary.members)
                await asyncio.sleep(0.1)

    # --- what is done to the server -------------------------------------------------------------------

    async def crash(self, name: str) -> None:
        """kill -9, and the same process again, until it is up."""
        await asyncio.to_thread(self.cluster.kill, name)
        await asyncio.to_thread(self.cluster.restart, name)
        if name in self.executors:
            await asyncio.to_thread(self.cluster.process(name).wait_until_serving)

    @contextlib.asynccontextmanager
    async def crashing(self, names: Sequence[str], *, every_seconds: float) -> AsyncIterator[asyncio.Lock]:
        """While the block runs, one after the other is killed; who holds the lock is spared from it."""
        lock = asyncio.Lock()

        async def crash_on() -> None:
            for name in itertools.cycle(names):
                async with lock:
                    await self.crash(name)
                await asyncio.sleep(every_seconds)

        task = asyncio.create_task(crash_on())
        try:
            yield lock
            async with lock:
                task.cancel()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self, name: str) -> int:
        """SIGTERM, and the same process again when it has left; returns its exit code.

        An executor is waited for; the others are there for each other.
        """
        code = await asyncio.to_thread(self.cluster.stop, name, PATIENCE_SECONDS)
        await asyncio.to_thread(self.cluster.restart, name)
        if name in self.executors:
            await asyncio.to_thread(self.cluster.process(name).wait_until_serving)
        return code

    async def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        pid = self.cluster.process(name).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def leader(self) -> str:
        """The scheduler that serves, once one does."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                for name in SCHEDULERS:
                    if await self.cluster_is_serving(name):
                        return name
                await asyncio.sleep(0.05)

    async def cluster_is_serving(self, name: str) -> bool:
        """Whether this process says that it serves; false when it does not answer."""
        return await asyncio.to_thread(self.cluster.is_serving, name)

    async def progress(self, num_answers: int = 3) -> None:
        """Returns when clients have had some more answers."""
        wanted = self.tally.num_answered + num_answers
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.tally.num_answered < wanted:  # noqa: ASYNC110 - any client's answer counts
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def chaos(
    model: Path,
    questions: Sequence[Question],
    *,
    num_executors: int,
    executor_flags: Sequence[str] = (),
    scheduler_flags: Sequence[str] = (),
    lease_seconds: float = LEASE_SECONDS,
) -> AsyncIterator[Chaos]:
    """The whole server, serving, with the right answers known."""
    with cluster.assembling(model) as running:
        secret = running.folder / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        executors = [f"executor{number}" for number in range(num_executors)]
        async with contextlib.AsyncExitStack() as stack:
            ways = {}
            for name in executors:
                start = lambda name=name: running.start_executor(*executor_flags, name=name)  # noqa: E731
                await asyncio.to_thread(start)
                way = Way(f"{running.folder}/{name}-way.sock", f"{running.folder}/{name}.sock")
                ways[name] = await stack.enter_async_context(way)
            lease = ("--lease", f"{running.folder}/lease", "--lease-seconds", str(lease_seconds))
            for name in SCHEDULERS:
                running.start_scheduler(
                    *lease,
                    *("--scheduler-id", name),
                    *scheduler_flags,
                    name=name,
                    executors=[f"{name}-way" for name in executors],
                )
            for name in ROUTERS:
                running.start_router(
                    *("--cluster-secret-file", str(secret)), name=name, schedulers=("|".join(SCHEDULERS),)
                )
            one = Chaos(running, ways, questions, lease_seconds)
            for name in (*executors, *ROUTERS):
                await asyncio.to_thread(running.process(name).wait_until_serving)
            await one.learn()
            yield one
