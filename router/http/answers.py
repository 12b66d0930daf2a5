"""One call's answer as JSON: whole, or as the chunks of a stream; both say the same.

The index of a choice is the position of its prompt x n + its number. Usage counts each prompt once, and all
output tokens. Pure: logs and news come in, JSON values go out.
"""

from collections import abc
from typing import Protocol

from router.call import INLINE_NUMBERS, Ended, Grown, News, PromptSeen, num_numbers
from router.http.asked import Asked
from router.http.encoding import encoded, event
from router.http.errors import ErrorAnswer
from router.http.shapes import Json, Shape
from router.request_log import ChoiceLog, Delta, FinishReason, RequestLog


class AnyAnswer(Protocol):
    """What the door needs of an answer, in whatever shape."""

    def body(self, *, is_long: bool) -> bytes:
        """The whole answer, once it has ended; it takes what the logs have for the client."""

    def opening(self) -> bytes:
        """What a stream begins with, before any token."""

    def events(self, news: abc.Sequence[News], *, is_long: bool) -> bytes:
        """What a stream goes on with."""

    def closing(self) -> bytes:
        """What a stream ends with, when all has been told."""

    def failure(self, told: ErrorAnswer) -> bytes:
        """What a stream that has begun ends with when it fails."""

    def is_long(self, news: abc.Sequence[News]) -> bool:
        """Whether it takes long to put the news into words."""


class Answer:
    """The answer of one call, by its choices. `created` is seconds since 1970."""

    def __init__(
        self,
        shape: Shape,
        *,
        call_id: str,
        created: int,
        model: str,
        asked: Asked,
        logs: abc.Sequence[RequestLog],
    ) -> None:
        self._shape = shape
        self._head: Json = {"id": shape.id_prefix + call_id, "created": created, "model": model}
        self._asked = asked
        self._position = {log: position for position, log in enumerate(logs)}

    # --- for the door -------------------------------------------------------------------------------

    def body(self, *, is_long: bool) -> bytes:
        """All of it."""
        return encoded(self.whole(), is_long=is_long)

    def opening(self) -> bytes:
        """The first chunks."""
        return b"".join(map(event, self.first_chunks()))

    def events(self, news: abc.Sequence[News], *, is_long: bool) -> bytes:
        """Further chunks."""
        return b"".join(event(chunk, is_long=is_long) for chunk in self.chunks(news))

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the word that OpenAI has for the end."""
        usage = event(self.usage_chunk()) if self._asked.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failure(self, told: ErrorAnswer) -> bytes:
        """The error, and no word of an end."""
        return event(told.body)

    def is_long(self, news: abc.Sequence[News]) -> bool:
        """Whether there are many log-probabilities."""
        return sum(map(num_numbers, news)) > INLINE_NUMBERS

    # --- as JSON ------------------------------------------------------------------------------------

    def whole(self) -> Json:
        """Everything, once every choice has ended; it takes what the logs have for the client."""
        choices = []
        for log, position in self._position.items():
            for choice in log.choices:
                delta = choice.take_delta()
                content = self._shape.whole(position, choice, delta.text if delta is not None else "")
                prompt = self._prompt(log, choice)
                choices.append(
                    self._choice(log, choice, content)
                    | prompt
                    | _behind(prompt, self._logprobs(choice, delta))
                    | self._token_ids(delta)
                    | self._closing(choice)
                )
        return self._head | {
            "object": self._shape.whole_object,
            "choices": choices,
            "usage": self._usage(),
        }

    def first_chunks(self) -> list[Json]:
        """What a stream begins with, before any token."""
        return (
            [] if self._tells_prompts else [chunk for log in self._position for chunk in self._openings(log)]
        )

    def chunks(self, news: abc.Iterable[News]) -> list[Json]:
        """What a stream goes on with. Ids that complete no character bring none, unless ids were asked."""
        chunks = []
        for item in news:
            match item:
                case PromptSeen(log):
                    chunks += self._openings(log) if self._tells_prompts else []
                    continue
                case Grown(log, delta) if delta.text or delta.logprobs or self._asked.return_token_ids:
                    choice = log.choices[delta.index]
                    piece = self._shape.piece(choice, delta.text)
                    if piece is None and not (delta.logprobs or self._asked.return_token_ids):
                        continue
                    shown = self._choice(log, choice, self._shape.nothing if piece is None else piece)
                    shown |= self._logprobs(choice, delta) | self._token_ids(delta)
                case Ended(log, choice):
                    shown = self._choice(log, choice, self._shape.ending(choice)) | self._closing(choice)
                case _:
                    continue
            chunks.append(self._chunk(shown))
        return chunks

    def usage_chunk(self) -> Json:
        """The last chunk of a stream whose client asked for usage."""
        return self._head | {"object": self._shape.chunk_object, "choices": [], "usage": self._usage()}

    @property
    def _tells_prompts(self) -> bool:
        """Whether there is something about the prompts that only the model can tell."""
        return self._asked.prompt_logprobs or self._asked.echo_logprobs is not None

    def _openings(self, log: RequestLog) -> list[Json]:
        """The first chunk of each choice, where there is something before its text."""
        chunks = []
        for choice in log.choices:
            opening, prompt = self._shape.opening(self._position[log]), self._prompt(log, choice)
            if opening is not None or prompt:
                shown = self._choice(log, choice, self._shape.nothing if opening is None else opening)
                chunks.append(self._chunk(shown | prompt))
        return chunks

    def _prompt(self, log: RequestLog, choice: ChoiceLog) -> Json:
        """What is told of the prompt: the likelihoods of an echo, and once for each prompt the list."""
        told: Json = {}
        if self._asked.echo_logprobs is not None:
            told["logprobs"] = self._shape.echo_logprobs(self._position[log], log, self._asked.echo_logprobs)
        if self._asked.prompt_logprobs and choice.index == 0:
            told["prompt_logprobs"] = self._shape.prompt_logprobs(log)
        return told

    def _chunk(self, choice: Json) -> Json:
        chunk = self._head | {"object": self._shape.chunk_object, "choices": [choice]}
        if not self._asked.include_usage:
            return chunk
        return chunk | {"usage": self._usage() if self._asked.continuous_usage else None}

    def _choice(self, log: RequestLog, choice: ChoiceLog, content: Json) -> Json:
        index = self._position[log] * self._asked.num_choices_each + choice.index
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: ChoiceLog, delta: Delta | None) -> Json:
        asked_for = choice.sampling.logprobs is not None
        return {"logprobs": self._shape.logprobs(choice, delta)} if asked_for else {}

    def _closing(self, choice: ChoiceLog) -> Json:
        """How a choice ended; `stop_reason` is the client's own stop that ended it, null when none did."""
        assert choice.end is not None, "the choice has ended"
        stop_reason: str | int | None = choice.end.matched_stop
        if stop_reason is None and choice.end.matched_token_id in choice.sampling.stop_token_ids:
            stop_reason = choice.end.matched_token_id
        finish_reason = (
            "length" if choice.end.reason is FinishReason.LENGTH else self._shape.stop_word(choice)
        )
        return {"finish_reason": finish_reason, "stop_reason": stop_reason}

    def _token_ids(self, delta: Delta | None) -> Json:
        if not self._asked.return_token_ids:
            return {}
        return {"token_ids": delta.token_ids if delta is not None else ()}

    def _usage(self) -> Json:
        num_prompt_tokens = sum(len(log.prompt_token_ids) for log in self._position)
        num_output_tokens = sum(
            len(choice.output_token_ids) for log in self._position for choice in log.choices
        )
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(log.num_cached_tokens or 0 for log in self._position)
            },
        }


def _behind(prompt: Json, own: Json) -> Json:
    """A choice's own lists of likelihoods behind those of its echo, where there is one."""
    echoed = prompt.get("logprobs")
    if echoed is None:
        return own
    return {"logprobs": {name: [*echoed[name], *values] for name, values in own["logprobs"].items()}}
