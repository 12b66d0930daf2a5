"""Turns text and conversations into token ids, and back: the model's tokenizer as the router uses it.

Ids are those of Hugging Face transformers: a plain text gets the special tokens of the tokenizer's post-
processor once; a text that comes out of the chat template gets none, for the template writes its own. Special
tokens spelled out in a text become those tokens, as there, unless the model splits them. A lone surrogate
(JSON can hold one, UTF-8 cannot) counts as U+FFFD. `clean_up_tokenization_spaces` is not followed: it takes
back text already sent.

Tokenizing is CPU work in proportion to the text, with the interpreter lock released while it lasts. The list
of ids that it ends with is made with the lock held, so say how many are wanted at most. Keep it off the loop.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from router.chat import ChatError, ChatMessage, ChatTemplate, TemplateError
from router.detokenizer import BYTE_TOKEN, ByteLevelDetokenizer, Detokenizer, PieceDetokenizer
from router.model_files import ModelFiles, ModelFilesError

MAX_TOKEN_IDS: Final = 1 << 24
_MANY_TOKENS: Final = 2048
# Texts up to this long are tokenized whole, whatever is wanted.
_SHORT_CHARACTERS: Final = 64 * 1024


class TooManyTokensError(Exception):
    """A text has more tokens than were wanted, or already its beginning has, if it is not of the `whole`."""

    def __init__(self, num_tokens: int, *, whole: bool) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.whole = whole


class Tokenizer:
    """One model's tokenizer. All methods may be called from several threads at once.

    Raises ModelFilesError when the chat template is broken, or when the text cannot be streamed exactly.
    """

    __slots__ = (
        "_anchor",
        "_byte_fallback",
        "_chat_template",
        "_special_ids",
        "_token_bytes",
        "_tokenizer",
        "fingerprint",
        "vocab_size",
    )

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = files.tokenizer
        self._chat_template = _compiled_template(files)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        texts = {token_id: text for text, token_id in self._tokenizer.get_vocab().items()}
        self.vocab_size: int = max(texts, default=-1) + 1
        """Number of ids: one more than the largest."""
        if self.vocab_size > MAX_TOKEN_IDS:  # tables are made up to the largest, whatever is between
            raise ModelFilesError(
                f"{files.name}: the id of token {texts[self.vocab_size - 1][:100]!r} is "
                f"{self.vocab_size - 1}; at most {MAX_TOKEN_IDS - 1} is supported"
            )
        self.fingerprint: str = _fingerprint(texts)
        """SHA-256 (hex) over each token's text in id order, each ended by a zero byte."""
        stages = _decoder_stages(self._tokenizer)
        self._token_bytes: list[bytes] | None = None
        self._anchor = 0
        self._byte_fallback = any(stage["type"] == "ByteFallback" for stage in stages)
        if [stage["type"] for stage in stages] == ["ByteLevel"]:
            self._token_bytes = [self._spelled_bytes(texts.get(i)) for i in range(self.vocab_size)]
            for special in self._special_ids:
                self._token_bytes[special] = b""
        elif stages and all(map(_works_piece_by_piece, stages)):
            self._anchor = self._find_anchor(texts)
        else:
            names = ", ".join(stage["type"] for stage in stages) or "none"
            raise ModelFilesError(
                f"{files.name}: the tokenizer's decoder ({names}) cannot be streamed exactly; supported are "
                "ByteLevel, and sequences of Replace, ByteFallback, Fuse, Strip and Metaspace"
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self._chat_template is not None

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Of those texts that are a special token each: its id."""
        ids: Iterable[int | None] = map(self._tokenizer.token_to_id, texts)
        return frozenset(token_id for token_id in ids if token_id in self._special_ids)

    def spelled_specials(self, text: str, token_ids: Iterable[int]) -> frozenset[int]:
        """Of those ids the special tokens whose spelling stands in a text."""
        specials = self._special_ids.intersection(token_ids)
        return frozenset(token_id for token_id in specials if (self.token_text(token_id) or "") in text)

    def encode(self, text: str, *, at_most: int | None = None) -> list[int]:
        """The ids of a plain text, with the special tokens that the tokenizer puts around one.

        Raises TooManyTokensError, before a list of them is made, when there are more than `at_most`. How much
        that takes depends on `at_most`, however long the text is.
        """
        return self._ids(text, add_special_tokens=True, at_most=at_most)

    def encode_chat(
        self,
        messages: list[ChatMessage],
        tools: list[str],
        add_generation_prompt: bool,  # noqa: FBT001 - the request's field, handed on
        continue_final_message: bool = False,  # noqa: FBT001, FBT002 - likewise
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        at_most: int | None = None,
    ) -> list[int]:
        """The ids of a conversation in the chat template, which sees `variables` too.

        Raises ChatError, a sentence for the client, and TooManyTokensError as `encode` does.
        """
        if self._chat_template is None:
            raise ChatError("chat", "chat: this model has no chat template; send text or token_ids")
        text = self._chat_template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self._ids(text, add_special_tokens=False, at_most=at_most)

    def _ids(self, text: str, *, add_special_tokens: bool, at_most: int | None) -> list[int]:
        """The library takes hundreds of bytes for a character: of a long text, beginnings are tried first."""
        text = _without_lone_surrogates(text)
        if at_most is not None:
            num_characters = max(at_most, _SHORT_CHARACTERS)
            while num_characters < len(text):
                beginning = self._encoding(text[:num_characters], add_special_tokens=False)
                # What stands at the cut may have fewer tokens with what follows it.
                if len(beginning) > at_most + at_most // 8 + _SHORT_CHARACTERS // 8:
                    raise TooManyTokensError(len(beginning), whole=False)
                num_characters *= 4
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if at_most is not None and len(encoding) > at_most:
            raise TooManyTokensError(len(encoding), whole=True)
        ids: list[int] = encoding.ids
        return ids

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """As a batch of one: the library lets other threads run while it works on batches, and then alone."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def decode(self, token_ids: Iterable[int], *, include_special: bool = False) -> str:
        """The text of ids; an id without a token has none. What `detokenizer` gives piece by piece."""
        ids, skips_special = list(token_ids), not include_special
        if len(ids) <= _MANY_TOKENS:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skips_special)
        else:  # as a batch, for the same reason as in `_ids`
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skips_special)
        return text

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None for an id without one."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for within a text; a special one stands for its spelling."""
        spelling = self.token_text(token_id)
        if spelling is None:
            return b""
        if token_id in self._special_ids:
            return spelling.encode()
        if self._token_bytes is not None:
            return self._bytes_of(token_id)
        if self._byte_fallback and BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(spelling[3:5])
        # Behind a plain word, for the first piece of a text may lose its space.
        return self.decode([self._anchor, token_id]).removeprefix(self.decode([self._anchor])).encode()

    def detokenizer(self, *, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh detokenizer for one sequence. Special tokens have no text in it, but for those `shown`."""
        if self._token_bytes is not None:
            shows = partial(self._shown_bytes, shown=shown) if shown else self._bytes_of
            return ByteLevelDetokenizer(shows)
        return PieceDetokenizer(
            partial(self._ordinary_text, shown=shown),
            partial(self.decode, include_special=bool(shown)),  # it is given no others
            anchor=self._anchor,
            byte_fallback=self._byte_fallback,
        )

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._token_bytes is not None, "only byte-level vocabularies ask"
        return self._token_bytes[token_id] if token_id < self.vocab_size else b""

    def _shown_bytes(self, token_id: int, *, shown: frozenset[int]) -> bytes:
        return self.token_bytes(token_id) if token_id in shown else self._bytes_of(token_id)

    def _ordinary_text(self, token_id: int, *, shown: frozenset[int]) -> str | None:
        is_hidden = token_id in self._special_ids and token_id not in shown
        return None if is_hidden else self.token_text(token_id)

    def _find_anchor(self, texts: dict[int, str]) -> int:
        for token_id, text in texts.items():
            if text.isascii() and text.isalpha() and self.decode([token_id]) == text:
                return token_id
        raise ModelFilesError("the tokenizer has no token that is a plain word, so it is no text tokenizer")

    @staticmethod
    def _spelled_bytes(text: str | None) -> bytes:
        """The bytes a byte-level token stands for; a token outside the byte alphabet stands for itself."""
        if text is None:
            return b""
        try:
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, text))
        except KeyError:
            return text.encode()


def _compiled_template(files: ModelFiles) -> ChatTemplate | None:
    if files.chat_template is None:
        return None
    special = {"bos_token": files.bos_token, "eos_token": files.eos_token}
    try:
        return ChatTemplate(files.chat_template, {k: v for k, v in special.items() if v is not None})
    except TemplateError as error:
        raise ModelFilesError(f"{files.name}: {error}") from error


def _fingerprint(texts: dict[int, str]) -> str:
    digest = hashlib.sha256()
    for _, text in sorted(texts.items()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _decoder_stages(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    stages: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return stages


def _works_piece_by_piece(stage: dict[str, Any]) -> bool:
    """Whether a stage treats each token by itself, but for the start of the text and runs of byte tokens."""
    match stage["type"]:
        case "Replace":
            return len(stage["pattern"].get("String", "")) == 1
        case "Strip":
            return bool(stage["stop"] == 0)
        case kind:
            return kind in {"ByteFallback", "Fuse", "Metaspace"}


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Pairs become the character they mean, what is left over U+FFFD.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
