"""Outputs that must match a JSON schema, a regular expression, one of several texts, or JSON between tags.

Rules:
  1. What may come next is a function of the constraint and the output ids alone. So a sequence that was
     preempted, or moved here, continues exactly as it would have done otherwise.
  2. Whatever is wrong with a constraint is a fault of its own sequence: `Matcher.fault` says what it is, and
     the other sequences are not affected.
  3. Work and memory are bounded by counts (`LIMITS`), not by a clock: the same request fails or succeeds
     wherever it runs. To exceed them is a fault too.
  4. A matcher is built in a thread beside the device's, which waits for it when the first mask is needed.

The library is llguidance. An output ends with one of the model's end tokens, which may be chosen once the
output matches and must be chosen when nothing can follow. Must not know: plans, protos, tensors.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import llguidance
import numpy as np
from numpy.typing import NDArray

LIMITS: Final = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}
"""Of the library's parser; about 100 ms to build and 10 ms a mask at the very most."""
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON. Bounded: a model must not fill its answer with line feeds."""
_MAX_KEPT: Final = 8


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The output is JSON that is valid under `text`, a JSON schema; {} is any object."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole output matches `pattern`."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The output is one of `values`."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tagged:
    """JSON that is valid under `text`, a JSON schema, between two fixed texts."""

    begin: str
    text: str
    end: str


@dataclass(frozen=True, slots=True)
class JsonOrTagged:
    """The output is JSON that is valid under `text`, a JSON schema, or one or more of `tags`.

    `opening` stands before the first of them, `separator` between two, `closing` behind the last; there are
    at most `max_tags` (None: any number).
    """

    text: str
    tags: tuple[Tagged, ...]
    opening: str = ""
    separator: str = ""
    closing: str = ""
    max_tags: int | None = None


Constraint = JsonSchema | Regex | Choice | JsonOrTagged


class ConstraintError(ValueError):
    """The constraint cannot be kept to; the text is a sentence for the client."""


def grammar(constraint: Constraint, special_ids: Mapping[str, int] = MappingProxyType({})) -> str:
    """The constraint in the library's own terms. Raises ConstraintError for what is none.

    `special_ids` are those of the special tokens, by their texts.
    """
    match constraint:
        case JsonSchema(text):
            return json.dumps({"grammars": [{"json_schema": _schema(text)}]})
        case JsonOrTagged(tags=()):
            raise ConstraintError("json_or_tagged has no tags; it has at least one")
        case JsonOrTagged():
            return llguidance.LLMatcher.grammar_from_lark(_either(constraint, special_ids))
        case Regex(pattern):
            return llguidance.LLMatcher.grammar_from_regex(pattern)
        case Choice(()):
            raise ConstraintError("choice is empty; it has at least one value")
        case Choice(values):
            texts = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
            return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConstraintError("json_schema must be a JSON object")
    return (schema or {"type": "object"}) | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _either(either: JsonOrTagged, special_ids: Mapping[str, int]) -> str:
    """In the library's dialect of Lark; `router.constraint_worker` writes it without special tokens."""

    def literal(text: str) -> str:
        return _literal(text, special_ids)

    most = "*" if either.max_tags is None else f"{{0,{either.max_tags - 1}}}"
    more = "" if either.max_tags == 1 else f"({literal(either.separator)} tagged){most}"
    tagged = [f"{literal(tag.begin)} json_{i} {literal(tag.end)}" for i, tag in enumerate(either.tags)]
    return "\n".join(
        [
            f"start: json | {literal(either.opening)} tagged {more} {literal(either.closing)}",
            f"tagged: {' | '.join(tagged)}",
            f"json: %json {json.dumps(_schema(either.text))}",
            *(f"json_{i}: %json {json.dumps(_schema(tag.text))}" for i, tag in enumerate(either.tags)),
        ]
    )


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A fixed text; where it spells a special token, that token: no other can have its text."""
    spelled = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
    pieces = re.split(f"({spelled})", text) if spelled else [text]
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


class Constraints:
    """What one model's vocabulary can be held to. `matcher` may be called from any thread."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`tokens` are in id order, at most `vocab_size`, the width of the logits; there is an end token."""
        self._vocab_size = vocab_size
        self._eos_token_ids = np.array(eos_token_ids, dtype=np.int64)
        vocabulary = _Vocabulary(tokens, special_ids, eos_token_ids)
        ends = frozenset(eos_token_ids)
        self._special_ids = {
            tokens[i].decode(errors="replace"): i for i in special_ids if tokens[i] and i not in ends
        }
        self._threads = ThreadPoolExecutor(1, "constraints")
        # It takes up to seconds, and nobody waits for it yet.
        self._tokenizer = self._threads.submit(vocabulary.indexed)
        self._limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # of one type each
        self._built: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, constraint: Constraint, output_ids: Sequence[int]) -> "Matcher":
        """What may follow `output_ids`. Returns at once."""
        building = self._threads.submit(self._build, constraint, list(output_ids))
        return Matcher(building, self._vocab_size, self._eos_token_ids)

    def _build(self, constraint: Constraint, output_ids: list[int]) -> llguidance.LLMatcher:
        """In the one thread that builds. Constraints come again: in choices, in requests of one program."""
        built = self._built.get(constraint)
        if built is None:
            built = llguidance.LLMatcher(
                self._tokenizer.result(),
                grammar(constraint, self._special_ids),
                log_level=0,
                limits=self._limits,
            )
            self._built[constraint] = built
            if len(self._built) > _MAX_KEPT:
                self._built.popitem(last=False)
        self._built.move_to_end(constraint)
        matcher = built.deep_copy()
        if output_ids:
            matcher.consume_tokens(output_ids)
        return matcher


class Matcher:
    """What one sequence may say next. Used from one thread."""

    __slots__ = ("_building", "_eos_token_ids", "_vocab_size", "fault")

    def __init__(
        self, building: "Future[llguidance.LLMatcher]", vocab_size: int, eos_token_ids: NDArray[np.int64]
    ) -> None:
        self._building = building
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.fault: str | None = None
        """Why the sequence cannot go on, as a sentence for its client; None while it can."""

    def __del__(self) -> None:
        """Its sequence is gone: what was not begun for it holds up nobody who comes after."""
        self._building.cancel()

    def allowed(self) -> NDArray[np.bool_]:
        """Which ids may come next, `[vocab_size]`. Raises ConstraintError, with the fault."""
        if self.fault is None:
            try:
                return self._allowed(self._building.result())
            except ConstraintError as error:
                self.fault = str(error)
            except Exception as error:  # noqa: BLE001 - a foreign library's failure is one sequence's fault
                self.fault = f"the constraint cannot be kept to: {error}"
        raise ConstraintError(self.fault)

    def take(self, token_id: int) -> None:
        """The sequence has said `token_id`, which is no end token."""
        if self.fault is None:
            self._building.result().consume_token(token_id)

    def after(self, token_id: int) -> "Matcher":
        """What it will be if that is the next token; this one stays as it is."""
        built: Future[llguidance.LLMatcher] = Future()
        try:
            matcher = self._building.result().deep_copy()
            matcher.consume_token(token_id)
            built.set_result(matcher)
        except Exception as error:  # noqa: BLE001 - told by whoever asks what is allowed
            built.set_exception(error)
        later = Matcher(built, self._vocab_size, self._eos_token_ids)
        later.fault = self.fault
        return later

    def _allowed(self, matcher: llguidance.LLMatcher) -> NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not matcher.is_error():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(bits, count=min(8 * bits.size, self._vocab_size), bitorder="little")
            allowed[: mask.size] = mask.view(np.bool_)
            allowed[self._eos_token_ids] = matcher.is_accepting()
        if matcher.is_error() or not allowed.any():
            reason = matcher.get_error().partition("\n")[0]
            if " " not in reason:  # nothing, or the name of an inner state
                reason = "nothing can match it"
            raise ConstraintError(f"the constraint cannot be kept to: {reason}")
        return allowed


MatcherOf = Callable[[Constraint, Sequence[int]], Matcher]
"""What may follow output ids under a constraint."""


class _Vocabulary:
    """A vocabulary as the library wants it. Its texts are only ever tokenized for bytes that are forced."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int]
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = list(special_ids)
        self.eos_token_ids = list(eos_token_ids)
        self.eos_token_id = eos_token_ids[0]
        special = frozenset(special_ids)
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def indexed(self) -> llguidance.LLTokenizer:
        """The library's index of it."""
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.eos_token_ids
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest tokens, from left to right."""
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            length = next((n for n in range(self._longest, 0, -1) if rest[:n] in self._ids), 0)
            if length:
                ids.append(self._ids[rest[:length]])
            rest = rest[length or 1 :]
        return ids
