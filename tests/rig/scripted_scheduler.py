"""A scheduler that says what a test tells it to: the real service, in the test's own process.

It answers Hello with its Welcome and its serving status, and keeps every message it gets. What a submitted
sequence gets is either said by the test, call by call (`give`, `finish`), or follows from a `script`: a
function from the Submit to all output ids of its sequence, handed out `tokens_a_step` at a time from where
the submitted `output_token_ids` end, closed by a Finished: `ending`, or what the ids say.
"""

# ruff: noqa: N802 - methods bear the names of the contract's RPCs
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from protos.v1 import common_pb2, router_pb2, scheduler_pb2, scheduler_pb2_grpc
from rpc.channel import server_options

Script = Callable[[scheduler_pb2.Submit], list[int]]
Context = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class Stream:
    """One router's stream as the scheduler sees it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.submits: dict[int, scheduler_pb2.Submit] = {}  # by handle, parts joined
        self.last_message_id = 0
        self.broken = asyncio.Event()
        self.writing = asyncio.Lock()

    async def write(self, message: scheduler_pb2.SchedulerMessage) -> None:
        """A call takes one write at a time, and who is greeted may be told more meanwhile."""
        async with self.writing:
            await self.context.write(message)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """See the module. `welcome` may be changed between streams; None means that no executor is there yet."""

    def __init__(
        self,
        *,
        script: Script | None = None,
        vocab_size: int = 272,
        max_total_tokens: int = 512,
        tokens_a_step: int = 1,
    ) -> None:
        self.script = script
        self.tokens_a_step = tokens_a_step
        self.ending: common_pb2.FinishReason.ValueType | None = None
        self.welcome: scheduler_pb2.Welcome | None = scheduler_pb2.Welcome(
            scheduler_id="scripted",
            term=1,
            protocol_revision=1,
            max_total_tokens=max_total_tokens,
            vocab_size=vocab_size,
            eos_token_ids=[257],
            fingerprints=common_pb2.Fingerprints(model="m", numerics="n"),
            dtype="float32",
        )
        self.serving = True
        self.accepts = True  # takes every Submit in at once
        self.reason = ""
        self.streams: list[Stream] = []
        self.submits: list[scheduler_pb2.Submit] = []  # every one, parts joined, in order of arrival
        self.cancels: list[scheduler_pb2.Cancel] = []
        self.acks: list[int] = []
        self.messages: list[scheduler_pb2.RouterMessage] = []
        self.summaries: list[router_pb2.StepSummary] = []
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what a test says ---------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something that arrived makes the condition true."""
        async with self._news:
            await self._news.wait_for(condition)

    async def submitted(self, count: int = 1) -> scheduler_pb2.Submit:
        """Waits for the first `count` requests; returns the newest of them."""
        await self.until(lambda: len(self.submits) >= count)
        return self.submits[count - 1]

    async def give(
        self,
        submit: scheduler_pb2.Submit,
        token_ids: list[int],
        *,
        finish: "common_pb2.FinishReason.ValueType | None" = None,
        logprobs: list[common_pb2.TokenLogprobs] | None = None,
        of_prompt: list[common_pb2.TokenLogprobs] | None = None,
        num_cached_tokens: int = 0,
        **finished: Any,
    ) -> None:
        """One StepOutput for one sequence: ids, and its end if `finish` is given."""
        output = scheduler_pb2.StepOutput()
        if token_ids:
            output.handles.append(submit.handle)
            output.num_tokens.append(len(token_ids))
            output.token_ids.extend(token_ids)
        if of_prompt:
            output.prompt_logprobs.add(handle=submit.handle, first_position=1, tokens=of_prompt)
        if logprobs:
            output.logprobs.add(handle=submit.handle, tokens=logprobs)
        output.started.add(handle=submit.handle, num_cached_tokens=num_cached_tokens)
        if finish is not None:
            output.finished.add(handle=submit.handle, reason=finish, **finished)
        await self.send(output)

    async def send(self, output: scheduler_pb2.StepOutput) -> None:
        """Sends a StepOutput on the newest stream, numbered unless it has a number."""
        stream = self.streams[-1]
        async with stream.writing:
            stream.last_message_id += 1
            output.message_id = output.message_id or stream.last_message_id
            await stream.context.write(scheduler_pb2.SchedulerMessage(step_output=output))

    async def set_serving(self, *, serving: bool, reason: str = "") -> None:
        """Changes what every stream is told about serving."""
        self.serving, self.reason = serving, reason
        status = scheduler_pb2.ServingStatus(serving=serving, reason=reason)
        for stream in self.streams:
            if not stream.broken.is_set():
                await stream.write(scheduler_pb2.SchedulerMessage(serving_status=status))

    def break_streams(self) -> None:
        """Ends every stream, as a network would."""
        for stream in self.streams:
            stream.broken.set()

    # --- the service --------------------------------------------------------------------------------

    async def Connect(  # type: ignore[override]  # the stubs know no handler that writes
        self, request_iterator: AsyncIterator[scheduler_pb2.RouterMessage], context: Context
    ) -> None:
        stream = Stream(context)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        breaker = asyncio.create_task(stream.broken.wait())
        try:
            await asyncio.wait([reader, breaker], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.broken.set()
            for task in (reader, breaker):
                task.cancel()
        if reader.done() and not reader.cancelled():
            reader.result()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was broken by the test")

    async def _read(self, stream: Stream, messages: AsyncIterator[scheduler_pb2.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "hello":
                    await self._greet(stream)
                case "submit":
                    await self._take(stream, message.submit)
                case "cancel":
                    self.cancels.append(message.cancel)
                case "ack":
                    self.acks.append(message.ack.message_id)
            async with self._news:
                self.messages.append(message)
                self._news.notify_all()

    async def _greet(self, stream: Stream) -> None:
        self.streams.append(stream)
        status = scheduler_pb2.ServingStatus(serving=self.serving, reason=self.reason)
        await stream.write(scheduler_pb2.SchedulerMessage(serving_status=status))
        if self.welcome is not None:
            await stream.write(scheduler_pb2.SchedulerMessage(welcome=self.welcome))

    async def _take(self, stream: Stream, submit: scheduler_pb2.Submit) -> None:
        whole = stream.submits.setdefault(submit.handle, submit)
        if whole is not submit:
            whole.prompt_token_ids.extend(submit.prompt_token_ids)
        if submit.HasField("part") and submit.part.index + 1 < submit.part.count:
            return
        self.submits.append(whole)
        if self.accepts:
            await self.send(scheduler_pb2.StepOutput(accepted=[whole.handle]))
        if self.script is not None:
            task = asyncio.create_task(self._play(stream, whole, self.script(whole)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, stream: Stream, submit: scheduler_pb2.Submit, token_ids: list[int]) -> None:
        token_ids = token_ids[: submit.sampling.max_tokens]
        ends = set(self.welcome.eos_token_ids if self.welcome is not None else ())
        is_full = len(token_ids) == submit.sampling.max_tokens and not ends & set(token_ids[-1:])
        by_ids = common_pb2.FINISH_REASON_LENGTH if is_full else common_pb2.FINISH_REASON_STOP
        ending = by_ids if self.ending is None else self.ending
        for position in range(len(submit.output_token_ids), len(token_ids), self.tokens_a_step):
            cancelled = any(cancel.key == submit.key for cancel in self.cancels)
            if stream.broken.is_set() or cancelled:
                return
            new = token_ids[position : position + self.tokens_a_step]
            is_last = position + len(new) == len(token_ids)
            with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):
                rows = _logprobs(submit, new)
                of_prompt = _of_prompt(submit) if position == len(submit.output_token_ids) else []
                end = ending if is_last else None
                await self.give(submit, new, finish=end, logprobs=rows, of_prompt=of_prompt)
            await asyncio.sleep(0)

    async def Watch(  # type: ignore[override]  # the stubs know no handler that writes
        self, request: router_pb2.WatchRequest, context: Context
    ) -> None:
        for summary in self.summaries:
            await context.write(summary)

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Explain is not served by this version")
        raise AssertionError("abort raises")

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: Context
    ) -> scheduler_pb2.GetLoadResponse:
        return scheduler_pb2.GetLoadResponse()


def _logprobs(submit: scheduler_pb2.Submit, token_ids: list[int]) -> list[common_pb2.TokenLogprobs]:
    """What is due for these ids, if the request asks for it: the alternatives are the lowest ids."""
    return _rows(token_ids, submit.sampling.logprobs) if submit.sampling.HasField("logprobs") else []


def _of_prompt(submit: scheduler_pb2.Submit) -> list[common_pb2.TokenLogprobs]:
    """The same for the prompt, whose first token has none."""
    if not submit.sampling.HasField("prompt_logprobs"):
        return []
    return _rows(submit.prompt_token_ids[1:], submit.sampling.prompt_logprobs)


def _rows(token_ids: Iterable[int], count: int) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            token_id=token_id, logprob=-0.5, rank=1, top_token_ids=range(count), top_logprobs=[-0.5] * count
        )
        for token_id in token_ids
    ]


@contextlib.asynccontextmanager
async def serving(
    scheduler: ScriptedScheduler, path: Path, *, serialize: Callable[[Any], bytes] | None = None
) -> AsyncIterator[str]:
    """Serves it on a Unix socket at `path`; gives the address.

    `serialize` makes bytes of its messages to routers, where a test wants to say what is no message.
    """
    server = grpc.aio.server(options=server_options(max_message_bytes=MAX_MESSAGE_BYTES))
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
    if serialize is not None:
        connect = grpc.stream_stream_rpc_method_handler(
            scheduler.Connect, scheduler_pb2.RouterMessage.FromString, serialize
        )
        name = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
        server.add_registered_method_handlers(name, {"Connect": connect})
    server.add_insecure_port(f"unix:{path}")
    try:
        await server.start()
        yield f"unix:{path}"
    finally:
        scheduler.break_streams()
        await server.stop(0)
