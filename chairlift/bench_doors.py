"""The two doors by which a load reaches a server: gRPC, and OpenAI's HTTP for other servers too.

Each is a context that yields what sends one request, and the size of the vocabulary that prompts are drawn
from. It must not know when a request is due, or what its answer was worth.
"""

import contextlib
import importlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import grpc

from chairlift.calls import API_KEY_VARIABLE, Router, router_at
from chairlift.results import ChairliftError
from protos.v1 import common_pb2, router_pb2
from rpc.errors import StartError

DEFAULT_VOCAB_SIZE = 32_000


class Counts(NamedTuple):
    """Tokens of one answer, and those of its prompt that were found in the server's cache; None: untold."""

    num_tokens: int
    num_cached: int | None


Send = Callable[[list[int], int, Callable[[], None]], Awaitable[Counts]]
"""Sends one request (prompt, most tokens), tells each time when tokens came, and returns how many did in all.

Raises ChairliftError."""


@contextlib.asynccontextmanager
async def grpc_door(where: Router, model: str) -> AsyncIterator[tuple[Send, int]]:
    """That of a router; `model` is empty for its only one. Raises ChairliftError."""
    async with router_at(where) as router:
        served = await router.GetModel(router_pb2.GetModelRequest(), metadata=where.metadata)

        async def send(prompt: list[int], max_tokens: int, came: Callable[[], None]) -> Counts:
            request = router_pb2.GenerateRequest(
                model=model,
                token_ids=router_pb2.TokenIds(ids=prompt),
                sampling=common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens),
            )
            call = router.Generate(request, metadata=where.metadata)
            num_tokens, num_cached = 0, None
            try:
                async for event in call:
                    if event.HasField("prompt_info"):
                        num_cached = event.prompt_info.num_cached_tokens
                    if event.HasField("delta") and event.delta.token_ids:
                        came()
                        num_tokens += len(event.delta.token_ids)
            except grpc.aio.AioRpcError as error:
                raise ChairliftError(error.code().name, error.details() or "") from error
            finally:
                call.cancel()
            return Counts(num_tokens, num_cached)

        yield send, served.vocab_size


@contextlib.asynccontextmanager
async def openai_door(url: str, model: str) -> AsyncIterator[tuple[Send, int]]:
    """That of any server, at http://HOST:PORT/v1 or unix:PATH; `model` is empty for its first.

    Tokens are counted by the usage at the end: a message may bring several, or a part of a character.
    Raises StartError.
    """
    try:
        httpx = importlib.import_module("httpx2")
    except ImportError as error:
        raise StartError(
            "--url needs httpx2, which is not installed: pip install 'chairlift[bench]'"
        ) from error
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    socket = url.removeprefix("unix:") if url.startswith("unix:") else None
    base = "http://localhost/v1" if socket else url.rstrip("/")
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    way = httpx.AsyncHTTPTransport(uds=socket, limits=unlimited)
    async with httpx.AsyncClient(headers=headers, timeout=None, transport=way) as client:
        try:
            model = model or (await client.get(f"{base}/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise StartError(f"--url {url}: {base}/models cannot be read ({error!r})") from error

        async def send(prompt: list[int], max_tokens: int, came: Callable[[], None]) -> Counts:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                async with client.stream("POST", f"{base}/completions", json=body) as response:
                    if response.is_error:
                        raise ChairliftError(f"HTTP {response.status_code}", "refused")
                    return await read_events(response.aiter_lines(), came)
            except (httpx.HTTPError, ValueError) as error:
                raise ChairliftError(type(error).__name__, str(error)) from error

        yield send, DEFAULT_VOCAB_SIZE


async def read_events(events: AsyncIterator[str], came: Callable[[], None]) -> Counts:
    """The chunks of one streamed completion; returns its numbers of tokens.

    Raises:
        ValueError: a chunk that is none.
        ChairliftError: the server's own error event.
    """
    num_chunks, counted, num_cached = 0, None, None
    async for line in events:
        text = line.removeprefix("data:").strip()
        if not line.startswith("data:") or text == "[DONE]":
            continue
        chunk = json.loads(text)
        if "error" in chunk:
            raise ChairliftError("HTTP error event", str(chunk["error"]))
        if any(choice.get("text") for choice in chunk.get("choices") or ()):
            came()
            num_chunks += 1
        usage = chunk.get("usage") or {}
        counted = usage.get("completion_tokens", counted)
        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", num_cached)
    return Counts(num_chunks if counted is None else counted, num_cached)
