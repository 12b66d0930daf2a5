"""A scheduler with its real gRPC server in this process, an executor that obeys, and a router's stream.

The executor is the rig's toy one. A test can hold its results back, change them, and cut its streams. What
the event loop had to complain of (a task that nobody waited for) fails the test. The status of a router's
stream is taken where the scheduler gives it: gRPC loses that of a call that ends while its client writes.
"""

import asyncio
import contextlib
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from protos.v1 import common_pb2, executor_pb2, executor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from rpc.address import Address
from rpc.channel import connect, server_options
from scheduler import audit, wire
from scheduler.core import SchedulerCore
from scheduler.executor_directory import ExecutorDirectory
from scheduler.executor_loop import ExecutorLoop
from scheduler.leadership import Leadership
from scheduler.lease import Lease
from scheduler.lease_file import LeaseFile
from scheduler.policy import Limits
from scheduler.running_scheduler import RunningScheduler
from scheduler.servicer import SchedulerServicer
from tests.rig import toy_executor

MAX_MESSAGE_BYTES = 1 << 24
PATIENCE_SECONDS = 20


def expected_ids(prompt: list[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """What the toy executor says when nothing disturbs it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(zlib.crc32(repr(tokens).encode()) % toy_executor.VOCAB)
        if tokens[-1] == toy_executor.EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


async def until(holds: Callable[[], object]) -> None:
    """Returns when the condition holds; a test that waits in vain fails."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - any of many events may make it true
            await asyncio.sleep(0.002)


# --- the executor ---------------------------------------------------------------------------------


class ObedientExecutor(toy_executor.ToyExecutor):
    """The toy executor in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_cuts = 0  # how many of the next results are replaced by a cut of their stream
        self.change: Callable[[executor_pb2.StepResult], Any] = lambda result: result
        self.offer: Callable[[executor_pb2.OpenResponse], None] = lambda response: None
        self.num_opened = 0
        self.num_executed = 0
        self.plans: list[executor_pb2.BatchPlan] = []

    async def Open(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the contract
        response = await super().Open(request, context)
        self.num_opened += 1
        self.offer(response)
        return response

    async def Execute(  # type: ignore[override]  # noqa: N802 - it writes through the context
        self, _: Any, context: Any
    ) -> None:
        self.num_executed += 1
        await super().Execute(_, _Tap(self, context))


class _Tap:
    """The context of one Execute call, as far as the toy uses it."""

    def __init__(self, executor: ObedientExecutor, context: Any) -> None:
        self._executor = executor
        self._context = context
        self.abort = context.abort
        self.set_trailing_metadata = context.set_trailing_metadata

    async def read(self) -> Any:
        plan = await self._context.read()
        if plan is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            self._executor.plans.append(plan)
        return plan

    async def write(self, result: executor_pb2.StepResult) -> None:
        await self._executor.may_answer.wait()
        if self._executor.num_cuts:
            self._executor.num_cuts -= 1
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the cable is out")
        await self._context.write(self._executor.change(result))


@contextlib.asynccontextmanager
async def serving_executor(executor: ObedientExecutor, address: str) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=server_options(max_message_bytes=MAX_MESSAGE_BYTES))
    executor_pb2_grpc.add_ExecutorServicer_to_server(executor, server)
    server.add_insecure_port(address)
    try:
        await server.start()
        yield server
    finally:
        await server.stop(0)


# --- the router -----------------------------------------------------------------------------------


def key_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


@dataclass
class Router:
    """One Connect stream; everything that came, by handle."""

    call: Any
    ended_with: "dict[str, tuple[grpc.StatusCode, str]]"  # of each stream that the scheduler has ended
    number: str
    acks: bool = True
    messages: list[scheduler_pb2.SchedulerMessage] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, scheduler_pb2.SequenceFinished] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    end: grpc.aio.AioRpcError | None = None
    reading: "asyncio.Task[None] | None" = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, message: scheduler_pb2.RouterMessage) -> None:
        async with self.writing:  # a call takes one write at a time, and acks come from a task of their own
            await self.call.write(message)

    async def send(self, **message: Any) -> None:
        await self.write(scheduler_pb2.RouterMessage(**message))

    async def submit(
        self,
        handle: int,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        output: list[int] | None = None,
        ignore_eos: bool = True,
        **fields: Any,
    ) -> None:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        submit: dict[str, Any] = {
            "key": key_of(name),
            "request_id": name,
            "prompt_token_ids": prompt,
            "sampling": sampling,
        }
        submit |= {"handle": handle, "output_token_ids": output or []} | fields
        self.ids.setdefault(handle, list(output or []))
        await self.send(submit=scheduler_pb2.Submit(**submit))

    async def cancel(
        self, name: str, reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_ABORT
    ) -> None:
        await self.send(cancel=scheduler_pb2.Cancel(key=key_of(name), reason=reason))

    async def read(self) -> None:
        try:
            async for message in self.call:
                self.messages.append(message)
                if message.HasField("step_output"):
                    await self._take(message.step_output)
        except grpc.aio.AioRpcError as error:
            self.end = error

    async def _take(self, output: scheduler_pb2.StepOutput) -> None:
        at = 0
        for handle, count in zip(output.handles, output.num_tokens, strict=True):
            assert handle not in self.finished, "tokens after the end"
            self.ids[handle] += output.token_ids[at : at + count]
            at += count
        assert at == len(output.token_ids)
        self.started += [item.handle for item in output.started]
        for item in output.finished:
            assert item.handle not in self.finished, "a second end"
            self.finished[item.handle] = item
        if self.acks:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.send(ack=scheduler_pb2.Ack(message_id=output.message_id))

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """The status that the scheduler ended the stream with, once it is over at this side too."""
        assert self.reading is not None
        await until(self.reading.done)
        await until(lambda: self.number in self.ended_with)
        return self.ended_with[self.number]

    async def leave(self) -> None:
        self.call.cancel()
        assert self.reading is not None
        await asyncio.gather(self.reading, return_exceptions=True)

    @property
    def statuses(self) -> list[scheduler_pb2.ServingStatus]:
        return [item.serving_status for item in self.messages if item.HasField("serving_status")]

    @property
    def is_welcome(self) -> bool:
        return any(item.HasField("welcome") for item in self.messages) and self.statuses[-1].serving


# --- the scheduler --------------------------------------------------------------------------------

_NUMBER = "stream-number"


class _WatchedServicer(SchedulerServicer):
    """The servicer; tells with which status it ends a router's stream."""

    def __init__(self, *args: Any, ended_with: dict[str, tuple[grpc.StatusCode, str]], **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._ended_with = ended_with

    async def Connect(  # type: ignore[override]  # noqa: N802 - named by the contract
        self, request_iterator: Any, context: Any
    ) -> None:
        await super().Connect(request_iterator, _WatchedContext(context, self._ended_with))


class _WatchedContext:
    """The context of one Connect call, as far as the servicer uses it."""

    def __init__(self, context: Any, ended_with: dict[str, tuple[grpc.StatusCode, str]]) -> None:
        self.write = context.write
        self._context = context
        self._ended_with = ended_with

    async def abort(self, code: grpc.StatusCode, details: str, *more: Any) -> None:
        number = dict(self._context.invocation_metadata()).get(_NUMBER, "")
        self._ended_with[number] = code, details
        await self._context.abort(code, details, *more)


class Shell:
    """One scheduler process's inside."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        router_stall_seconds: float = 10.0,
        reattach_seconds: float = 0.3,
        step_timeout_seconds: float = 60.0,
        scheduler_id: str = "this-scheduler",
        lease_seconds: float | None = None,
    ) -> None:
        """With `lease_seconds` it leads or stands by, as a lease in the folder says."""
        self.executor_address = f"unix:{folder}/executor.sock"
        self.address = f"unix:{folder}/{scheduler_id}.sock"
        self._scheduler_id = scheduler_id
        self.serving: list[tuple[bool, str]] = []
        self.core = SchedulerCore(limits, padding_sampling=wire.padding_sampling())
        self.scheduler = RunningScheduler(
            self.core, on_serving=lambda serving, reason: self.serving.append((serving, reason))
        )
        self._stall_seconds = router_stall_seconds
        self._reattach_seconds = reattach_seconds
        self._step_timeout_seconds = step_timeout_seconds
        self._open = contextlib.AsyncExitStack()
        self._routers: list[Router] = []
        self._ended_with: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.leadership: Leadership | None = None
        if lease_seconds is not None:
            lease = Lease(scheduler_id, lease_seconds)
            self.leadership = Leadership(lease, LeaseFile(folder / "lease"), self.scheduler, self._lead)

    async def _lead(self, term: int) -> None:
        assert self.leadership is not None
        fenced = self.leadership.fenced
        await self._directory(lambda address: self.executor_loop(address, term, fenced)).run()

    def _directory(self, make_loop: Callable[[Address], ExecutorLoop]) -> ExecutorDirectory:
        return ExecutorDirectory([Address.parse(self.executor_address, field="--executor")], make_loop)

    def executor_loop(
        self, address: Address, term: int = 0, on_held: Callable[[str, int], None] | None = None
    ) -> ExecutorLoop:
        return ExecutorLoop(
            self.scheduler,
            address,
            scheduler_id=self._scheduler_id,
            reattach_seconds=self._reattach_seconds,
            max_message_bytes=MAX_MESSAGE_BYTES,
            step_timeout_seconds=self._step_timeout_seconds,
            term=term,
            on_held=on_held,
        )

    async def start(self) -> None:
        server = grpc.aio.server(options=server_options(max_message_bytes=MAX_MESSAGE_BYTES))
        servicer = _WatchedServicer(
            self.scheduler,
            scheduler_id=self._scheduler_id,
            router_stall_seconds=self._stall_seconds,
            ended_with=self._ended_with,
        )
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)
        server.add_insecure_port(self.address)
        self._open.push_async_callback(server.stop, 0)
        await server.start()
        work = self.leadership or self._directory(self.executor_loop)
        self.tasks = [asyncio.create_task(self.scheduler.run_timers()), asyncio.create_task(work.run())]
        self.channel = connect(
            Address.parse(self.address, field="--scheduler"), max_message_bytes=MAX_MESSAGE_BYTES
        )
        self._open.push_async_callback(self.channel.close, None)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)

    async def close(self) -> None:
        try:
            for router in self._routers:
                await router.leave()
            audit.check(self.core)
        finally:
            for task in self.tasks:
                task.cancel()
            ends = await asyncio.gather(*self.tasks, return_exceptions=True)
            await self._open.aclose()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self, router_id: str = "router", *, acks: bool = True, stream: int = 0) -> Router:
        """A stream that has said Hello."""
        number = str(len(self._routers))
        call = self.stub.Connect(metadata=((_NUMBER, number),))
        router = Router(call, self._ended_with, number, acks)
        hello = scheduler_pb2.Hello(router_id=router_id, protocol_revision=1, stream=stream)
        await router.send(hello=hello)
        router.reading = asyncio.create_task(router.read())
        self._routers.append(router)
        return router

    async def welcomed(self, router_id: str = "router", *, acks: bool = True, stream: int = 0) -> Router:
        """A stream on which requests may travel."""
        router = await self.connect(router_id, acks=acks, stream=stream)
        await until(lambda: router.statuses and router.is_welcome)
        return router


@contextlib.asynccontextmanager
async def running_shell(
    limits: Limits | None = None,
    *,
    router_stall_seconds: float = 10.0,
    reattach_seconds: float = 0.3,
    step_timeout_seconds: float = 60.0,
) -> AsyncIterator[Shell]:
    """A running scheduler without an executor. Fails when it leaves a task, or an exception nobody saw."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory() as folder:  # a short path: socket paths are limited
        shell = Shell(
            Path(folder),
            limits or Limits(watermark=0.0),
            router_stall_seconds=router_stall_seconds,
            reattach_seconds=reattach_seconds,
            step_timeout_seconds=step_timeout_seconds,
        )
        async with shell:
            yield shell
    await until(lambda: not _ours(asyncio.all_tasks() - before))
    ours = [text for text in map(str, complaints) if "_Tap.read" not in text]  # the toy forgets its reads
    assert not ours, "\n".join(ours)


def _ours(tasks: "set[asyncio.Task[Any]]") -> list[str]:
    names = [repr(task.get_coro()) for task in tasks]
    return [name for name in names if "scheduler" in name.lower() or "Event.wait" in name]


async def submit_some(shell: Shell, router: Router, num_tokens: int = 30) -> None:
    """Ten requests, all of them taken in."""
    for handle in range(1, 11):
        await router.submit(handle, f"r{handle}", [handle] * (1 + handle % 5), num_tokens)
    await until(lambda: shell.core._num_submitted == 10)


def all_right(router: Router, num_tokens: int = 30) -> bool:
    return len(router.finished) == 10 and all(
        router.ids[handle] == expected_ids([handle] * (1 + handle % 5), num_tokens) for handle in range(1, 11)
    )
