"""What every call passes before it reaches a service.

No call passes during shutdown, nor without a key if one is needed, nor with a message that is broken or would
block the event loop.

No message of a caller who is not let in is read. How each call ended is counted when it leaves. Health and
reflection pass unchecked: they answer to the end.
"""

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client.metrics_core import Metric

from rpc import metrics, weighing
from rpc.errors import RequestError, abort, invalid
from rpc.holding import Kept, Room

_SHUTTING_DOWN = RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; try again")
_ALWAYS_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Metadata = Sequence[tuple[str, str | bytes]]
Admit = Callable[[Metadata], object]
"""Looks at a call's headers; raises RequestError for who may not enter."""
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # an RpcMethodHandler; the stubs of grpc describe synchronous behaviours alone


def admit_all(_metadata: Metadata) -> None:
    """Lets every caller in: no keys are wanted."""


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses new calls once closed, and requests that are no message of their method's type.

    Without it a string that is not UTF-8 ends in INTERNAL and a traceback in the log.
    """

    def __init__(self, admit: Admit = admit_all) -> None:
        self._open = True
        self._admit = admit
        self._weighing = ThreadPoolExecutor(1, "weighing")
        self._room = Room()
        self._ended: Counter[tuple[str, str]] = Counter()  # calls, by method and name of their status
        self._num_open: Counter[str] = Counter()  # calls under way, by method

    def close(self) -> None:
        """New calls get UNAVAILABLE from now on; running ones are not touched."""
        self._open = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Hands out the handler of one call, the checks built in."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_ALWAYS_OPEN):
            return handler
        if not self._open:
            return self._refusing(method, _SHUTTING_DOWN)
        try:
            self._admit(handler_call_details.invocation_metadata or ())
        except RequestError as error:
            return self._refusing(method, error)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._checked_stream(method, handler), response_serializer=handler.response_serializer
            )
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._checked_unary(method, handler), response_serializer=handler.response_serializer
            )
        if inspect.iscoroutinefunction(handler.stream_stream):
            return grpc.stream_stream_rpc_method_handler(
                self._counted_streams(method, handler),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return handler

    def _refusing(self, method: str, refusal: RequestError) -> Handler:
        """A handler that reads no message: of a stream on both sides, so it fits every kind of call."""

        async def refuse(_requests: object, context: Context) -> None:
            await abort(context, refusal)

        self._ended[method, refusal.code.name] += 1
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _checked_unary(self, method: str, handler: Handler) -> Callable[[bytes, Context], Awaitable[Any]]:
        async def behaviour(raw: bytes, context: Context) -> Any:
            with self._counting(method, context), self._room.kept() as kept:
                return await handler.unary_unary(await self._parsed(handler, raw, kept, context), context)

        return behaviour

    def _checked_stream(self, method: str, handler: Handler) -> Callable[[bytes, Context], Any]:
        if not inspect.isasyncgenfunction(handler.unary_stream):  # it writes through the context

            async def writing(raw: bytes, context: Context) -> None:
                with self._counting(method, context), self._room.kept() as kept:
                    await handler.unary_stream(await self._parsed(handler, raw, kept, context), context)

            return writing

        async def yielding(raw: bytes, context: Context) -> AsyncIterator[Any]:
            with self._counting(method, context), self._room.kept() as kept:
                request = await self._parsed(handler, raw, kept, context)
                # Closed here and not by the garbage collector: a cancelled call must let go of its request
                # at once.
                async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        yield response

        return yielding

    def _counted_streams(
        self, method: str, handler: Handler
    ) -> Callable[[AsyncIterator[Any], Context], Awaitable[None]]:
        async def behaviour(requests: AsyncIterator[Any], context: Context) -> None:
            with self._counting(method, context):
                await handler.stream_stream(requests, context)

        return behaviour

    async def _parsed(self, handler: Handler, raw: bytes, kept: Kept, context: Context) -> Any:
        """The message, if it is one and there is room for it. It lives as long as its call."""
        parse = handler.request_deserializer
        kind = parse.__self__.DESCRIPTOR
        try:
            kept.grow(len(raw))
            if weighing.is_light(raw, kind):
                return parse(raw)

            def weighed() -> Any:
                weighing.check_weight(raw, kind)
                return parse(raw)

            return await asyncio.get_running_loop().run_in_executor(self._weighing, weighed)
        except RequestError as error:
            await abort(context, error)
        except DecodeError as error:
            refusal = f"the request of {len(raw)} bytes is not a valid message of this method: {error}"
            await abort(context, invalid("", refusal))

    @contextlib.contextmanager
    def _counting(self, method: str, context: Context) -> Iterator[None]:
        """Counts one call of a method that there is: no name that a client made up becomes a label."""
        self._num_open[method] += 1
        code = grpc.StatusCode.OK
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            left = context.time_remaining()
            is_late = left is not None and left <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code = _failed_with(context)
            raise
        finally:
            self._num_open[method] -= 1
            self._ended[method, code.name] += 1

    def metrics(self) -> Iterator[Metric]:
        """Calls under way, and how they ended."""
        yield metrics.counters(
            "grpc_calls",
            "gRPC calls that ended, by method and status.",
            ("method", "code"),
            {(_short(method), code): count for (method, code), count in self._ended.items()},
        )
        yield metrics.gauges(
            "grpc_calls_open",
            "gRPC calls under way, by method.",
            ("method",),
            {(_short(method),): count for method, count in self._num_open.items()},
        )


def _failed_with(context: Context) -> grpc.StatusCode:
    """The status that a call which raised was given; what raised without giving one is UNKNOWN."""
    given = context.code()  # 0, no StatusCode, where none was
    return given if isinstance(given, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _short(method: str) -> str:
    return method.rpartition("/")[2]
