"""Where a choice's text and logprobs are put, in a completion and in a chat. The rest is in `answers`.

Pure.
"""

from collections import abc
from typing import Any, ClassVar, Protocol

from router.detokenizer import Detokenizer
from router.request_log import ChoiceLog, Delta, RequestLog, TokenLogprobs
from router.tool_calls import Called, ToolCallParser

Json = dict[str, Any]


class Vocabulary(Protocol):
    """What logprobs need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for within a text."""

    def spelled_specials(self, text: str, token_ids: abc.Iterable[int]) -> frozenset[int]:
        """Of those ids the special tokens whose spelling stands in a text."""

    def detokenizer(self, *, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh one for one sequence, in which special tokens have no text but for those `shown`."""


class Shape(Protocol):
    """One of OpenAI's two shapes. `position` is that of the choice's prompt in the call."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    nothing: ClassVar[Json]
    """What stands in a chunk that brings no text."""

    def whole(self, position: int, choice: ChoiceLog, text: str) -> Json:
        """All of a choice's text."""

    def opening(self, position: int) -> Json | None:
        """What the first chunk of a choice has, if there is one before its text."""

    def piece(self, choice: ChoiceLog, text: str) -> Json | None:
        """More of a choice's text; None when nothing of it can be told yet."""

    def ending(self, choice: ChoiceLog) -> Json:
        """What the last chunk of a choice has."""

    def stop_word(self, choice: ChoiceLog) -> str:
        """The finish reason of a choice that came to its end by itself, all of it being told."""

    def logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:
        """How likely the tokens of a delta were, one entry for each."""

    def echo_logprobs(self, position: int, log: RequestLog, num_top: int) -> Json | None:
        """The same for the tokens of an echo; None where nothing is echoed."""

    def prompt_logprobs(self, log: RequestLog) -> list[Json | None]:
        """How likely the tokens of the prompt were, by id, with their alternatives; null for the first."""


class CompletionShape:
    """/v1/completions. `echoes` has the text of each prompt, when it is to stand before its answers."""

    id_prefix: ClassVar = "cmpl-"
    whole_object: ClassVar = "text_completion"
    chunk_object: ClassVar = "text_completion"
    nothing: ClassVar[Json] = {"text": ""}

    def __init__(self, vocabulary: Vocabulary, echoes: abc.Sequence[str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._offsets: dict[ChoiceLog, _Offset] = {}

    def whole(self, position: int, choice: ChoiceLog, text: str) -> Json:  # noqa: ARG002 - text is text
        """A text."""
        return {"text": text if self._echoes is None else self._echoes[position] + text}

    def opening(self, position: int) -> Json | None:
        """The echo, if there is one."""
        return None if self._echoes is None else {"text": self._echoes[position]}

    def piece(self, choice: ChoiceLog, text: str) -> Json | None:  # noqa: ARG002 - likewise
        """A text."""
        return {"text": text}

    def ending(self, choice: ChoiceLog) -> Json:  # noqa: ARG002 - likewise
        """No more text."""
        return self.nothing

    def stop_word(self, choice: ChoiceLog) -> str:  # noqa: ARG002 - likewise
        """It is always the same."""
        return "stop"

    def logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:
        """Four lists, of one entry for each token."""
        entries = delta.logprobs if delta is not None else ()
        offset = self._offsets.setdefault(choice, _Offset(self._vocabulary.detokenizer()))
        return {
            "tokens": [self._shown(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [offset.before(entry.token_id) for entry in entries],
        }

    def echo_logprobs(self, position: int, log: RequestLog, num_top: int) -> Json | None:
        """Four lists; the first token has no likelihood. Tokens of the answers stand behind the echo."""
        if self._echoes is None:
            return None
        echo, entries = self._echoes[position], log.prompt_logprobs
        for choice in log.choices:
            self._offsets[choice] = _Offset(self._vocabulary.detokenizer(), len(echo))
        return {
            "tokens": [self._shown(token_id) for token_id in log.prompt_token_ids],
            "token_logprobs": [None, *(entry.logprob for entry in entries)],
            "top_logprobs": [None, *(self._top(entry, num_top) for entry in entries)],
            "text_offset": self._echo_offsets(echo, log.prompt_token_ids),
        }

    def prompt_logprobs(self, log: RequestLog) -> list[Json | None]:
        """One object for each token."""
        return prompt_entries(self._vocabulary, log)

    def _echo_offsets(self, echo: str, token_ids: tuple[int, ...]) -> list[int]:
        """Special tokens stand in it where a text spelled them out; one may have been put before the text."""
        spelled, first = self._vocabulary.spelled_specials(echo, token_ids), token_ids[0]
        spelling = self._vocabulary.token_bytes(first).decode(errors="replace")
        is_put_before = first in spelled and token_ids.count(first) > echo.count(spelling)
        offset = _Offset(self._vocabulary.detokenizer(shown=spelled))
        put_before = [0] if is_put_before else []
        return put_before + [offset.before(token_id) for token_id in token_ids[len(put_before) :]]

    def _top(self, entry: TokenLogprobs, num_top: int | None = None) -> Json:
        most = zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        return {self._shown(token_id): logprob for token_id, logprob in most}

    def _shown(self, token_id: int) -> str:
        return token_text(token_id, self._vocabulary.token_bytes(token_id))


class ChatShape:
    """/v1/chat/completions."""

    id_prefix: ClassVar = "chatcmpl-"
    whole_object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"
    nothing: ClassVar[Json] = {"delta": {}}

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, position: int, choice: ChoiceLog, text: str) -> Json:  # noqa: ARG002 - a chat has one prompt
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self, position: int) -> Json | None:  # noqa: ARG002 - likewise
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, choice: ChoiceLog, text: str) -> Json | None:  # noqa: ARG002 - text is text
        """More content."""
        return {"delta": {"content": text}}

    def ending(self, choice: ChoiceLog) -> Json:  # noqa: ARG002 - likewise
        """Nothing more."""
        return self.nothing

    def stop_word(self, choice: ChoiceLog) -> str:  # noqa: ARG002 - likewise
        """It is always the same."""
        return "stop"

    def logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:  # noqa: ARG002 - nothing to go on from
        """One object for each token."""
        entries = delta.logprobs if delta is not None else ()
        return {
            "content": [
                self._entry(entry.token_id, entry.logprob)
                | {"top_logprobs": list(map(self._entry, entry.top_token_ids, entry.top_logprobs))}
                for entry in entries
            ],
            "refusal": None,
        }

    def echo_logprobs(self, position: int, log: RequestLog, num_top: int) -> Json | None:  # noqa: ARG002 - likewise
        """A chat has no echo."""
        return None

    def prompt_logprobs(self, log: RequestLog) -> list[Json | None]:
        """One object for each token."""
        return prompt_entries(self._vocabulary, log)

    def _entry(self, token_id: int, logprob: float) -> Json:
        token = self._vocabulary.token_bytes(token_id)
        return {"token": token_text(token_id, token), "logprob": logprob, "bytes": list(token)}


class CallShape(ChatShape):
    """/v1/chat/completions whose answer is the arguments of one function.

    What it says is the schema's doing, and not parsed. `call_id` names the call of a choice, each time anew.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, function: str, call_id: abc.Callable[[], str], stop_word: str
    ) -> None:
        super().__init__(vocabulary)
        self._function = function
        self._call_id = call_id
        self._stop_word = stop_word

    def whole(self, position: int, choice: ChoiceLog, text: str) -> Json:  # noqa: ARG002 - a chat has one prompt
        """A message that calls."""
        call = {"id": self._call_id(), "type": "function", "function": self._called(text)}
        return {"message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}}

    def opening(self, position: int) -> Json | None:  # noqa: ARG002 - likewise
        """Who speaks, and what is called."""
        call = {"index": 0, "id": self._call_id(), "type": "function", "function": self._called("")}
        return {"delta": {"role": "assistant", "content": None, "tool_calls": [call]}}

    def piece(self, choice: ChoiceLog, text: str) -> Json | None:  # noqa: ARG002 - text is arguments
        """More of the arguments."""
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}

    def stop_word(self, choice: ChoiceLog) -> str:  # noqa: ARG002 - the client has forced it
        """As OpenAI calls it for this choice of tools."""
        return self._stop_word

    def _called(self, arguments: str) -> Json:
        return {"name": self._function, "arguments": arguments}


class ToolsShape(ChatShape):
    """/v1/chat/completions whose answer may call tools, each choice as `parser` finds it in its text.

    A call is told whole, once all of it is there. `call_id` names one, each time anew.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        parser: abc.Callable[[], ToolCallParser],
        call_id: abc.Callable[[], str],
    ) -> None:
        super().__init__(vocabulary)
        self._new_parser = parser
        self._call_id = call_id
        self._parsers: dict[ChoiceLog, ToolCallParser] = {}
        self._told: set[ChoiceLog] = set()  # of which there was content, or a call

    def whole(self, position: int, choice: ChoiceLog, text: str) -> Json:
        """A message, with the calls that are in it."""
        parser = self._parser(choice)
        content, calls = _parted(parser.push(text) + parser.finish())
        message = super().whole(position, choice, content)
        if calls:
            message["message"] |= {"content": content or None, "tool_calls": list(map(self._named, calls))}
        return message

    def opening(self, position: int) -> Json | None:  # noqa: ARG002 - a chat has one prompt
        """Who speaks; whether there is content is not known yet."""
        return {"delta": {"role": "assistant", "content": None}}

    def piece(self, choice: ChoiceLog, text: str) -> Json | None:
        """More content, and calls."""
        parser = self._parser(choice)
        num_calls = parser.num_calls
        return self._delta(choice, num_calls, parser.push(text))

    def ending(self, choice: ChoiceLog) -> Json:
        """What was held back; where nothing has been told, that the content is empty, as the whole has it."""
        parser = self._parser(choice)
        num_calls = parser.num_calls
        delta = self._delta(choice, num_calls, parser.finish())
        if delta is not None:
            return delta
        return self.nothing if choice in self._told else {"delta": {"content": ""}}

    def stop_word(self, choice: ChoiceLog) -> str:
        """What a client looks at to see whether there is something to call."""
        return "tool_calls" if self._parser(choice).num_calls else "stop"

    def _parser(self, choice: ChoiceLog) -> ToolCallParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._new_parser()
        return self._parsers[choice]

    def _delta(self, choice: ChoiceLog, num_calls: int, parts: abc.Iterable[str | Called]) -> Json | None:
        """What is new, behind so many calls."""
        content, calls = _parted(parts)
        delta: Json = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [
                {"index": i, **self._named(call)} for i, call in enumerate(calls, num_calls)
            ]
        if not delta:
            return None
        self._told.add(choice)
        return {"delta": delta}

    def _named(self, call: Called) -> Json:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(), "type": "function", "function": function}


def _parted(parts: abc.Iterable[str | Called]) -> tuple[str, list[Called]]:
    """All content, and all calls."""
    content: list[str] = []
    calls: list[Called] = []
    for part in parts:
        if isinstance(part, Called):
            calls.append(part)
        else:
            content.append(part)
    return "".join(content), calls


class _Offset:
    """Characters of a text that were complete before a token; it begins behind `num_characters`."""

    __slots__ = ("_detokenizer", "num_characters")

    def __init__(self, detokenizer: Detokenizer, num_characters: int = 0) -> None:
        self._detokenizer = detokenizer
        self.num_characters = num_characters

    def before(self, token_id: int) -> int:
        """To be asked for each token in order."""
        before = self.num_characters
        self.num_characters += len(self._detokenizer.push((token_id,)))
        return before


def prompt_entries(vocabulary: Vocabulary, log: RequestLog) -> list[Json | None]:
    """For each token of the prompt an object of ids, its own first, as vLLM gives it; null for the first."""

    def about(token_id: int, logprob: float, rank: int) -> Json:
        text = token_text(token_id, vocabulary.token_bytes(token_id))
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    entries: list[Json | None] = [None]
    for entry in log.prompt_logprobs:
        tops = enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1)
        entries.append(
            {str(entry.token_id): about(entry.token_id, entry.logprob, entry.rank)}
            | {str(token_id): about(token_id, logprob, rank) for rank, (token_id, logprob) in tops}
        )
    return entries


def token_text(token_id: int, token: bytes) -> str:
    """A token as text. One that is only part of a character shows its bytes, as OpenAI shows them."""
    if not token:
        return f"token:{token_id}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
