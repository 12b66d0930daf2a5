"""What every call passes before it reaches a service: not while shutting down, and not with a broken message.

How each call ended is counted on its way out. Health and reflection pass untouched: they answer to the end.
"""

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client.metrics_core import Metric

from rpc import metrics
from rpc.errors import RequestError, abort

_CODES = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
_ALWAYS_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # an RpcMethodHandler; the stubs of grpc describe synchronous behaviours alone


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses new calls once closed, and requests that are no message of their method's type.

    Without it a string that is not UTF-8 ends in INTERNAL and a traceback in the log.
    """

    def __init__(self) -> None:
        self._open = True
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
            # A stream on both sides: it is called before any message is read, so it fits every kind of call.
            self._ended[method, grpc.StatusCode.UNAVAILABLE.name] += 1
            return grpc.stream_stream_rpc_method_handler(_refuse)
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

    def _checked_unary(self, method: str, handler: Handler) -> Callable[[bytes, Context], Awaitable[Any]]:
        async def behaviour(raw: bytes, context: Context) -> Any:
            with self._counting(method, context):
                return await handler.unary_unary(await _parsed(handler, raw, context), context)

        return behaviour

    def _checked_stream(self, method: str, handler: Handler) -> Callable[[bytes, Context], Any]:
        if not inspect.isasyncgenfunction(handler.unary_stream):  # it writes through the context

            async def writing(raw: bytes, context: Context) -> None:
                with self._counting(method, context):
                    await handler.unary_stream(await _parsed(handler, raw, context), context)

            return writing

        async def yielding(raw: bytes, context: Context) -> AsyncIterator[Any]:
            with self._counting(method, context):
                request = await _parsed(handler, raw, context)
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
            code = _CODES.get(context.code(), grpc.StatusCode.UNKNOWN)
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


def _short(method: str) -> str:
    return method.rpartition("/")[2]


async def _refuse(_requests: object, context: Context) -> None:
    await abort(context, RequestError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; try again"))


async def _parsed(handler: Handler, raw: bytes, context: Context) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError as error:
        await abort(
            context,
            RequestError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the request of {len(raw)} bytes is not a valid message of this method: {error}",
            ),
        )
