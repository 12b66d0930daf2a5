"""The HTTP door's paths, and the way of one call: body, requests, intake, answer.

Errors found before the first token are HTTP statuses; later ones are an error event, and no [DONE] follows.
When a client hangs up, streaming or not, its call is cancelled at once. Nothing is decided here about
requests: `asked` reads them, `intake` takes them in, `answers` puts into words what becomes of them.
"""

import asyncio
import contextlib
import time
import uuid
from collections import Counter, abc
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from typing import Any, Final

import grpc
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import aside, keys
from router.call import Call, News, PromptSeen
from router.http import description, errors, hosts, page
from router.http.answers import Answer, AnyAnswer
from router.http.asked import Asked, Detokenizing, Tokenizing
from router.http.encoding import encoded
from router.http.errors import HttpError
from router.http.exchange import Exchange
from router.http.live import Live
from router.http.reading import Bodies
from router.http.response_answer import ResponseAnswer
from router.http.responses import NAMES, AskedResponse
from router.http.shapes import CallShape, ChatShape, CompletionShape, Shape, ToolsShape
from router.http.text_or_calls import with_calls
from router.http.tools import ForcedFunction, OfferedTools
from router.intake import Arrival, Intake
from router.key_file import Doorkeeper
from router.stall import STALL_SECONDS, StalledError, StallGuard
from router.tool_calls import ToolCallForm, ToolCallParser
from router.validation import GenerateRequest, check_request_id
from rpc.errors import RequestError
from rpc.holding import Room

_SECURITY_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEADERS: Final = 100
_RETRY_AFTER_SHUTDOWN_SECONDS: Final = 1.0

_log = structlog.get_logger()

Handler = abc.Callable[[Exchange], abc.Awaitable[None]]
Wording = abc.Callable[[Call, str], AnyAnswer]  # of a call, whose id it gets too


class HttpApp:
    """The door. `asgi` is what a server serves."""

    def __init__(
        self,
        intake: Intake,
        *,
        max_body_bytes: int,
        doorkeeper: Doorkeeper,
        client_stall_seconds: float = STALL_SECONDS,
        live: Live | None = None,
        host_names: abc.Collection[str] | None = None,
    ) -> None:
        """With `live` the door shows the live page as well.

        With `host_names` nobody is answered who calls it by another name of the network (`hosts`).
        """
        self._intake = intake
        self.client_stall_seconds = client_stall_seconds
        self._doorkeeper = doorkeeper
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._bodies = Bodies()
        self._room = Room()
        self._closed = False
        self._cut = asyncio.Event()
        self.num_responses: Counter[int] = Counter()  # that began, by status
        self.asgi: ASGIApp = Starlette(
            routes=[
                Route("/v1/completions", self._keyed(self._complete), methods=["POST"]),
                Route("/v1/chat/completions", self._keyed(self._chat), methods=["POST"]),
                Route("/v1/responses", self._keyed(self._respond), methods=["POST"]),
                Route("/v1/models", self._keyed(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._keyed(self._model), methods=["GET"]),
                Route("/tokenize", self._keyed(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._keyed(self._detokenize), methods=["POST"]),
                Route("/health", _Endpoint(self._ready), methods=["GET"]),
                Route("/ready", _Endpoint(self._ready), methods=["GET"]),
                Route(description.PATH, _Endpoint(_describe), methods=["GET"]),
                *([] if live is None else self._page_routes(live)),
            ],
            middleware=[
                Middleware(_CountedStatus, self.num_responses),
                Middleware(_SecurityHeaders),
                Middleware(_LimitedHead),
                *([] if host_names is None else [Middleware(_HostNames, host_names)]),
            ],
            exception_handlers={HTTPException: _no_such_path},
        )

    def _keyed(self, handle: Handler) -> "_Endpoint":
        """The handler, behind the door that asks for a key."""

        async def handle_known(exchange: Exchange) -> None:
            exchange.caller = self._doorkeeper.caller(exchange.request.headers.get("authorization", ""))
            await handle(exchange)

        return _Endpoint(handle_known)

    def close(self) -> None:
        """New calls get 503 from now on; running ones are not touched."""
        self._closed = True

    async def stop(self) -> None:
        """Gives back what reads bodies, once no call runs."""
        await self._bodies.close()

    def cut(self) -> None:
        """Running calls end now, with 503 or an error event."""
        self._cut.set()

    # --- generation ---------------------------------------------------------------------------------

    async def _complete(self, exchange: Exchange) -> None:
        body = await self._body(exchange)
        asked: Asked = await self._read("completion", body)
        exchange.names = asked.names
        echoes = await self._echoes(asked) if asked.echo else None
        shape = CompletionShape(self._intake.model.tokenizer, echoes)
        await self._generate(exchange, body, asked, self._by_choices(asked, shape))

    async def _chat(self, exchange: Exchange) -> None:
        body = await self._body(exchange)
        asked: Asked = with_calls(await self._read("chat", body), self._intake.model.call_writing)
        exchange.names = asked.names
        await self._generate(exchange, body, asked, self._by_choices(asked, self._chat_shape(asked)))

    async def _respond(self, exchange: Exchange) -> None:
        exchange.names = NAMES
        body = await self._body(exchange)
        read: AskedResponse = await self._read("response", body)
        asked = with_calls(read, self._intake.model.call_writing)
        exchange.names = asked.names
        await self._generate(exchange, body, asked, self._by_items(asked))

    def _chat_shape(self, asked: Asked) -> Shape:
        vocabulary, call_id = self._intake.model.tokenizer, self._call_id()
        if isinstance(asked.tool_use, ForcedFunction):
            name, stop_word = asked.tool_use.name, asked.tool_use.finish_reason
            return CallShape(vocabulary, function=name, call_id=call_id, stop_word=stop_word)
        parser = self._call_parser(asked)
        if parser is not None:
            return ToolsShape(vocabulary, parser=parser, call_id=call_id)
        return ChatShape(vocabulary)

    def _call_parser(self, asked: Asked) -> abc.Callable[[], ToolCallParser] | None:
        """What finds calls in an answer's text, each time anew; None where none are to be found."""
        match asked.tool_use:
            case OfferedTools(names, max_calls, schema, functions):
                form = self._intake.model.tool_call_form if schema is None else ToolCallForm.LLAMA3_JSON
                is_apart = bool(functions)
                return form and partial(ToolCallParser, form, names, max_calls=max_calls, is_apart=is_apart)
        return None

    def _call_id(self) -> abc.Callable[[], str]:
        return partial(_new_call_id, self._intake.model.tool_call_form)

    def _by_choices(self, asked: Asked, shape: Shape) -> Wording:
        def answer(call: Call, call_id: str) -> AnyAnswer:
            return Answer(
                shape,
                call_id=call_id,
                created=int(time.time()),
                model=self._intake.model.name,
                asked=asked,
                logs=call.logs,
            )

        return answer

    def _by_items(self, asked: AskedResponse) -> Wording:
        tool_use, parser = asked.tool_use, self._call_parser(asked)

        def answer(call: Call, call_id: str) -> AnyAnswer:
            (log,) = call.logs
            return ResponseAnswer(
                self._intake.model.tokenizer,
                response_id=call_id,
                created_at=int(time.time()),
                clock=time.time,
                model=self._intake.model.name,
                asked=asked,
                log=log,
                function=tool_use.name if isinstance(tool_use, ForcedFunction) else None,
                parser=parser and parser(),
                call_id=self._call_id(),
                item_id=lambda prefix: prefix + uuid.uuid4().hex,
            )

        return answer

    async def _generate(self, exchange: Exchange, body: list[bytes], asked: Asked, wording: Wording) -> None:
        received_at = time.monotonic()
        call_id = asked.requests[0].request_id or uuid.uuid4().hex
        check_request_id(call_id)  # before it stands in a header
        exchange.request_id = call_id
        timeout_seconds = asked.timeout_seconds
        digest = await _digest(body)
        exchange.let_go()  # what is asked has been read out of it, and the answer may take long
        arrival = Arrival(
            received_at=received_at,
            deadline=None if timeout_seconds is None else received_at + timeout_seconds,
            body_digest=digest,
            caller=exchange.caller,
            trace=(
                exchange.request.headers.get("traceparent", ""),
                exchange.request.headers.get("tracestate", ""),
            ),
        )
        work = self._answer(exchange, asked, wording, arrival)
        await exchange.while_wanted(work, timeout_seconds=timeout_seconds, cut=self._cut)

    async def _answer(self, exchange: Exchange, asked: Asked, wording: Wording, arrival: Arrival) -> None:
        call_id = exchange.request_id
        async with self._intake.call(_named(asked.requests, call_id), arrival) as call:
            await call.until_taken_in()
            answer = wording(call, call_id)
            if not asked.stream:
                await call.until_ended()
                is_long = call.is_long
                body = await aside.run(lambda: answer.body(is_long=is_long), is_long=is_long)
                await exchange.answer_encoded(body)
                return
            async with StallGuard(self.client_stall_seconds, lambda: call.num_unread_logprobs) as guard:
                exchange.guard = guard
                news = await _first_of_outputs(call)
                exchange.last_words = answer.failure
                await exchange.begin_events()
                await exchange.events(answer.opening())
                while news:
                    await exchange.events(await _told(answer, news))
                    news = await call.news()
                await exchange.end_events(answer.closing())

    async def _echoes(self, asked: Asked) -> list[str]:
        """What an echo repeats of each prompt."""
        echoes = []
        for request in asked.requests:
            if isinstance(request.prompt, str):
                echoes.append(request.prompt)
                continue
            assert isinstance(request.prompt, tuple), "a completion's prompt is text or ids"
            echoes.append(await self._intake.detokenize(request.prompt))
            await asyncio.sleep(0)  # there may be a hundred of them
        return echoes

    async def _body(self, exchange: Exchange) -> list[bytes]:
        if self._closed:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                "the server is shutting down; try again",
                retry_after_seconds=_RETRY_AFTER_SHUTDOWN_SECONDS,
            )
        return await exchange.body(self._max_body_bytes, self._room)

    async def _read(self, kind: str, body: list[bytes]) -> Any:
        return await self._bodies.read(kind, body, self._intake.welcome().max_total_tokens)

    # --- the small calls ----------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        await exchange.answer({"object": "list", "data": [self._model_card()]})

    async def _model(self, exchange: Exchange) -> None:
        self._intake.check_model(exchange.request.path_params["name"])
        await exchange.answer(self._model_card())

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._intake.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "chairlift",
            "max_model_len": self._intake.welcome().max_total_tokens,
        }

    async def _tokenize(self, exchange: Exchange) -> None:
        asked: Tokenizing = await self._read("tokenizing", await self._body(exchange))
        exchange.names = {} if isinstance(asked.prompt, str) else {"prompt": "messages"}
        self._intake.check_model(asked.model)
        tokens = await self._intake.tokenize(asked.prompt)
        max_model_len = self._intake.welcome().max_total_tokens
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        await _answer_aside(exchange, answer, is_long=len(tokens) > aside.INLINE_TOKENS)

    async def _detokenize(self, exchange: Exchange) -> None:
        exchange.names = {"token_ids": "tokens"}
        asked: Detokenizing = await self._read("detokenizing", await self._body(exchange))
        self._intake.check_model(asked.model)
        text = await self._intake.detokenize(asked.token_ids, include_special=asked.include_special)
        await _answer_aside(exchange, {"prompt": text}, is_long=len(text) > aside.INLINE_BYTES)

    # --- the live page ------------------------------------------------------------------------------

    def _page_routes(self, live: Live) -> list[Route]:
        async def watch(exchange: Exchange) -> None:
            keys.check_admin(exchange.caller, "the live page")
            if self._closed or live.is_full:
                refusal = "the server is shutting down" if self._closed else "too many pages are open"
                raise RequestError(grpc.StatusCode.UNAVAILABLE, refusal)
            await exchange.while_wanted(_frames(live, exchange), timeout_seconds=None, cut=self._cut)

        async def tell_story(exchange: Exchange) -> None:
            request = exchange.request
            tenant = keys.asked_of(exchange.caller, request.query_params.get("tenant", ""))
            await exchange.answer(await live.story(request.path_params["request_id"], tenant))

        return [
            Route("/live", self._keyed(watch), methods=["GET"]),
            Route("/live/requests/{request_id:path}", self._keyed(tell_story), methods=["GET"]),
            *page.routes(),
        ]

    async def _ready(self, exchange: Exchange) -> None:
        refusal = "shutting down" if self._closed else self._intake.refusal
        if refusal is not None:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, refusal)
        await exchange.answer({"status": "ok"})


def _new_call_id(form: ToolCallForm | None) -> str:
    """A name for a call, told again with its result; Mistral's templates want nine letters and digits."""
    name = uuid.uuid4().hex
    return name[:9] if form is ToolCallForm.MISTRAL else f"call_{name}"


async def _describe(exchange: Exchange) -> None:
    await exchange.answer_encoded(_description())


@cache
def _description() -> bytes:
    return encoded(description.described())


async def _first_of_outputs(call: Call) -> list[News]:
    """All news up to a first token: until then a failure is the status of the response."""
    news = await call.news()
    while all(isinstance(item, PromptSeen) for item in news):
        news += await call.news()
    return news


async def _told(answer: AnyAnswer, news: list[News]) -> bytes:
    """What has happened, as events."""
    is_long = answer.is_long(news)
    return await aside.run(lambda: answer.events(news, is_long=is_long), is_long=is_long)


async def _answer_aside(exchange: Exchange, value: dict[str, Any], *, is_long: bool) -> None:
    body = await aside.run(lambda: encoded(value, is_long=is_long), is_long=is_long)
    await exchange.answer_encoded(body)


async def _digest(body: list[bytes]) -> bytes:
    """SHA-256 of a body."""

    def digest() -> bytes:
        hashed = sha256()
        for piece in body:
            hashed.update(piece)
        return hashed.digest()

    return await aside.run(digest, is_long=sum(map(len, body)) > aside.INLINE_BYTES)


class _Endpoint:
    """A handler as an ASGI application: whatever it fails with is told, and a defect is logged."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._handle(exchange)
        except ClientDisconnect:
            _log.info("client_hung_up", path=scope["path"], **exchange.named)
        except StalledError as error:  # nothing can be told to whoever takes nothing
            _log.info("client_stalled", path=scope["path"], reason=error.message, **exchange.named)
            exchange.hang_up()
        except RequestError as error:
            if error.code is not grpc.StatusCode.UNAUTHENTICATED:  # strangers are counted, not told of
                _log.info("request_failed", code=error.code.name, field=error.field, **exchange.named)
            await exchange.fail(error)
        except HttpError as error:
            _log.info("request_failed", status=error.status, code=error.code)
            await exchange.fail(error)
        except Exception:  # noqa: BLE001 - the outermost frame of ours; it is logged and answered
            _log.exception("defect", **exchange.named)
            defect = RequestError(grpc.StatusCode.INTERNAL, "the router failed; its log says where")
            await exchange.fail(defect)
        finally:
            exchange.let_go()


async def _frames(live: Live, exchange: Exchange) -> None:
    """Sends what there is to see for as long as the page is open."""
    await exchange.begin_events()
    async with contextlib.aclosing(live.events()) as events:
        async for frames in events:
            await exchange.raw_event("[" + ",".join(frames) + "]")


class _SecurityHeaders:
    """Puts the headers that browsers heed on every response. No CORS header is among them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message.get("headers", [])
                names = {name for name, _ in given}  # a page says for itself what it may load
                message["headers"] = [*given, *(pair for pair in _SECURITY_HEADERS if pair[0] not in names)]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _CountedStatus:
    """Counts how responses begin."""

    def __init__(self, app: ASGIApp, num_responses: Counter[int]) -> None:
        self._app = app
        self._num_responses = num_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._num_responses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, send_counted)


class _LimitedHead:
    """Refuses requests with too many headers, or too long ones. A server looks at heads in pieces alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= MAX_HEADERS and num_bytes <= MAX_HEAD_BYTES:
            await self._app(scope, receive, send)
            return
        message = (
            f"the request has {len(headers)} headers and {num_bytes} bytes of them; "
            f"at most {MAX_HEADERS} and {MAX_HEAD_BYTES} bytes are allowed"
        )
        await Exchange(scope, receive, send).fail(HttpError(431, "headers_too_large", message))


class _HostNames:
    """Refuses requests that came under another name of the network."""

    def __init__(self, app: ASGIApp, names: abc.Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            hosts.check(scope["headers"], self._names)
        except HttpError as error:
            await Exchange(scope, receive, send).fail(error)
        else:
            await self._app(scope, receive, send)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these alone"
    what = f"{request.method} {request.url.path}"
    reason = f"{what} is not served here"
    if request.url.path.startswith("/v1/responses/"):
        reason += ": no response is stored; the whole conversation goes with each request, as input"
    told = errors.answer(HttpError(error.status_code, "not_found", reason))
    return JSONResponse(told.body, told.status, headers=error.headers)


def _named(requests: tuple[GenerateRequest, ...], call_id: str) -> list[GenerateRequest]:
    """Each request with an id: the call's own, or for several prompts that and a number."""
    if len(requests) == 1:
        return [replace(requests[0], request_id=call_id)]
    return [replace(request, request_id=f"{call_id}-{i}") for i, request in enumerate(requests)]
