"""The bytes that each token of a vocabulary stands for within a text, read from a model's tokenizer files.

Two families are known, as in every model served here: byte-level (GPT-2, Llama 3, Qwen, SmolLM), whose
characters each stand for one byte, and pieces with byte tokens (Llama 2, Mistral, Gemma), where U+2581 is a
space. Of any other there is none: a server without constrained output is better than one that constrains
wrongly. Knows no model and no tensor; text is never tokenized here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_OF_PIECES: Final = "\u2581"
_PIECE_STAGES: Final = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
# gguf.TokenType
_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_USER_DEFINED, _GGUF_UNUSED = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A vocabulary in id order; an id without a token has no bytes.

    `special_ids` are those of control tokens, which no text spells.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]


def of_tokenizer_json(raw: Mapping[str, Any], tokens: Mapping[str, int]) -> TokenBytes | None:
    """Those of a tokenizer.json, `tokens` being its vocabulary; None for a family that is not known."""
    decoder = raw.get("decoder") or {}
    stages = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [stage.get("type") for stage in stages]
    added = raw.get("added_tokens") or []
    special_ids = frozenset(token["id"] for token in added if token.get("special"))
    added_ids = frozenset(token["id"] for token in added)
    if kinds == ["ByteLevel"]:
        return _in_id_order(tokens, special_ids, _byte_level)
    if kinds and _PIECE_STAGES.issuperset(kinds) and tokens:
        plain = {text for text, token_id in tokens.items() if token_id in added_ids}
        return _in_id_order(tokens, special_ids, lambda text: _piece(text, is_plain=text in plain))
    return None


def of_gguf(metadata: Mapping[str, Any]) -> TokenBytes | None:
    """Those of a GGUF file's metadata; None for a family that is not known."""
    texts: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    if len(kinds) != len(texts):
        return None
    special_kinds = {_GGUF_UNKNOWN, _GGUF_CONTROL, _GGUF_UNUSED}
    special_ids = frozenset(i for i, kind in enumerate(kinds) if kind in special_kinds)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokens = (_byte_level(text) for text in texts)
        case "llama":
            tokens = (
                _piece(text, is_plain=kind == _GGUF_USER_DEFINED)
                for text, kind in zip(texts, kinds, strict=True)
            )
        case _:
            return None
    return TokenBytes(tuple(tokens), special_ids)


def _in_id_order(tokens: Mapping[str, int], special_ids: frozenset[int], read: Any) -> TokenBytes:
    ordered = [b""] * (max(tokens.values(), default=-1) + 1)
    for text, token_id in tokens.items():
        ordered[token_id] = read(text)
    return TokenBytes(tuple(ordered), special_ids)


def _byte_level(text: str) -> bytes:
    """A token outside the byte alphabet (an added one) stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, text))
    except KeyError:
        return text.encode("utf-8", "surrogatepass")


def _piece(text: str, *, is_plain: bool) -> bytes:
    if (byte := _BYTE_TOKEN.fullmatch(text)) is not None:
        return bytes.fromhex(byte[1])
    return (text if is_plain else text.replace(_SPACE_OF_PIECES, " ")).encode("utf-8", "surrogatepass")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_alphabet()
