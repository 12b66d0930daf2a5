"""Where a choice's text and logprobs stand: in a completion, and in a chat. The rest is `answers`.

Pure.
"""

from collections import abc
from typing import Any, ClassVar, Protocol

from router.detokenizer import Detokenizer
from router.request_log import ChoiceLog, Delta

Json = dict[str, Any]


class Vocabulary(Protocol):
    """What logprobs need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for within a text."""

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one sequence."""


class Shape(Protocol):
    """One of OpenAI's two shapes. `position` is that of the choice's prompt in the call."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, position: int, text: str) -> Json:
        """All of a choice's text."""

    def opening(self, position: int) -> Json | None:
        """What the first chunk of a choice has, if there is one before its text."""

    def piece(self, text: str) -> Json:
        """More of a choice's text."""

    def ending(self) -> Json:
        """What the last chunk of a choice has."""

    @property
    def stop_word(self) -> str:
        """The finish reason of a choice that came to its end by itself."""

    def logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:
        """How likely the tokens of a delta were, one entry for each."""


class CompletionShape:
    """/v1/completions. `echoes` has the text of each prompt, when it is to stand before its answers."""

    stop_word: str = "stop"
    id_prefix: ClassVar = "cmpl-"
    whole_object: ClassVar = "text_completion"
    chunk_object: ClassVar = "text_completion"

    def __init__(self, vocabulary: Vocabulary, echoes: abc.Sequence[str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._offsets: dict[ChoiceLog, _Offset] = {}

    def whole(self, position: int, text: str) -> Json:
        """A text."""
        return {"text": text if self._echoes is None else self._echoes[position] + text}

    def opening(self, position: int) -> Json | None:
        """The echo, if there is one."""
        return None if self._echoes is None else {"text": self._echoes[position]}

    def piece(self, text: str) -> Json:
        """A text."""
        return {"text": text}

    def ending(self) -> Json:
        """No more text."""
        return {"text": ""}

    def logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:
        """Four lists, of one entry for each token."""
        entries = delta.logprobs if delta is not None else ()
        offset = self._offsets.setdefault(choice, _Offset(self._vocabulary.detokenizer()))
        return {
            "tokens": [self._shown(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                dict(zip(map(self._shown, entry.top_token_ids), entry.top_logprobs, strict=True))
                for entry in entries
            ],
            "text_offset": [offset.before(entry.token_id) for entry in entries],
        }

    def _shown(self, token_id: int) -> str:
        return token_text(token_id, self._vocabulary.token_bytes(token_id))


class ChatShape:
    """/v1/chat/completions."""

    stop_word: str = "stop"
    id_prefix: ClassVar = "chatcmpl-"
    whole_object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, position: int, text: str) -> Json:  # noqa: ARG002 - a chat has one prompt
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self, position: int) -> Json | None:  # noqa: ARG002 - likewise
        """Who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Json:
        """More content."""
        return {"delta": {"content": text}}

    def ending(self) -> Json:
        """Nothing more."""
        return {"delta": {}}

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

    def _entry(self, token_id: int, logprob: float) -> Json:
        token = self._vocabulary.token_bytes(token_id)
        return {"token": token_text(token_id, token), "logprob": logprob, "bytes": list(token)}


class CallShape(ChatShape):
    """/v1/chat/completions whose answer is the arguments of one function.

    What it says is the schema's doing, and not parsed. `call_id` is the name of the call in each choice.
    """

    def __init__(self, vocabulary: Vocabulary, *, function: str, call_id: str, stop_word: str) -> None:
        super().__init__(vocabulary)
        self._function = function
        self._call_id = call_id
        self.stop_word = stop_word

    def whole(self, position: int, text: str) -> Json:  # noqa: ARG002 - a chat has one prompt
        """A message that calls."""
        call = {"id": self._call_id, "type": "function", "function": self._called(text)}
        return {"message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}}

    def opening(self, position: int) -> Json | None:  # noqa: ARG002 - likewise
        """Who speaks, and what is called."""
        call = {"index": 0, "id": self._call_id, "type": "function", "function": self._called("")}
        return {"delta": {"role": "assistant", "content": None, "tool_calls": [call]}}

    def piece(self, text: str) -> Json:
        """More of the arguments."""
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}

    def _called(self, arguments: str) -> Json:
        return {"name": self._function, "arguments": arguments}


class _Offset:
    """Characters of a choice's text that were complete before a token."""

    __slots__ = ("_detokenizer", "_num_characters")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_characters = 0

    def before(self, token_id: int) -> int:
        """To be asked for each token in order."""
        before = self._num_characters
        self._num_characters += len(self._detokenizer.push((token_id,)))
        return before


def token_text(token_id: int, token: bytes) -> str:
    """A token as text. One that is only part of a character shows its bytes, as OpenAI shows them."""
    if not token:
        return f"token:{token_id}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
