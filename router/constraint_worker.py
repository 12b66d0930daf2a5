"""Tries constraints out in a process that may be killed: `python -m router.constraint_worker`.

A line of JSON in, `[kind, value]`; a line of JSON out, what is wrong with it as the rest of a sentence, or
null. The library is the executor's, with the same limits, on a vocabulary of single bytes: what it builds
must build, and stay within the limits for a while of going on at random. The process ends when its input
does. Its memory is limited, and what it computes: a trial that exceeds that ends the process.
"""

import contextlib
import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import llguidance

from router import schema_faults

LIMITS: Final = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
"""As `executor.constraints` has them."""
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Likewise."""
MAX_MEMORY_BYTES: Final = 1 << 30
MAX_CPU_SECONDS: Final = 0.25
"""For the whole trial, and so for any step of it: a step of the executor waits for its masks."""
MAX_LOOKING_SECONDS: Final = 0.25
"""For finding out which part of a schema is at fault."""
MAX_BUILD_SECONDS: Final = 1
"""Of the processor, for what the library does in one call, or one more: the system counts whole ones."""
_MAX_STEPS: Final = 48
_END: Final = 256


class _Bytes:
    """A vocabulary of the single bytes and an end token."""

    bos_token_id = None
    eos_token_id = _END
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def grammar(kind: str, value: Any) -> str:
    """A constraint whose form has been checked, in the library's own terms, as the executor puts it."""
    match kind:
        case "json_schema":
            return json.dumps({"grammars": [{"json_schema": _schema(value)}]})
        case "json_or_tagged":
            return llguidance.LLMatcher.grammar_from_lark(_either(**value))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(value)
        case _:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")


def _schema(text: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(text) or {"type": "object"}
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _either(
    json_schema: str,
    tags: list[tuple[str, str, str]],
    opening: str,
    separator: str,
    closing: str,
    max_tags: int | None,
) -> str:
    """As `executor.constraints` puts it, where there are no special tokens."""
    most = "*" if max_tags is None else f"{{0,{max_tags - 1}}}"
    more = "" if max_tags == 1 else f"({_literal(separator)} tagged){most}"
    tagged = [f"{_literal(begin)} json_{i} {_literal(end)}" for i, (begin, _, end) in enumerate(tags)]
    return "\n".join(
        [
            f"start: json | {_literal(opening)} tagged {more} {_literal(closing)}",
            f"tagged: {' | '.join(tagged)}",
            f"json: %json {json.dumps(_schema(json_schema))}",
            *(f"json_{i}: %json {json.dumps(_schema(text))}" for i, (_, text, _) in enumerate(tags)),
        ]
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def fault(kind: str, value: Any, tokenizer: llguidance.LLTokenizer) -> tuple[str, str] | None:
    """Why an output cannot be held to the constraint; None when it can.

    First which part of the value it is, as the rest of a name, then why, as the rest of a sentence.
    """
    matcher = _built(grammar(kind, value), tokenizer)
    if matcher.is_error() and kind == "json_schema":
        return "", _schema_fault(value, tokenizer) or _in_one_line(matcher.get_error())
    if matcher.is_error() and kind == "json_or_tagged":
        schemas = {f".tags[{i}].json_schema": text for i, (_, text, _) in enumerate(value["tags"])}
        for part, text in ({".json_schema": value["json_schema"]} | schemas).items():
            if (why := _schema_fault(text, tokenizer)) is not None:
                return part, why
    why = _fault_of(matcher)
    return None if why is None else ("", why)


def _built(written: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # of one type each
    return llguidance.LLMatcher(tokenizer, written, log_level=0, limits=limits)


def _schema_fault(text: str, tokenizer: llguidance.LLTokenizer) -> str | None:
    """Why no grammar can be built of the schema; None when one can."""
    until = time.process_time() + MAX_LOOKING_SECONDS

    def refusal(schema: dict[str, Any]) -> str | None:
        matcher = _built(grammar("json_schema", json.dumps(schema)), tokenizer)
        return _in_one_line(matcher.get_error()) if matcher.is_error() else None

    schema = json.loads(text)
    reason = refusal(schema)
    if reason is None:
        return None
    return schema_faults.told(schema, reason, refusal, is_late=lambda: time.process_time() > until)[:500]


def _fault_of(matcher: llguidance.LLMatcher) -> str | None:
    began = time.process_time()
    choose = random.Random(0)  # noqa: S311 - the same trial each time
    for _ in range(_MAX_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(_END) if mask[token // 8] >> token % 8 & 1]
        if time.process_time() - began > MAX_CPU_SECONDS:
            return "it takes too long to work out what may come next; make it simpler"
        if not allowed:
            break
        matcher.consume_token(choose.choice(allowed))
    if matcher.is_error():
        return _in_one_line(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return "nothing can match it"
    return None


def _in_one_line(error: str) -> str:
    """The library's reason without its drawing of where; the last line of a parser's says what is wrong."""
    lines = [line.strip() for line in error.splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = said[0] if said else lines[0] if lines else ""
    return reason[:300] if " " in reason else "nothing can match it"  # a bare name is that of an inner state


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Has the system end the process, by a signal of its own (SIGXCPU), when this computes too long."""
    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time()) + MAX_BUILD_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (until, hardest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hardest, hardest))


def main() -> None:
    """Answers until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = llguidance.TokenizerWrapper(_Bytes())
    tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=_END + 1, eos_token=_END)
    sys.stdout.write("ready\n")  # as `worker_processes` waits for it
    sys.stdout.flush()
    for line in sys.stdin:
        kind, value = json.loads(line)
        with _bounded():
            answer = fault(kind, value, tokenizer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
