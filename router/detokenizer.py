"""Turns token ids into text as they come; the pieces joined equal the decoding of all ids at once.

The law, for every sequence of ids and every way of cutting it: joined `push` + `flush` is what the
tokenizer's own `decode(ids, skip_special_tokens=True)` gives. Text that has been handed out is never taken
back, so a character whose bytes are not all there is held; if they never come, `flush` gives the U+FFFD that
`decode` gives. Special tokens and ids outside the vocabulary have no text.

Why not the tokenizers library's DecodeStream: it guesses from a U+FFFD at the end of a window whether more
will come. On byte-fallback vocabularies that hands out text that `decode` later takes back (`A` `<0xF3>`
decodes to two U+FFFD) or raises; it has no flush; and a long run of bytes that form no character is decoded
again at each token. The two classes here know how their kind of vocabulary makes text, so each id is looked
at a fixed number of times: the cost is linear in the ids, and memory is the text held back.

Pure: it gets the vocabulary as functions, and must not know the tokenizers library, stop strings or clients.
"""

import codecs
import re
from collections.abc import Callable, Iterable
from typing import Protocol

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # one byte, in vocabularies with byte fallback


class Detokenizer(Protocol):
    """The text of one sequence, in the making."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in the next ids; returns the text that is now certain, which may be empty."""

    def flush(self) -> str:
        """The sequence has ended; returns the text held back. Nothing is pushed after it."""


class ByteLevelDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): tokens are bytes, the text is their UTF-8.

    `token_bytes` gives the bytes of a token: none for a special token or an id without a token.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # Python and the tokenizers library (Rust) both put one U+FFFD for each maximal part of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in the next ids; returns the characters they complete."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """One U+FFFD when a character is left half, else nothing."""
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For sentencepiece-style vocabularies (Llama 2, Mistral): tokens are pieces of text, with byte fallback.

    A run of byte tokens decodes as a whole: to its characters when all of it is UTF-8, else to one U+FFFD for
    each byte, those of good characters included. So a run is held until the token after it. (A line feed is
    a byte token in these vocabularies: it comes one token late.)

    A leading space may belong to the vocabulary and not to the text, at the start only. So ids are decoded
    together from the first until there is some text; from then on a piece is decoded behind `anchor`, an
    ordinary token that stands for "not the start", and the anchor's own text is cut off.

    `text` is None for an id without text (special, or outside the vocabulary), else the token's spelling;
    `decode` decodes a list of such ids from the start of a text; `byte_fallback` says whether byte tokens
    decode to bytes.
    """

    __slots__ = ("_anchor", "_anchor_text", "_byte_fallback", "_decode", "_held", "_started", "_text")

    def __init__(
        self,
        text: Callable[[int], str | None],
        decode: Callable[[list[int]], str],
        *,
        anchor: int,
        byte_fallback: bool,
    ) -> None:
        self._text = text
        self._decode = decode
        self._anchor = anchor
        self._anchor_text = decode([anchor])
        self._byte_fallback = byte_fallback
        self._held: list[int] = []
        self._started = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in the next ids; returns the text up to the last one that is not a byte token."""
        return "".join(map(self._push, token_ids))

    def flush(self) -> str:
        """The text of the byte tokens at the end."""
        return self._release() if self._held else ""

    def _push(self, token_id: int) -> str:
        text = self._text(token_id)
        if text is None:
            return ""
        self._held.append(token_id)
        if self._byte_fallback and BYTE_TOKEN.fullmatch(text):
            return ""
        return self._release()

    def _release(self) -> str:
        if self._started:
            released = self._decode([self._anchor, *self._held]).removeprefix(self._anchor_text)
            self._held.clear()
            return released
        released = self._decode(self._held)
        if released:
            self._started = True
            self._held.clear()
        return released
