"""Reads long bodies, in a process of its own: `python -m router.http.reading_worker`.

Input: a line of JSON, [kind, bytes of the body, most tokens of a prompt], then the body. Output: pickled
frames, each with its length in eight bytes before it: first what is asked, without the prompts, and how many
prompts there are; then each prompt, its ids as an array; or else a refusal. The process ends when its input
does. It limits its own memory; its time is limited by whoever started it (`reading`).
"""

import json
import pickle
import resource
import sys
from array import array
from collections import abc
from dataclasses import replace
from typing import Any, Final

from router import validation
from router.http import asked, responses
from router.http.asked import Asked, Detokenizing
from router.http.fields import Fields, parsed
from router.validation import Limits
from router.worker_processes import READY
from rpc.errors import RequestError, invalid

MAX_MEMORY_BYTES: Final = 2 << 30
LENGTH_BYTES: Final = 8

READERS: Final[dict[str, abc.Callable[[Fields], Any]]] = {
    "completion": asked.completion,
    "chat": asked.chat,
    "response": responses.response,
    "tokenizing": asked.tokenizing,
    "detokenizing": asked.detokenizing,
}


def read(kind: str, body: bytes) -> Any:
    """What `asked` makes of a body of this kind. Raises RequestError."""
    try:
        return READERS[kind](parsed(body))
    except RecursionError as error:  # of whatever looks into it
        raise invalid("", "the body is nested too deeply") from error


def answer(kind: str, body: bytes, max_total_tokens: int) -> list[Any]:
    """The values of the frames."""
    try:
        value = read(kind, body)
        prompts = _parts(value, Limits(max_total_tokens=max_total_tokens, vocab_size=0))
    except RequestError as error:
        return [("refused", error)]
    except MemoryError:
        return [("refused", invalid("", "the body takes too much memory to read; send less"))]
    if isinstance(value, Asked):
        value = replace(value, requests=tuple(replace(one, prompt=None) for one in value.requests))
    if isinstance(value, Detokenizing):
        value = replace(value, token_ids=())
    return [("read", value, len(prompts)), *prompts]


def _parts(value: Any, limits: Limits) -> list[Any]:
    """What is long in it. Raises RequestError for ids of which there are too many anyway."""
    match value:
        case Asked(requests=requests):
            return [_compact(request.prompt, limits) for request in requests]
        case Detokenizing(token_ids=token_ids):
            validation.check_num_token_ids("token_ids", len(token_ids))
            return [array("q", token_ids)]
    return []


def _compact(prompt: Any, limits: Limits) -> Any:
    if not isinstance(prompt, tuple):
        return prompt
    validation.check_prompt_length("token_ids", len(prompt), limits)
    return array("q", prompt)


def main() -> None:
    """Answers until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.stdout.buffer.write(f"{READY}\n".encode())
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        kind, num_bytes, max_total_tokens = json.loads(line)
        for value in answer(kind, sys.stdin.buffer.read(num_bytes), max_total_tokens):
            frame = pickle.dumps(value, protocol=5)
            sys.stdout.buffer.write(len(frame).to_bytes(LENGTH_BYTES))
            sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
