"""One call's answer as JSON: whole, or as the chunks of a stream; both tell the same story.

The index of a choice is the position of its prompt x n + its number. Usage counts each prompt once and all
output tokens. Pure: logs and news come in, JSON values go out.
"""

from collections import abc

from router.call import Ended, Grown, News
from router.http.asked import Asked
from router.http.shapes import Json, Shape
from router.request_log import ChoiceLog, Delta, FinishReason, RequestLog


class Answer:
    """The answer of one call. `created` is seconds since 1970."""

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

    def whole(self) -> Json:
        """Everything, once every choice has ended; it takes what the logs have for the client."""
        choices = []
        for log, position in self._position.items():
            for choice in log.choices:
                delta = choice.take_delta()
                content = self._shape.whole(position, delta.text if delta is not None else "")
                choices.append(
                    self._choice(log, choice, content)
                    | self._logprobs(choice, delta)
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
        return [
            self._chunk(self._choice(log, choice, opening))
            for log, position in self._position.items()
            for choice in log.choices
            if (opening := self._shape.opening(position)) is not None
        ]

    def chunks(self, news: abc.Iterable[News]) -> list[Json]:
        """What a stream goes on with. Ids that complete no character bring none, unless ids were asked."""
        chunks = []
        for item in news:
            match item:
                case Grown(log, delta) if delta.text or delta.logprobs or self._asked.return_token_ids:
                    choice = log.choices[delta.index]
                    shown = self._choice(log, choice, self._shape.piece(delta.text))
                    shown |= self._logprobs(choice, delta) | self._token_ids(delta)
                case Ended(log, choice):
                    shown = self._choice(log, choice, self._shape.ending()) | self._closing(choice)
                case _:
                    continue
            chunks.append(self._chunk(shown))
        return chunks

    def usage_chunk(self) -> Json:
        """The last chunk of a stream whose client asked for usage."""
        return self._head | {"object": self._shape.chunk_object, "choices": [], "usage": self._usage()}

    def _chunk(self, choice: Json) -> Json:
        chunk = self._head | {"object": self._shape.chunk_object, "choices": [choice]}
        return chunk | {"usage": None} if self._asked.include_usage else chunk

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
        finish_reason = "length" if choice.end.reason is FinishReason.LENGTH else self._shape.stop_word
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
