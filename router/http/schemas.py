"""What bodies and answers of the HTTP door look like, as JSON Schema (2020-12), for `description`.

Limits are the constants that requests are checked against, and a test reads bodies field by field to see that
the two agree (`tests/router/http/test_schemas.py`). Limits that depend on the model (lengths, the vocabulary)
are only in `docs/clients.md`. Pure; it must not know paths or statuses.
"""

from collections import abc
from typing import Any, Final

from router import constraints
from router.chat import RESERVED_VARIABLES
from router.http import asked, responses
from router.http.fields import MAX_INT, MIN_INT
from router.validation import (
    MAX_BIAS,
    MAX_CHAT_MESSAGES,
    MAX_CHAT_TOOLS,
    MAX_CHOICES,
    MAX_KWARGS_CHARACTERS,
    MAX_KWARGS_DEPTH,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOOL_CALLS,
)

Schema = dict[str, Any]

# --- words ------------------------------------------------------------------------------------------

_TEXT: Final[Schema] = {"type": "string"}
_NOT_EMPTY: Final[Schema] = {"type": "string", "minLength": 1}
_FLAG: Final[Schema] = {"type": "boolean"}
_NUMBER: Final[Schema] = {"type": "number"}
_NULL: Final[Schema] = {"type": "null"}
_ANY_OBJECT: Final[Schema] = {"type": "object"}
# A schema whose values are objects, whatever it says of them.
_ARGUMENTS: Final[Schema] = {
    "type": "object",
    "properties": {
        "type": {"anyOf": [{"const": "object"}, {"type": "array", "contains": {"const": "object"}}]}
    },
}


def _whole(low: int = MIN_INT, high: int = MAX_INT) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _above(low: float, high: float) -> Schema:
    return {"type": "number", "exclusiveMinimum": low, "maximum": high}


def _list(items: Schema, *, at_least: int = 0, at_most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if at_least:
        schema["minItems"] = at_least
    if at_most is not None:
        schema["maxItems"] = at_most
    return schema


def _text(at_least: int, at_most: int) -> Schema:
    return {"type": "string", "minLength": at_least, "maxLength": at_most}


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _about(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def reference(name: str) -> Schema:
    """Where a schema of `SCHEMAS` is named."""
    return {"$ref": f"#/components/schemas/{name}"}


def _body(fields: abc.Mapping[str, Schema], *, required: abc.Sequence[str] = ()) -> Schema:
    """An object that a client sends: null is the same as absent, and nothing else may stand in it."""
    properties = {
        name: schema if name in required or schema is _NULL else _or_null(schema)
        for name, schema in fields.items()
    }
    return _object(properties, required=required) | {"additionalProperties": _NULL}


def _either(body: Schema, *cases: abc.Mapping[str, Schema]) -> Schema:
    """The body, with these fields present in one of these ways; `_NULL` ones are absent."""
    return body | {
        "anyOf": [
            {
                "properties": dict(case),
                "required": [name for name, schema in case.items() if schema is not _NULL],
            }
            for case in cases
        ]
    }


def _object(properties: abc.Mapping[str, Schema], *, required: abc.Sequence[str]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _answer(
    properties: abc.Mapping[str, Schema], *, sometimes: abc.Mapping[str, Schema] | None = None
) -> Schema:
    """An object that the door sends: everything is there, but for what is there `sometimes`."""
    return _object({**properties, **(sometimes or {})}, required=list(properties))


# --- what is asked ----------------------------------------------------------------------------------

_TOKEN_ID: Final = _whole(0)
_REGEX: Final = _text(1, constraints.MAX_REGEX_CHARACTERS)
_CHOICE: Final = _list(
    _text(1, constraints.MAX_CHOICE_CHARACTERS), at_least=1, at_most=constraints.MAX_CHOICES
)
_JSON_SCHEMA: Final = _about(
    _any_of(_TEXT, _ANY_OBJECT),
    f"A JSON schema, as itself or as text; at most {constraints.MAX_SCHEMA_BYTES} bytes",
)

_COMMON: Final[Schema] = {
    "model": _about(_TEXT, "The served name; absent: the one there is"),
    "max_tokens": _about(_whole(1), "Absent: what fits, or the server's own default"),
    "temperature": _number(0, MAX_TEMPERATURE),
    "top_p": _above(0, 1),
    "top_k": _about(_whole(-1), "-1 and 0 are off"),
    "min_p": _number(0, 1),
    "seed": _about(_whole(), "Absent: one is drawn"),
    "min_tokens": _whole(0),
    "ignore_eos": _FLAG,
    "n": _whole(1, MAX_CHOICES),
    "stop": _any_of(_text(1, MAX_STOP_CHARACTERS), _list(_text(1, MAX_STOP_CHARACTERS), at_most=MAX_STOPS)),
    "include_stop": _FLAG,
    "stop_token_ids": _list(_TOKEN_ID, at_most=MAX_STOP_TOKEN_IDS),
    "repetition_penalty": _above(0, MAX_REPETITION_PENALTY),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": _number(-MAX_BIAS, MAX_BIAS),
        "maxProperties": MAX_LISTED_TOKEN_IDS,
        "description": "Names are token ids",
    },
    "allowed_token_ids": _list(_TOKEN_ID, at_most=MAX_LISTED_TOKEN_IDS),
    "banned_token_ids": _list(_TOKEN_ID, at_most=MAX_LISTED_TOKEN_IDS),
    "prompt_logprobs": _any_of(_whole(0, MAX_LOGPROBS), {"const": False}),
    "response_format": reference("ResponseFormat"),
    "json_schema": _JSON_SCHEMA,
    "regex": _REGEX,
    "choice": _CHOICE,
    "structured_outputs": _about(
        _body({"json": _JSON_SCHEMA, "json_object": _FLAG, "regex": _REGEX, "choice": _CHOICE}),
        "vLLM's word for json_schema, regex and choice",
    ),
    "stream": _FLAG,
    "stream_options": _about(
        _body(
            {
                "include_usage": _FLAG,
                "continuous_usage_stats": _about(_FLAG, "It needs include_usage to be true"),
                "include_obfuscation": {"const": False},
            }
        ),
        "It needs stream to be true",
    ),
    "return_token_ids": _FLAG,
    "priority": _about(_whole(-MAX_PRIORITY, MAX_PRIORITY), "Lower is served first"),
    "cache_salt": _TEXT,
    "request_id": {
        "type": "string",
        "maxLength": asked.MAX_REQUEST_ID_CHARACTERS,
        "pattern": "^([!-~]([ -~]*[!-~])?)?$",  # a header of the answer has it
    },
    "timeout": _about(_above(0, asked.MAX_TIMEOUT_SECONDS), "Seconds"),
    "user": _about(_TEXT, "Taken, and used for nothing"),
    "safety_identifier": _about(_TEXT, "Likewise"),
    "prompt_cache_key": _about(_TEXT, "Likewise"),
    "metadata": _about(_ANY_OBJECT, "Likewise"),
    "store": {"const": False},
    "service_tier": {"enum": ["auto", "default"]},
}
# What a response is asked for by other names, or otherwise.
_OTHERWISE: Final = {"max_tokens", "response_format", "return_token_ids", "prompt_logprobs"}

_CONVERSATION: Final[Schema] = {
    "messages": _list(reference("Message"), at_least=1, at_most=MAX_CHAT_MESSAGES),
    "tools": _about(
        _list(reference("Tool"), at_most=MAX_CHAT_TOOLS),
        "Functions, no two of one name; what else stands in them is for the model's chat template",
    ),
    "tool_choice": _any_of(
        {"enum": ["auto", "none", "required"]},
        _object(
            {"type": {"const": "function"}, "function": _object({"name": _TEXT}, required=["name"])},
            required=["type", "function"],
        ),
    ),
    "continue_final_message": _FLAG,
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": {
        "type": "object",
        "propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}},
        "description": "Variables for the model's chat template; what it does not use changes nothing. As "
        f"JSON at most {MAX_KWARGS_CHARACTERS} characters, {MAX_KWARGS_DEPTH} levels deep",
    },
}


def _item(fields: abc.Mapping[str, Schema], *, required: abc.Sequence[str]) -> Schema:
    """What an item of an input has beside what all have, as earlier answers gave it."""
    return _body({**fields, "id": _TEXT, "status": {"enum": list(responses.STATUSES)}}, required=required)


BODIES: Final[dict[str, Schema]] = {
    "CompletionRequest": _body(
        {
            "prompt": _any_of(
                _NOT_EMPTY,
                _list(_TOKEN_ID, at_least=1),
                _list(_NOT_EMPTY, at_least=1, at_most=asked.MAX_CHOICES_IN_ALL),
                _list(_list(_TOKEN_ID, at_least=1), at_least=1, at_most=asked.MAX_CHOICES_IN_ALL),
            ),
            **_COMMON,
            "logprobs": _whole(0, asked.MAX_COMPLETION_LOGPROBS),
            "echo": _FLAG,
            "best_of": _about(_whole(1, MAX_CHOICES), "Must be n"),
            "suffix": {"const": ""},
        },
        required=["prompt"],
    ),
    "ChatRequest": _body(
        {
            **_CONVERSATION,
            **_COMMON,
            "max_completion_tokens": _about(_whole(1), "Not beside max_tokens"),
            "logprobs": _FLAG,
            "top_logprobs": _about(_whole(0, MAX_LOGPROBS), "It needs logprobs to be true, unless it is 0"),
            "parallel_tool_calls": _about(
                _FLAG, "false: of several calls in an answer the first alone is one"
            ),
            "modalities": {"const": ["text"]},
        },
        required=["messages"],
    ),
    "ResponseRequest": _body(
        {
            "input": _any_of(_TEXT, _list(reference("InputItem"), at_least=1, at_most=MAX_CHAT_MESSAGES)),
            "instructions": _about(_TEXT, "A system message before the input"),
            **{
                name: schema
                for name, schema in (_CONVERSATION | _COMMON).items()
                if name not in {"messages", *_OTHERWISE}
            },
            "max_output_tokens": _about(_whole(1), "Absent: what fits, or the server's own default"),
            "tools": _about(
                _list(reference("FlatTool"), at_most=MAX_CHAT_TOOLS), "Functions, no two of one name"
            ),
            "tool_choice": _any_of(
                {"enum": ["auto", "none", "required"]},
                _object({"type": {"const": "function"}, "name": _TEXT}, required=["type", "name"]),
            ),
            "parallel_tool_calls": _about(
                _FLAG, "false: of several calls in an answer the first alone is one"
            ),
            "text": _body({"format": reference("TextFormat"), "verbosity": {"const": "medium"}}),
            "include": _list({"enum": list(responses.INCLUDED)}),
            "top_logprobs": _about(
                _whole(0, MAX_LOGPROBS), f"It needs {responses.LOGPROBS} in include, unless it is 0"
            ),
            "n": {"const": 1},
            "prompt_logprobs": {"const": False},
            "return_token_ids": {"const": False},
            "stream_options": _about(
                _body({"include_obfuscation": {"const": False}}), "It needs stream to be true"
            ),
            "metadata": _about(
                {
                    "type": "object",
                    "propertyNames": _text(0, responses.MAX_METADATA_NAME_CHARACTERS),
                    "additionalProperties": _text(0, responses.MAX_METADATA_VALUE_CHARACTERS),
                    "maxProperties": responses.MAX_METADATA,
                },
                "The answer repeats it",
            ),
            "store": _about(_FLAG, "Taken, and nothing is stored: the answer says false"),
            "background": {"const": False},
            "truncation": {"const": "disabled"},
            "reasoning": {"type": "object", "additionalProperties": _NULL},
            "previous_response_id": _NULL,
            "conversation": _NULL,
            "prompt": _NULL,
            "max_tool_calls": _NULL,
        },
        required=["input"],
    ),
    "TokenizeRequest": _about(
        _either(
            _body({"model": _TEXT, "prompt": _NOT_EMPTY, **_CONVERSATION}),
            {"prompt": _TEXT, **dict.fromkeys(_CONVERSATION, _NULL)},
            {"prompt": _NULL, "messages": {"type": "array"}},
        ),
        "prompt, or messages as in a chat",
    ),
    "DetokenizeRequest": _body(
        {"model": _TEXT, "tokens": _list(_TOKEN_ID), "include_special": _FLAG}, required=["tokens"]
    ),
}

PARTS: Final[dict[str, Schema]] = {
    "Message": _either(
        _body(
            {
                "role": _NOT_EMPTY,
                "content": _any_of(_TEXT, _list(reference("TextPart"))),
                "name": _TEXT,
                "tool_calls": _list(reference("ToolCall"), at_most=MAX_TOOL_CALLS),
                "tool_call_id": _about(_TEXT, "Of tools"),
                "refusal": {"const": ""},
                "annotations": {"const": []},
                "type": {"const": "text"},
            },
            required=["role"],
        ),
        {"content": {"type": ["string", "array"]}},
        {"tool_calls": {"type": "array", "minItems": 1}, "role": {"const": "assistant"}},
    ),
    "TextPart": _body({"type": {"const": "text"}, "text": _TEXT}, required=["type", "text"]),
    "Tool": {
        "type": "object",
        "properties": {
            "type": _or_null({"const": "function"}),
            "function": {
                "type": "object",
                "properties": {
                    "name": _NOT_EMPTY,
                    "parameters": _or_null(
                        _about(_ARGUMENTS, "The schema of its arguments; absent, it takes none")
                    ),
                },
                "required": ["name"],
            },
        },
        "required": ["function"],
    },
    "ToolCall": _body(
        {
            "id": _TEXT,
            "index": _about(_whole(), "As chunks bring it; taken, and used for nothing"),
            "type": {"const": "function"},
            "function": _body({"name": _NOT_EMPTY, "arguments": _TEXT}, required=["name"]),
        },
        required=["function"],
    ),
    "InputItem": _any_of(
        _item(
            {
                "type": {"const": "message"},
                "role": {"enum": list(responses.ROLES)},
                "content": _any_of(_TEXT, _list(reference("InputPart"))),
            },
            required=["role", "content"],
        ),
        _item(
            {
                "type": {"const": "function_call"},
                "call_id": _NOT_EMPTY,
                "name": _NOT_EMPTY,
                "arguments": _TEXT,
            },
            required=["type", "call_id", "name"],
        ),
        _item(
            {
                "type": {"const": "function_call_output"},
                "call_id": _NOT_EMPTY,
                "output": _any_of(_TEXT, _list(reference("InputPart"))),
            },
            required=["type", "call_id", "output"],
        ),
    ),
    "InputPart": _any_of(
        _body({"type": {"const": "input_text"}, "text": _TEXT}, required=["type", "text"]),
        _body(
            {
                "type": {"const": "output_text"},
                "text": _TEXT,
                "annotations": {"const": []},
                "logprobs": _about({"type": "array"}, "As an answer has them; taken, and used for nothing"),
            },
            required=["type", "text"],
        ),
    ),
    "FlatTool": _body(
        {
            "type": {"const": "function"},
            "name": _NOT_EMPTY,
            "description": _TEXT,
            "parameters": _about(_ARGUMENTS, "The schema of its arguments; absent, it takes none"),
            "strict": _about(_FLAG, "Taken: arguments that are held to their schema always are strictly"),
        },
        required=["name"],
    ),
    "TextFormat": _any_of(
        _body({"type": {"enum": ["text", "json_object"]}}, required=["type"]),
        _body(
            {
                "type": {"const": "json_schema"},
                "name": _NOT_EMPTY,
                "description": _TEXT,
                "strict": _FLAG,
                "schema": _ANY_OBJECT,
            },
            required=["type", "name", "schema"],
        ),
    ),
    "ResponseFormat": _any_of(
        _body({"type": {"enum": ["text", "json_object"]}}, required=["type"]),
        _body(
            {
                "type": {"const": "json_schema"},
                "json_schema": _body(
                    {"name": _TEXT, "description": _TEXT, "strict": _FLAG, "schema": _JSON_SCHEMA}
                ),
            },
            required=["type", "json_schema"],
        ),
    ),
}

# --- what is answered -------------------------------------------------------------------------------

_COUNT: Final = _whole(0)
_FINISH_REASON: Final[Schema] = {"enum": ["stop", "length", "tool_calls"]}
_STOP_REASON: Final = _about(
    _any_of(_TEXT, _TOKEN_ID, _NULL), "The stop string or stop token id of the request that ended it"
)
_CLOSED: Final[Schema] = {"finish_reason": _FINISH_REASON, "stop_reason": _STOP_REASON}
_ASKED_FOR: Final[Schema] = {
    "token_ids": _list(_TOKEN_ID),
    "prompt_logprobs": _list(
        _or_null({"type": "object", "additionalProperties": reference("PromptTokenLogprob")})
    ),
}
_OF_A_CHUNK: Final[Schema] = {"stop_reason": _STOP_REASON, **_ASKED_FOR}


def _logprob(**more: Schema) -> Schema:
    return _answer({"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_whole(0, 255)), **more})


def _whole_answer(kind: str, choice: Schema) -> Schema:
    return _answer(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(choice, at_least=1),
            "usage": reference("Usage"),
        }
    )


def _chunk(kind: str, choice: Schema) -> Schema:
    return _answer(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _about(_list(choice, at_most=1), "Empty in the chunk of usage alone"),
        },
        sometimes={"usage": _or_null(reference("Usage"))},
    )


def _called(*, is_chunk: bool) -> Schema:
    """A call that the answer is; chunks after the first tell arguments alone."""
    if not is_chunk:
        function = _answer({"name": _TEXT, "arguments": _TEXT})
        return _answer({"id": _TEXT, "type": {"const": "function"}, "function": function})
    return _answer(
        {"index": _COUNT, "function": _answer({"arguments": _TEXT}, sometimes={"name": _TEXT})},
        sometimes={"id": _TEXT, "type": {"const": "function"}},
    )


_OUTPUT_LOGPROBS: Final = _list(_logprob(top_logprobs=_list(_logprob())))
_ITEM_STATUS: Final[Schema] = {"enum": list(responses.STATUSES)}
_OF_AN_ITEM: Final[Schema] = {"item_id": _TEXT, "output_index": _COUNT}
_OF_A_PART: Final[Schema] = {**_OF_AN_ITEM, "content_index": {"const": 0}}


def _event(kind: str, **values: Schema) -> Schema:
    return _answer({"type": {"const": kind}, "sequence_number": _COUNT, **values})


ANSWERS: Final[dict[str, Schema]] = {
    "Completion": _whole_answer("text_completion", reference("CompletionChoice")),
    "CompletionChoice": _answer(
        {"index": _COUNT, "text": _TEXT, "logprobs": _or_null(reference("CompletionLogprobs")), **_CLOSED},
        sometimes=_ASKED_FOR,
    ),
    "CompletionChunk": _chunk("text_completion", reference("CompletionChunkChoice")),
    "CompletionChunkChoice": _answer(
        {
            "index": _COUNT,
            "text": _TEXT,
            "logprobs": _or_null(reference("CompletionLogprobs")),
            "finish_reason": _or_null(_FINISH_REASON),
        },
        sometimes=_OF_A_CHUNK,
    ),
    "CompletionLogprobs": _answer(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_or_null(_NUMBER)),
            "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _list(_COUNT),
        }
    ),
    "Chat": _whole_answer("chat.completion", reference("ChatChoice")),
    "ChatChoice": _answer(
        {
            "index": _COUNT,
            "message": _answer(
                {"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": _NULL},
                sometimes={"tool_calls": _list(_called(is_chunk=False))},
            ),
            "logprobs": _or_null(reference("ChatLogprobs")),
            **_CLOSED,
        },
        sometimes=_ASKED_FOR,
    ),
    "ChatChunk": _chunk("chat.completion.chunk", reference("ChatChunkChoice")),
    "ChatChunkChoice": _answer(
        {
            "index": _COUNT,
            "delta": _answer(
                {},
                sometimes={
                    "role": {"const": "assistant"},
                    "content": _or_null(_TEXT),
                    "tool_calls": _list(_called(is_chunk=True)),
                },
            ),
            "logprobs": _or_null(reference("ChatLogprobs")),
            "finish_reason": _or_null(_FINISH_REASON),
        },
        sometimes=_OF_A_CHUNK,
    ),
    "ChatLogprobs": _answer({"content": _list(_logprob(top_logprobs=_list(_logprob()))), "refusal": _NULL}),
    "PromptTokenLogprob": _answer({"logprob": _NUMBER, "rank": _whole(1), "decoded_token": _TEXT}),
    "Response": _answer(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "completed_at": _or_null(_COUNT),
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "incomplete_details": _or_null(_answer({"reason": {"const": "max_output_tokens"}})),
            "error": _or_null(
                _answer({"code": {"enum": ["server_error", "rate_limit_exceeded"]}, "message": _TEXT})
            ),
            "model": _TEXT,
            "output": _list(_any_of(reference("OutputMessage"), reference("OutputCall"))),
            "usage": _or_null(reference("ResponseUsage")),
            "instructions": _or_null(_TEXT),
            "max_output_tokens": _or_null(_COUNT),
            "metadata": {"type": "object", "additionalProperties": _TEXT},
            "parallel_tool_calls": _FLAG,
            "presence_penalty": _NUMBER,
            "frequency_penalty": _NUMBER,
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "top_logprobs": _COUNT,
            "text": _ANY_OBJECT,
            "tools": _list(_ANY_OBJECT),
            "tool_choice": {"type": ["string", "object"]},
            **{name: _or_null(_TEXT) for name in asked.UNUSED},
            "background": {"const": False},
            "conversation": _NULL,
            "max_tool_calls": _NULL,
            "previous_response_id": _NULL,
            "prompt": _NULL,
            "reasoning": _answer({"effort": _NULL, "summary": _NULL}),
            "service_tier": {"const": "default"},
            "store": {"const": False},
            "truncation": {"const": "disabled"},
        }
    ),
    "OutputMessage": _answer(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "content": _list(reference("OutputText"), at_most=1),
            "status": _ITEM_STATUS,
        }
    ),
    "OutputText": _answer(
        {
            "type": {"const": "output_text"},
            "text": _TEXT,
            "annotations": {"const": []},
            "logprobs": _OUTPUT_LOGPROBS,
        }
    ),
    "OutputCall": _answer(
        {
            "id": _TEXT,
            "type": {"const": "function_call"},
            "call_id": _TEXT,
            "name": _TEXT,
            "arguments": _TEXT,
            "status": _ITEM_STATUS,
        }
    ),
    "ResponseUsage": _answer(
        {
            "input_tokens": _COUNT,
            "input_tokens_details": _answer({"cached_tokens": _COUNT, "cache_write_tokens": {"const": 0}}),
            "output_tokens": _COUNT,
            "output_tokens_details": _answer({"reasoning_tokens": {"const": 0}}),
            "total_tokens": _COUNT,
        }
    ),
    "ResponseEvent": _any_of(
        *(
            _event(f"response.{status}", response=reference("Response"))
            for status in ("created", "in_progress", "completed", "incomplete", "failed")
        ),
        *(
            _event(
                f"response.output_item.{step}",
                output_index=_COUNT,
                item=_any_of(reference("OutputMessage"), reference("OutputCall")),
            )
            for step in ("added", "done")
        ),
        *(
            _event(f"response.content_part.{step}", **_OF_A_PART, part=reference("OutputText"))
            for step in ("added", "done")
        ),
        _event("response.output_text.delta", **_OF_A_PART, delta=_TEXT, logprobs=_OUTPUT_LOGPROBS),
        _event("response.output_text.done", **_OF_A_PART, text=_TEXT, logprobs=_OUTPUT_LOGPROBS),
        _event("response.function_call_arguments.delta", **_OF_AN_ITEM, delta=_TEXT),
        _event("response.function_call_arguments.done", **_OF_AN_ITEM, arguments=_TEXT),
    ),
    "Usage": _answer(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _answer({"cached_tokens": _COUNT}),
        }
    ),
    "Tokens": _answer({"tokens": _list(_TOKEN_ID), "count": _COUNT, "max_model_len": _COUNT}),
    "Text": _answer({"prompt": _TEXT}),
    "Model": _answer(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "max_model_len": _COUNT,
        }
    ),
    "Models": _answer({"object": {"const": "list"}, "data": _list(reference("Model"))}),
    "Ready": _answer({"status": {"const": "ok"}}),
    "Error": _answer(
        {"error": _answer({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _TEXT})}
    ),
}

SCHEMAS: Final[dict[str, Schema]] = BODIES | PARTS | ANSWERS
