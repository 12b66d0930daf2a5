"""The client library: `Client` for threads, `AsyncClient` for asyncio; the same calls, the same answers.

Each is a thin shell around `transcript` (what is new), `patience` (when to ask again) and gRPC. A stream that
breaks is asked for again and goes on where it stopped.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from chairlift.asking import Options, Prompt, generate_request
from chairlift.calls import API_KEY_VARIABLE, DEFAULT_ADDRESS, MAX_MESSAGE_BYTES, Router, failure
from chairlift.patience import Patience
from chairlift.results import Answer, ChairliftError, Message, Piece
from chairlift.transcript import Diverged, Transcript, whole_answer
from protos.v1 import router_pb2_grpc
from rpc.address import Address
from rpc.channel import connect, connect_blocking
from rpc.errors import StartError, from_call
from rpc.tls import Tls, TlsFiles

DEFAULT_MAX_RETRIES = 5


class Client:
    """Asks a router, from any thread. One client may be used by several threads at once.

    A call that is refused for load waits as long as the server says, one that finds nobody for a moment, and
    is tried again, at most `max_retries` times in a row and never beyond its own time limit.

        import chairlift

        with chairlift.Client("127.0.0.1:50051") as client:
            print(client.chat("What is the capital of France?", max_tokens=32).text)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        api_key: str | None = None,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_server_name: str = "",
    ) -> None:
        """`address` is HOST:PORT, unix:PATH or dns:///NAME:PORT.

        `api_key` is CHAIRLIFT_API_KEY of the environment when it is not given. The rest are files in PEM form
        and a name, as in docs/security.md: with `tls_ca` TLS is spoken and that CA believed; `tls_cert` and
        `tls_key` are shown. Raises ValueError for an address that is none, or files that cannot be used.
        """
        files = TlsFiles(tls_cert, tls_key, tls_ca, tls_server_name)
        self._router = _router(address, files, api_key)
        self._max_retries = max_retries
        self._channel = connect_blocking(
            self._router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=self._router.certificates
        )
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """The whole answer to a text, to token ids, or to a conversation. Raises ChairliftError.

        answer = client.generate("Once upon a time", max_tokens=40, temperature=0.8, n=2)
        for choice in answer.choices:
            print(choice.finish_reason, choice.usage.num_output_tokens, choice.text)
        """
        request = generate_request(prompt, options)
        patience = _patience(self._max_retries, timeout_seconds)
        while True:
            remaining_seconds = patience.remaining_seconds(time.monotonic())
            try:
                return whole_answer(
                    self._stub.Complete(request, timeout=remaining_seconds, metadata=self._router.metadata)
                )
            except grpc.RpcError as error:
                delay = _delay_before_retry(patience, error, self._router)
            time.sleep(delay)

    def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, str]],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The assistant's answer to a conversation; a text alone is one message of a user.

        answer = client.chat(
            [
                {"role": "system", "content": "You are brief."},
                {"role": "user", "content": "Why is the sky blue?"},
            ],
            max_tokens=60,
        )
        print(answer.text)
        """
        return self.generate(_conversation(messages), timeout_seconds=timeout_seconds, **options)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> "Stream":
        """The answer as it comes, to whatever `generate` takes. Leaving the `with` block cancels the request.

        with client.stream("Once upon a time", max_tokens=100) as stream:
            for piece in stream:
                print(piece.text, end="", flush=True)
        print(stream.answer.choices[0].usage)
        """
        transcript = Transcript(generate_request(prompt, options))
        return Stream(self._pieces(transcript, _patience(self._max_retries, timeout_seconds)), transcript)

    def close(self) -> None:
        """Gives the connection back; calls that run are cancelled."""
        self._channel.close()

    def _pieces(self, transcript: Transcript, patience: Patience) -> Generator[Piece]:
        while True:
            remaining_seconds = patience.remaining_seconds(time.monotonic())
            call = self._stub.Generate(
                transcript.request, timeout=remaining_seconds, metadata=self._router.metadata
            )
            try:
                for event in call:
                    piece = transcript.take(event)
                    if piece is not None:
                        patience.renew()
                        yield piece
            except grpc.RpcError as error:
                delay = _delay_before_retry(patience, error, self._router)
            except Diverged as error:
                raise _cannot_go_on() from error
            else:
                return
            finally:
                call.cancel()  # type: ignore[no-untyped-call]  # the stubs say nothing of its types
            transcript.restart()
            time.sleep(delay)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Asks a router, on the running event loop; otherwise as `Client`.

    async with chairlift.AsyncClient() as client:
        answers = await asyncio.gather(*(client.chat(question) for question in questions))
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        api_key: str | None = None,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_server_name: str = "",
    ) -> None:
        """`address` is HOST:PORT, unix:PATH or dns:///NAME:PORT.

        `api_key` is CHAIRLIFT_API_KEY of the environment when it is not given. The rest are files in PEM form
        and a name, as in docs/security.md: with `tls_ca` TLS is spoken and that CA believed; `tls_cert` and
        `tls_key` are shown. Raises ValueError for an address that is none, or files that cannot be used.
        """
        files = TlsFiles(tls_cert, tls_key, tls_ca, tls_server_name)
        self._router = _router(address, files, api_key)
        self._max_retries = max_retries
        self._channel: grpc.aio.Channel | None = None

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """The whole answer, as `Client.generate` gives it. Cancelling the task cancels the request.

        answer = await client.generate([1, 2, 3], max_tokens=8, temperature=0)
        print(answer.choices[0].token_ids)
        """
        request = generate_request(prompt, options)
        patience = _patience(self._max_retries, timeout_seconds)
        while True:
            remaining_seconds = patience.remaining_seconds(time.monotonic())
            try:
                return whole_answer(
                    await self._stub.Complete(
                        request, timeout=remaining_seconds, metadata=self._router.metadata
                    )
                )
            except grpc.aio.AioRpcError as error:
                delay = _delay_before_retry(patience, error, self._router)
            await asyncio.sleep(delay)

    async def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, str]],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The assistant's answer, as `Client.chat` gives it.

        answer = await client.chat("Why is the sky blue?", timeout_seconds=30)
        print(answer.text)
        """
        return await self.generate(_conversation(messages), timeout_seconds=timeout_seconds, **options)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> "AsyncStream":
        """The answer as it comes. Leaving the `async with` block cancels the request.

        async with client.stream([chairlift.Message("user", "Tell me a story.")]) as stream:
            async for piece in stream:
                print(piece.text, end="", flush=True)
        """
        transcript = Transcript(generate_request(prompt, options))
        patience = _patience(self._max_retries, timeout_seconds)
        return AsyncStream(self._pieces(transcript, patience), transcript)

    async def close(self) -> None:
        """Gives the connection back; calls that run are cancelled."""
        if self._channel is not None:
            await self._channel.close(None)

    @property
    def _stub(self) -> "router_pb2_grpc.RouterAsyncStub":
        if self._channel is None:  # a channel belongs to the loop that runs when it is made
            router = self._router
            self._channel = connect(
                router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=router.certificates
            )
        return router_pb2_grpc.RouterStub(self._channel)

    async def _pieces(self, transcript: Transcript, patience: Patience) -> AsyncGenerator[Piece]:
        while True:
            remaining_seconds = patience.remaining_seconds(time.monotonic())
            call = self._stub.Generate(
                transcript.request, timeout=remaining_seconds, metadata=self._router.metadata
            )
            try:
                async for event in call:
                    piece = transcript.take(event)
                    if piece is not None:
                        patience.renew()
                        yield piece
            except grpc.aio.AioRpcError as error:
                delay = _delay_before_retry(patience, error, self._router)
            except Diverged as error:
                raise _cannot_go_on() from error
            else:
                return
            finally:
                call.cancel()
            transcript.restart()
            await asyncio.sleep(delay)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Stream:
    """The pieces of one answer, in order; each text and each token id once. Raises ChairliftError."""

    def __init__(self, pieces: Generator[Piece], transcript: Transcript) -> None:
        self._pieces = pieces
        self._transcript = transcript

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has come to its end. Raises RuntimeError before."""
        return _answer_of(self._transcript)

    def close(self) -> None:
        """Cancels the request if it still runs."""
        self._pieces.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream:
    """As `Stream`, for `async for` and `async with`."""

    def __init__(self, pieces: AsyncGenerator[Piece], transcript: Transcript) -> None:
        self._pieces = pieces
        self._transcript = transcript

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has come to its end. Raises RuntimeError before."""
        return _answer_of(self._transcript)

    async def close(self) -> None:
        """Cancels the request if it still runs."""
        await self._pieces.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _patience(max_retries: int, timeout_seconds: float | None) -> Patience:
    return Patience(max_retries, None if timeout_seconds is None else time.monotonic() + timeout_seconds)


def _router(address: str, files: TlsFiles, api_key: str | None) -> Router:
    """Raises ValueError with a sentence."""
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    try:
        return Router(Address.parse(address, field="address"), Tls(files) if files else None, key)
    except StartError as error:
        raise ValueError(str(error)) from error


def _delay_before_retry(patience: Patience, error: grpc.RpcError, router: Router) -> float:
    """Seconds to wait before asking again. Raises ChairliftError when that makes no sense."""
    refusal = from_call(error)
    delay = patience.delay_after(refusal, time.monotonic(), random.random())  # noqa: S311 - jitter, no secret
    if delay is None:
        raise failure(refusal, router) from error
    return delay


def _conversation(
    messages: str | Sequence[Message | Mapping[str, str]],
) -> Sequence[Message | Mapping[str, str]]:
    return [Message("user", messages)] if isinstance(messages, str) else messages


def _cannot_go_on() -> ChairliftError:
    return ChairliftError(
        "ABORTED",
        "the stream broke, and the same request with the same seed got another answer, so this one cannot be "
        "continued",
    )


def _answer_of(transcript: Transcript) -> Answer:
    if not transcript.complete:
        raise RuntimeError("the stream has not come to its end")
    return transcript.answer()
