"""The HTTP door described in OpenAPI 3.1, for tools that generate clients, pages and tests from it.

Bodies and answers are described in `schemas`, the form of errors in `errors`; here are the paths, without
those of the live page. Pure.
"""

from typing import Any, Final

from router.http import errors
from router.http.schemas import SCHEMAS, Schema, reference
from rpc.version import version

PATH: Final = "/openapi.json"

_KEY: Final = "key"
_JSON: Final = "application/json"


def described() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Chairlift",
            "summary": "An LLM server, at the door for OpenAI's clients.",
            "description": "Meanings and defaults of all fields: docs/clients.md. null is the same as absent "
            "and what is not described here is refused by name.",
            "version": version(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _PATHS,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                _KEY: {"type": "http", "scheme": "bearer", "description": "Where the server knows tenants."}
            },
        },
    }


def _operation(
    name: str, summary: str, answer: Schema, *, body: str | None = None, is_open: bool = False, **more: Any
) -> Schema:
    """One call. `answer` is its 200, `body` the schema of what it takes; `is_open` ones ask for no key."""
    operation = {
        "operationId": name,
        "summary": summary,
        "security": [] if is_open else [{}, {_KEY: []}],
        "responses": {"200": answer, **{str(status): _failure(status) for status in errors.STATUSES}},
        **more,
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": reference(body)}}}
    return operation


def _value(schema: str) -> Schema:
    return {"description": "OK", "content": {_JSON: {"schema": reference(schema)}}}


_DONE: Final = (
    "the last is [DONE]. A failure after the beginning is a last event, an Error, and no [DONE] follows."
)


def _generated(whole: str, chunk: str, *, end: str = _DONE) -> Schema:
    """An answer whole, or as the events of a stream, whose values `x-event-schema` describes."""
    events = {
        "schema": {
            "type": "string",
            "description": f"Server-sent events: each `data:` is a {chunk}, {end}",
        },
        "x-event-schema": reference(chunk),
    }
    answer = _value(whole)
    answer["description"] = "The answer; with stream true as events."
    answer["content"]["text/event-stream"] = events
    answer["headers"] = {"x-request-id": {"description": "The call's id.", "schema": {"type": "string"}}}
    return answer


def _failure(status: int) -> Schema:
    return {
        "description": errors.STATUSES[status],
        "content": {_JSON: {"schema": reference("Error")}},
    }


_PATHS: Final[dict[str, Any]] = {
    "/v1/completions": {
        "post": _operation(
            "complete",
            "Goes on with a text, or with several.",
            _generated("Completion", "CompletionChunk"),
            body="CompletionRequest",
        )
    },
    "/v1/chat/completions": {
        "post": _operation(
            "chat", "Answers a conversation.", _generated("Chat", "ChatChunk"), body="ChatRequest"
        )
    },
    "/v1/responses": {
        "post": _operation(
            "respond",
            "Answers a conversation, in items. Nothing is stored.",
            _generated(
                "Response",
                "ResponseEvent",
                end="with its type as `event:`; the last is response.completed, response.incomplete or, "
                "after a failure, response.failed.",
            ),
            body="ResponseRequest",
        )
    },
    "/v1/models": {"get": _operation("models", "The model that is served.", _value("Models"))},
    "/v1/models/{name}": {
        "get": _operation(
            "model",
            "The same by its name.",
            _value("Model"),
            parameters=[{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
        )
    },
    "/tokenize": {
        "post": _operation("tokenize", "Text to token ids.", _value("Tokens"), body="TokenizeRequest")
    },
    "/detokenize": {
        "post": _operation("detokenize", "Token ids to text.", _value("Text"), body="DetokenizeRequest")
    },
    "/health": {
        "get": _operation(
            "health", "Whether a request sent now would get a token.", _value("Ready"), is_open=True
        )
    },
    "/ready": {"get": _operation("ready", "The same as /health.", _value("Ready"), is_open=True)},
}
