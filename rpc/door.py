"""What every call passes before it reaches a service: not while shutting down, and not with a broken message.

Health and reflection pass untouched: they answer to the end.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rpc.errors import RequestError, abort

_ALWAYS_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # an RpcMethodHandler; the stubs of grpc describe synchronous behaviours alone


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses new calls once closed, and requests that are no message of their method's type.

    Without it a string that is not UTF-8 ends in INTERNAL and a traceback in the log.
    """

    def __init__(self) -> None:
        self._open = True

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
        if handler is None or handler_call_details.method.startswith(_ALWAYS_OPEN):
            return handler
        if not self._open:
            # A stream on both sides: it is called before any message is read, so it fits every kind of call.
            return grpc.stream_stream_rpc_method_handler(_refuse)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _checked_stream(handler), response_serializer=handler.response_serializer
            )
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _checked_unary(handler), response_serializer=handler.response_serializer
            )
        return handler


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


def _checked_unary(handler: Handler) -> Callable[[bytes, Context], Awaitable[Any]]:
    async def behaviour(raw: bytes, context: Context) -> Any:
        return await handler.unary_unary(await _parsed(handler, raw, context), context)

    return behaviour


def _checked_stream(handler: Handler) -> Callable[[bytes, Context], Any]:
    if not inspect.isasyncgenfunction(handler.unary_stream):  # it writes through the context

        async def writing(raw: bytes, context: Context) -> None:
            await handler.unary_stream(await _parsed(handler, raw, context), context)

        return writing

    async def yielding(raw: bytes, context: Context) -> AsyncIterator[Any]:
        request = await _parsed(handler, raw, context)
        # Closed here and not by the garbage collector: a cancelled call must let go of its request at once.
        async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
            async for response in responses:
                yield response

    return yielding
