"""The client library: `Client` for threads, `AsyncClient` for asyncio, with the same calls and answers.

Each is a thin shell around `transcript` (what is new), `patience` (when to ask again) and gRPC. A stream that
breaks is resumed, at the next router where there are several, and goes on where it stopped.
"""

import asyncio
import contextlib
import math
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage

from chairlift.asking import Options, Prompt, detokenize_request, generate_request, tokenize_request
from chairlift.attempts import Attempts, Requests
from chairlift.calls import API_KEY_VARIABLE, DEFAULT_ADDRESS, MAX_MESSAGE_BYTES, Router, failure
from chairlift.patience import Patience
from chairlift.results import Answer, ChairliftError, Message, Model, Piece
from chairlift.transcript import Diverged, Transcript, whole_answer
from chairlift.transcript import model as model_of
from protos.v1 import router_pb2, router_pb2_grpc
from rpc.address import Address, parse_list
from rpc.cancel import heed_cancel
from rpc.channel import connect, connect_blocking
from rpc.errors import RequestError, StartError, from_call
from rpc.tls import TlsFiles, of_caller

DEFAULT_MAX_RETRIES = 5
_MOST_SECONDS = 1e9  # of a time limit; gRPC takes what is longer by much, or endless, for over
_STREAM_CLOSED = "the stream was closed"
_TOKEN_FIELD = "resume.resume_token"  # noqa: S105 - the name of a field


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
        """`address` is HOST:PORT, unix:PATH or dns:///NAME:PORT; or several, parted by commas.

        Of several routers one is used until it cannot be reached, then the next. `api_key` is
        CHAIRLIFT_API_KEY of the environment when it is not given. The rest are files in PEM form and a name,
        as in docs/security.md: with `tls_ca` TLS is spoken and that CA believed; `tls_cert` and `tls_key` are
        shown. Raises ValueError for an address that is none, or files that cannot be used.
        """
        self._routers = Routers(address, TlsFiles(tls_cert, tls_key, tls_ca, tls_server_name), api_key)
        self._max_retries = max_retries
        self._requests = Requests[threading.Event]()
        self._channels = {
            router.address: connect_blocking(
                router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=router.certificates
            )
            for router in self._routers.all
        }

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """The whole answer to a text, to token ids, or to a conversation. Raises ChairliftError.

            answer = client.generate("Once upon a time", max_tokens=40, temperature=0.8, n=2)
            for choice in answer.choices:
                print(choice.finish_reason, choice.usage.num_output_tokens, choice.text)

        How likely a text is: the log-probabilities of its tokens but the first, summed up.

            answer = client.generate("The sky is blue", prompt_logprobs=0, max_tokens=1)
            print(sum(entry.logprob for entry in answer.prompt_logprobs))

        An answer of a given form:

            answer = client.generate("Is the sky blue?", choice=["yes", "no"])
            print(answer.text)
        """
        return whole_answer(self._ask("Complete", generate_request(prompt, options), timeout_seconds))

    def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
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

        An assistant's message that goes on:

            story = [chairlift.Message("user", "A story!"), chairlift.Message("assistant", "Once")]
            print(client.chat(story, continue_final_message=True, max_tokens=40).text)

        Variables of the model's template, such as Qwen 3's:

            print(client.chat("Why?", chat_template_kwargs={"enable_thinking": False}, max_tokens=40).text)

        A tool's answer to what an assistant called, where the model's template knows tools:

            call = chairlift.ToolCall("call_1", "weather", '{"city": "Bern"}')
            turns = [
                chairlift.Message("user", "How is the weather in Bern?"),
                chairlift.Message("assistant", "", tool_calls=(call,)),
                chairlift.Message("tool", "sunny", tool_call_id="call_1"),
            ]
            print(client.chat(turns, max_tokens=40).text)
        """
        return self.generate(_conversation(messages), timeout_seconds=timeout_seconds, **options)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> "Stream":
        """The answer as it comes, to whatever `generate` takes.

        Leaving the `with` block cancels the request.

            with client.stream("Once upon a time", max_tokens=100) as stream:
                for piece in stream:
                    print(piece.text, end="", flush=True)
            print(stream.answer.choices[0].usage)
        """
        transcript, attempts = Transcript(generate_request(prompt, options)), Attempts(threading.Event())
        patience = _patience(self._max_retries, timeout_seconds)
        return Stream(self._pieces(transcript, patience, attempts), transcript, attempts)

    def tokenize(
        self,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        *,
        timeout_seconds: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text, or of a conversation in the model's template.

        Raises ChairliftError.

            print(len(client.tokenize("How long is this?")))
        """
        return tuple(self._ask("Tokenize", tokenize_request(prompt), timeout_seconds).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """The text of token ids, special tokens shown or not.

        Raises ChairliftError.

            print(client.detokenize([104, 105]))
        """
        request = detokenize_request(token_ids, include_special=include_special)
        return str(self._ask("Detokenize", request, timeout_seconds).text)

    def model(self, *, timeout_seconds: float | None = None) -> Model:
        """What is served, its limits and its defaults.

        Raises ChairliftError.

            model = client.model()
            print(model.name, model.max_total_tokens, model.defaults["temperature"])
        """
        return model_of(self._ask("GetModel", router_pb2.GetModelRequest(), timeout_seconds))

    def close(self) -> None:
        """Gives the connections back. Calls that run, and later ones, raise ChairliftError, CANCELLED."""
        self._requests.close()
        for channel in self._channels.values():
            channel.close()

    def _ask(self, method: str, request: ProtoMessage, timeout_seconds: float | None) -> Any:
        """What a call that is no stream answers."""
        patience, attempts = _patience(self._max_retries, timeout_seconds), Attempts(threading.Event())
        with self._requests.running(attempts):
            while True:
                remaining_seconds = patience.remaining_seconds(time.monotonic())
                router = self._routers.current
                call = attempts.begin(
                    getattr(self._stub(router), method).future,
                    request,
                    timeout=remaining_seconds,
                    metadata=router.metadata,
                )
                try:
                    return call.result()
                except (grpc.RpcError, grpc.FutureCancelledError) as error:
                    attempts.check()
                    delay = self._routers.delay_before_retry(patience, from_call(error), router)
                finally:
                    call.cancel()  # Ctrl-C, say, leaves it running
                attempts.ended.wait(delay)
                attempts.check()

    def _stub(self, router: Router) -> router_pb2_grpc.RouterStub:
        return router_pb2_grpc.RouterStub(self._channels[router.address])

    def _pieces(
        self, transcript: Transcript, patience: Patience, attempts: Attempts[threading.Event]
    ) -> Generator[Piece]:
        with self._requests.running(attempts):
            while True:
                remaining_seconds = patience.remaining_seconds(time.monotonic())
                router = self._routers.current
                call = attempts.begin(
                    self._stub(router).Generate,
                    transcript.request,
                    timeout=remaining_seconds,
                    metadata=router.metadata,
                )
                try:
                    for event in call:
                        piece = transcript.take(event)
                        if piece is not None:
                            patience.renew()
                            attempts.check()  # what had come before the end is not told after it
                            yield piece
                except grpc.RpcError as error:
                    attempts.check()
                    delay = self._routers.delay_before_resume(transcript, patience, from_call(error), router)
                except Diverged as error:
                    raise _cannot_go_on() from error
                else:
                    return
                finally:
                    call.cancel()
                transcript.restart()
                attempts.ended.wait(delay)
                attempts.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Asks a router, on the running event loop.

    Otherwise as `Client`. It serves one loop at a time: where each `asyncio.run` makes a loop of its own, the
    same client goes on in the next one.

        import chairlift

        async with chairlift.AsyncClient("127.0.0.1:50051") as client:
            questions = ["Why is the sky blue?", "Why is the grass green?"]
            answers = await asyncio.gather(*(client.chat(one, max_tokens=32) for one in questions))
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
        """As for `Client`. Raises ValueError."""
        self._routers = Routers(address, TlsFiles(tls_cert, tls_key, tls_ca, tls_server_name), api_key)
        self._max_retries = max_retries
        self._requests = Requests[asyncio.Event]()
        self._channels: dict[tuple[asyncio.AbstractEventLoop, Address], grpc.aio.Channel] = {}

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Answer:
        """The whole answer, as `Client.generate` gives it.

        Cancelling the task cancels the request.

            answer = await client.generate([1, 2, 3], max_tokens=8, temperature=0, logprobs=2)
            print(answer.choices[0].token_ids, answer.choices[0].logprobs[0].top)
        """
        return whole_answer(await self._ask("Complete", generate_request(prompt, options), timeout_seconds))

    async def chat(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The assistant's answer, as `Client.chat` gives it.

        For example:

            answer = await client.chat("Why is the sky blue?", max_tokens=32, timeout_seconds=30)
            print(answer.text)
        """
        return await self.generate(_conversation(messages), timeout_seconds=timeout_seconds, **options)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> "AsyncStream":
        """The answer as it comes.

        Leaving the `async with` block cancels the request.

            story = [chairlift.Message("user", "Tell me a story.")]
            async with client.stream(story, max_tokens=100) as stream:
                async for piece in stream:
                    print(piece.text, end="", flush=True)
        """
        transcript, attempts = Transcript(generate_request(prompt, options)), Attempts(asyncio.Event())
        patience = _patience(self._max_retries, timeout_seconds)
        return AsyncStream(self._pieces(transcript, patience, attempts), transcript, attempts)

    async def tokenize(
        self,
        prompt: str | Sequence[Message | Mapping[str, Any]],
        *,
        timeout_seconds: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids, as `Client.tokenize` gives them.

        For example:

            print(len(await client.tokenize([chairlift.Message("user", "How long is this?")])))
        """
        return tuple((await self._ask("Tokenize", tokenize_request(prompt), timeout_seconds)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special: bool = False,
        timeout_seconds: float | None = None,
    ) -> str:
        """The text, as `Client.detokenize` gives it.

        For example:

            print(await client.detokenize([104, 105], include_special=True))
        """
        request = detokenize_request(token_ids, include_special=include_special)
        return str((await self._ask("Detokenize", request, timeout_seconds)).text)

    async def model(self, *, timeout_seconds: float | None = None) -> Model:
        """What is served, as `Client.model` gives it.

        For example:

            print((await client.model()).name)
        """
        return model_of(await self._ask("GetModel", router_pb2.GetModelRequest(), timeout_seconds))

    async def close(self) -> None:
        """Gives the connections back. Calls that run, and later ones, raise ChairliftError, CANCELLED."""
        self._requests.close()
        here = asyncio.get_running_loop()
        for (loop, _), channel in self._channels.items():
            if loop is here:  # those of a loop that has ended have ended with it
                await channel.close(None)

    async def _ask(self, method: str, request: ProtoMessage, timeout_seconds: float | None) -> Any:
        """What a call that is no stream answers."""
        patience, attempts = _patience(self._max_retries, timeout_seconds), Attempts(asyncio.Event())
        with self._requests.running(attempts):
            while True:
                remaining_seconds = patience.remaining_seconds(time.monotonic())
                router = self._routers.current
                call = attempts.begin(
                    getattr(self._stub(router), method),
                    request,
                    timeout=remaining_seconds,
                    metadata=router.metadata,
                )
                try:
                    return await call
                except grpc.aio.AioRpcError as error:
                    heed_cancel()
                    attempts.check()
                    delay = self._routers.delay_before_retry(patience, from_call(error), router)
                except asyncio.CancelledError:
                    heed_cancel()  # the task's own goes before
                    attempts.check()
                    raise
                await _pause(attempts, delay)

    def _stub(self, router: Router) -> "router_pb2_grpc.RouterAsyncStub":
        place = (
            asyncio.get_running_loop(),
            router.address,
        )  # a channel belongs to the loop that it is made in
        if place not in self._channels:
            self._channels = {
                (loop, address): channel
                for (loop, address), channel in self._channels.items()
                if not loop.is_closed()
            }
            self._channels[place] = connect(
                router.address, max_message_bytes=MAX_MESSAGE_BYTES, tls=router.certificates
            )
        return router_pb2_grpc.RouterStub(self._channels[place])

    async def _pieces(
        self, transcript: Transcript, patience: Patience, attempts: Attempts[asyncio.Event]
    ) -> AsyncGenerator[Piece]:
        with self._requests.running(attempts):
            while True:
                remaining_seconds = patience.remaining_seconds(time.monotonic())
                router = self._routers.current
                call = attempts.begin(
                    self._stub(router).Generate,
                    transcript.request,
                    timeout=remaining_seconds,
                    metadata=router.metadata,
                )
                try:
                    async for event in call:
                        piece = transcript.take(event)
                        if piece is not None:
                            patience.renew()
                            attempts.check()  # what had come before the end is not told after it
                            yield piece
                except grpc.aio.AioRpcError as error:
                    heed_cancel()
                    attempts.check()
                    delay = self._routers.delay_before_resume(transcript, patience, from_call(error), router)
                except asyncio.CancelledError:
                    heed_cancel()  # the task's own goes before
                    attempts.check()
                    raise
                except Diverged as error:
                    raise _cannot_go_on() from error
                else:
                    return
                finally:
                    call.cancel()
                transcript.restart()
                await _pause(attempts, delay)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Stream:
    """The pieces of one answer, in order; each text and each token id once. Raises ChairliftError."""

    def __init__(
        self, pieces: Generator[Piece], transcript: Transcript, attempts: Attempts[threading.Event]
    ) -> None:
        self._pieces = pieces
        self._transcript = transcript
        self._attempts = attempts
        self._is_closed = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has come to its end. Raises RuntimeError before."""
        return _answer_of(self._transcript)

    def close(self) -> None:
        """Cancels the request if it still runs, from any thread. Whoever reads it gets no further piece."""
        self._is_closed = True
        self._attempts.end(_STREAM_CLOSED)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except ChairliftError:
            if self._is_closed:
                raise StopIteration from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream:
    """As `Stream`, for `async for` and `async with`."""

    def __init__(
        self, pieces: AsyncGenerator[Piece], transcript: Transcript, attempts: Attempts[asyncio.Event]
    ) -> None:
        self._pieces = pieces
        self._transcript = transcript
        self._attempts = attempts
        self._is_closed = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has come to its end. Raises RuntimeError before."""
        return _answer_of(self._transcript)

    async def close(self) -> None:
        """Cancels the request if it still runs, from any task. Whoever reads it gets no further piece."""
        self._is_closed = True
        self._attempts.end(_STREAM_CLOSED)
        with contextlib.suppress(RuntimeError):  # another task waits in it, and leaves it now
            await self._pieces.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            return await anext(self._pieces)
        except ChairliftError:
            if self._is_closed:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Routers:
    """The routers a client knows, and the one it asks now."""

    def __init__(self, addresses: str, files: TlsFiles, api_key: str | None) -> None:
        """Raises ValueError with a sentence."""
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        try:
            certificates = of_caller(files)
        except StartError as error:
            raise ValueError(str(error)) from error
        self.all = [Router(address, certificates, key) for address in parse_list(addresses, field="address")]
        self.current = self.all[0]

    def delay_before_retry(self, patience: Patience, refusal: RequestError, asked: Router) -> float:
        """Seconds to wait before asking again. Raises ChairliftError when that makes no sense."""
        if refusal.code is grpc.StatusCode.CANCELLED:  # not by us: a router that stops lets go of its calls
            refusal = RequestError(grpc.StatusCode.UNAVAILABLE, "the router gave the call up")
        if refusal.code is grpc.StatusCode.UNAVAILABLE and asked is self.current:
            self.current = self.all[(self.all.index(asked) + 1) % len(self.all)]
        chance = random.random()  # noqa: S311 - jitter, no secret
        delay = patience.delay_after(refusal, time.monotonic(), chance)
        if delay is None:
            raise failure(refusal, asked) from refusal
        return delay

    def delay_before_resume(
        self, transcript: Transcript, patience: Patience, refusal: RequestError, asked: Router
    ) -> float:
        """The same for a stream that has broken."""
        if refusal.field == _TOKEN_FIELD:
            transcript.forget_token()
            return 0.0
        return self.delay_before_retry(patience, refusal, asked)


def _patience(max_retries: int, timeout_seconds: float | None) -> Patience:
    if timeout_seconds is None or timeout_seconds > _MOST_SECONDS:
        return Patience(max_retries, None)
    if math.isnan(timeout_seconds):
        raise ValueError("timeout_seconds is nan, and must be a number of seconds, or None for no limit")
    return Patience(max_retries, time.monotonic() + timeout_seconds)


async def _pause(attempts: Attempts[asyncio.Event], seconds: float) -> None:
    """Lets time pass. Raises ChairliftError when the request was ended meanwhile."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await attempts.ended.wait()
    attempts.check()


def _conversation(
    messages: str | Sequence[Message | Mapping[str, Any]],
) -> Sequence[Message | Mapping[str, Any]]:
    if isinstance(messages, str):
        return [Message("user", messages)]
    if len(messages) == 0:
        raise ValueError("messages is empty; a chat has at least one")
    return messages


def _cannot_go_on() -> ChairliftError:
    return ChairliftError(
        "ABORTED",
        "the stream broke, and what came after it does not go on with this answer, which cannot be continued",
    )


def _answer_of(transcript: Transcript) -> Answer:
    if not transcript.complete:
        raise RuntimeError("the stream has not come to its end")
    return transcript.answer()
