"""The answer of /v1/responses as JSON: a whole response, or the events of a stream; both say the same.

An answer is a list of items: messages, and calls of functions. The whole is what its events come to: it is
made by the same code. Unlike a chat's stream, this one ends by telling everything again, so what has been
told is kept. Pure: a log and news come in, JSON values go out.
"""

from collections import abc
from dataclasses import dataclass, field
from typing import Any, Final

from router.call import INLINE_NUMBERS, Ended, Grown, News, num_numbers
from router.http.encoding import Written, encoded, event
from router.http.errors import ErrorAnswer
from router.http.responses import AskedResponse
from router.http.shapes import ChatShape, Json, Vocabulary
from router.request_log import Delta, FinishReason, RequestLog
from router.tool_calls import Called, ToolCallParser
from rpc.errors import invalid

ID_PREFIX: Final = "resp_"
# Log-probabilities that a stream keeps: its last events say all of them four times.
MAX_KEPT_NUMBERS: Final = 131_072
_INLINE_CHARACTERS: Final = 16 * 1024
_TOO_MANY_REQUESTS: Final = 429

# What is the same in all responses.
_FIXED: Final[Json] = {
    "background": False,
    "conversation": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}


@dataclass(slots=True)
class _Item:
    """An item that grows. `head` is what does not change of it."""

    head: Json
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def is_message(self) -> bool:
        return bool(self.head["type"] == "message")

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> Json:
        """All that a message has."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs[:]}

    def told(self, status: str) -> Json:
        """The item as JSON; a message that has just begun has no part yet."""
        if not self.is_message:
            return {**self.head, "arguments": self.text, "status": status}
        return {**self.head, "content": [self.part()] if status != "in_progress" else [], "status": status}


class ResponseAnswer:
    """The answer of one call.

    `function` is the one whose arguments the answer is; `parser` finds calls in its text; with neither it is
    a message. `call_id` and `item_id` name calls and items, the latter behind a prefix. `created_at`, and
    what `clock` tells, are seconds since 1970.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        response_id: str,
        created_at: int,
        clock: abc.Callable[[], float],
        model: str,
        asked: AskedResponse,
        log: RequestLog,
        function: str | None,
        parser: ToolCallParser | None,
        call_id: abc.Callable[[], str],
        item_id: abc.Callable[[str], str],
    ) -> None:
        (self._choice,) = log.choices
        self._log = log
        self._clock = clock
        self._chat = ChatShape(vocabulary)
        self._function = function
        self._parser = parser
        self._call_id = call_id
        self._item_id = item_id
        sampling = self._choice.sampling
        self._has_logprobs = sampling.logprobs is not None
        self._head: Json = {
            "id": ID_PREFIX + response_id,
            "object": "response",
            "created_at": created_at,
            "model": model,
            **_FIXED,
            **{name: Written(text) for name, text in asked.repeated.items()},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        self._output: list[Json] = []
        self._open: _Item | None = None
        self._num_events = 0
        self._num_characters = 0
        self._num_kept = 0

    # --- for the door -------------------------------------------------------------------------------

    def body(self, *, is_long: bool) -> bytes:  # noqa: ARG002 - what is repeated is there in any case
        """The whole answer, once it has ended; it takes what the log has for the client."""
        return encoded(self.whole(), is_long=True)

    def opening(self) -> bytes:
        """What a stream begins with, before any token."""
        return _events(self.first_events(), is_long=False)

    def events(self, news: abc.Sequence[News], *, is_long: bool) -> bytes:
        """What a stream goes on with."""
        return _events(self.later_events(news, max_numbers=MAX_KEPT_NUMBERS), is_long=is_long)

    def closing(self) -> bytes:
        """What a stream ends with: it has said so already."""
        return b""

    def failure(self, told: ErrorAnswer) -> bytes:
        """What a stream that has begun ends with when it fails."""
        return _events([self.failed(told)], is_long=False)

    def is_long(self, news: abc.Iterable[News]) -> bool:
        """Whether it takes long to put the news into words."""
        news = tuple(news)
        is_end = any(isinstance(item, Ended) for item in news)
        return sum(map(num_numbers, news)) + self._num_kept * is_end > INLINE_NUMBERS or (
            is_end and self._num_characters > _INLINE_CHARACTERS
        )

    # --- as JSON ------------------------------------------------------------------------------------

    def whole(self) -> Json:
        """The response, as the last event of a stream has it."""
        delta = self._choice.take_delta()
        grown = [] if delta is None else [Grown(self._log, delta)]
        self.first_events()
        last: Json = self.later_events([*grown, Ended(self._log, self._choice)])[-1]["response"]
        return last

    def first_events(self) -> list[Json]:
        """That the response has begun; and the call, where that is all it can be."""
        told = [
            self._event(kind, response=self._response("in_progress"))
            for kind in ("response.created", "response.in_progress")
        ]
        if self._function is not None:
            told.append(self._opened(self._call(self._function)))
        return told

    def later_events(self, news: abc.Iterable[News], *, max_numbers: int | None = None) -> list[Json]:
        """What has happened. Raises RequestError when more than so many log-probabilities are to be kept."""
        told: list[Json] = []
        for item in news:
            match item:
                case Grown(_, delta):
                    self._num_kept += num_numbers(item)
                    if max_numbers is not None and self._num_kept > max_numbers:
                        raise invalid(
                            "sampling.logprobs",
                            f"sampling.logprobs asks for more than the {max_numbers} numbers that a streamed "
                            "response may have: output tokens x (1 + alternatives); ask for fewer",
                        )
                    told += self._grown(delta)
                case Ended():
                    told += self._ended()
        return told

    def failed(self, told: ErrorAnswer) -> Json:
        """The last event of a stream that cannot go on; what there is of the answer is in it."""
        output = list(self._output)
        if self._open is not None:
            self._open.logprobs.clear()
            output.append(self._open.told("incomplete"))
        code = "rate_limit_exceeded" if told.status == _TOO_MANY_REQUESTS else "server_error"
        error = {"code": code, "message": told.body["error"]["message"]}
        return self._event("response.failed", response=self._response("failed", output=output, error=error))

    # --- what is told of items ----------------------------------------------------------------------

    def _grown(self, delta: Delta) -> abc.Iterator[Json]:
        self._num_characters += len(delta.text)
        if self._function is not None:
            if delta.text:
                yield self._more(delta.text)
        elif self._parser is not None:
            yield from self._parted(self._parser.push(delta.text))
        elif delta.text or (self._has_logprobs and delta.logprobs):
            yield from self._said(delta.text, delta)

    def _ended(self) -> abc.Iterator[Json]:
        """The rest of the answer. One that says nothing is an empty message."""
        if self._parser is not None:
            yield from self._parted(self._parser.finish())
        if self._open is None and not self._output:
            yield from self._begun_message()
        assert self._choice.end is not None, "the choice has ended"
        is_whole = self._choice.end.reason is not FinishReason.LENGTH
        status = "completed" if is_whole else "incomplete"
        yield from self._closed(status)
        reason = None if is_whole else {"reason": "max_output_tokens"}
        response = self._response(
            status,
            output=self._output,
            incomplete_details=reason,
            completed_at=int(self._clock()) if is_whole else None,
            usage=self._usage(),
        )
        yield self._event(f"response.{status}", response=response)

    def _parted(self, parts: abc.Iterable[str | Called]) -> abc.Iterator[Json]:
        for part in parts:
            if isinstance(part, str):
                yield from self._said(part)
                continue
            yield from self._closed("completed")
            yield self._opened(self._call(part.name))
            yield self._more(part.arguments)
            yield from self._closed("completed")

    def _said(self, text: str, delta: Delta | None = None) -> abc.Iterator[Json]:
        if self._open is None:
            yield from self._begun_message()
        yield self._more(text, delta)

    def _begun_message(self) -> abc.Iterator[Json]:
        item = _Item({"id": self._item_id("msg_"), "type": "message", "role": "assistant"})
        yield self._opened(item)
        yield self._of_item("response.content_part.added", item, content_index=0, part=item.part())

    def _opened(self, item: _Item) -> Json:
        self._open = item
        return self._of_output("response.output_item.added", item.told("in_progress"))

    def _more(self, text: str, delta: Delta | None = None) -> Json:
        """More of the item that is open."""
        item = self._open
        assert item is not None, "an item is opened before it grows"
        item.pieces.append(text)
        if not item.is_message:
            return self._of_item("response.function_call_arguments.delta", item, delta=text)
        logprobs: list[Json] = []
        if self._has_logprobs:
            logprobs = self._chat.logprobs(self._choice, delta)["content"]
            item.logprobs += logprobs
        return self._of_item(
            "response.output_text.delta", item, content_index=0, delta=text, logprobs=logprobs
        )

    def _closed(self, status: str) -> abc.Iterator[Json]:
        """The item that is open, if one is, told again and whole."""
        item = self._open
        if item is None:
            return
        if item.is_message:
            part = item.part()
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("response.output_text.done", item, content_index=0, **text)
            yield self._of_item("response.content_part.done", item, content_index=0, part=part)
        else:
            yield self._of_item("response.function_call_arguments.done", item, arguments=item.text)
        told = item.told(status)
        yield self._of_output("response.output_item.done", told)
        self._output.append(told)
        self._open = None

    def _call(self, name: str) -> _Item:
        head = {"id": self._item_id("fc_"), "type": "function_call", "call_id": self._call_id(), "name": name}
        return _Item(head)

    # --- words --------------------------------------------------------------------------------------

    def _event(self, kind: str, **values: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}

    def _of_output(self, kind: str, item: Json) -> Json:
        return self._event(kind, output_index=len(self._output), item=item)

    def _of_item(self, kind: str, item: _Item, **values: Any) -> Json:
        return self._event(kind, item_id=item.head["id"], output_index=len(self._output), **values)

    def _response(self, status: str, **values: Any) -> Json:
        nothing = ("completed_at", "error", "incomplete_details", "usage")
        return {**self._head, "status": status, "output": [], **dict.fromkeys(nothing), **values}

    def _usage(self) -> Json:
        num_input, num_output = len(self._log.prompt_token_ids), len(self._choice.output_token_ids)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": self._log.num_cached_tokens or 0,
                "cache_write_tokens": 0,  # what is kept costs nothing
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }


def _events(values: abc.Iterable[Json], *, is_long: bool) -> bytes:
    """A response within a value has what is repeated of the body, and so comes in pieces."""
    return b"".join(
        event(value, kind=value["type"], is_long=is_long or "response" in value) for value in values
    )
