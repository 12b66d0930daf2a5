"""The tokenizer that a GGUF file's metadata describes.

A GGUF has no tokenizer.json: it stores tokens, their types, and merges or scores, and names the rest. Two
families are built here: byte-level BPE (`gpt2`) with the pre-tokenizers listed below, and sentencepiece BPE
(`llama`). Others are refused by name: a tokenizer that is nearly right gives a server that talks nonsense.

Where llama.cpp (`src/llama-vocab.cpp`, which defines these names) and transformers' reading of GGUF differ,
this follows llama.cpp, which agrees with the models' own tokenizer.json. Tokens keep the file's spelling, so
the vocabulary's fingerprint is that of the file. It must not know files: it gets metadata.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# gguf.TokenType
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_SPLIT = LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class UnsupportedTokenizerError(ValueError):
    """The metadata describe no tokenizer that can be built here; the text is a clause for people."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for.

    `ignore_merges`: a word that is a token is taken whole. `add_bos`: what an absent `add_bos_token` means.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt_2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _gpt_2_single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


_LLAMA_3 = PreTokenizer(_split_by(LLAMA_3_SPLIT), ignore_merges=True, add_bos=True)
_QWEN_2 = PreTokenizer(_split_by(QWEN_2_SPLIT), normalizer=normalizers.NFC)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(_gpt_2),
    "olmo": PreTokenizer(_gpt_2, normalizer=normalizers.NFC),
    "smollm": PreTokenizer(_gpt_2_single_digits),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
}

PREFIX_SPACE = {"llama": True, "gemma2": False, "gemma3": False}
"""The architectures whose sentencepiece tokenizers are built, and what an absent `add_space_prefix` means.

Others (Phi-3) use the same name and treat spaces in yet another way.
"""

_TURN_BEGIN = "[INST]"
"""Mistral's vocabularies have it from their third version on, whose tokenizer.json puts a space before a text
that has none, and behind no special token. llama.cpp does not know them apart from the older ones."""


def build(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file, from its metadata (key to value).

    Raises UnsupportedTokenizerError when a key is missing, or names what cannot be built here.
    """
    family = _needed(metadata, "tokenizer.ggml.model")
    tokens = _needed(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or []
    if family == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
    elif family == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.model is {family!r}; "
            "supported are 'gpt2' (byte-level) and 'llama' (sentencepiece)"
        )
    _add_tokens(tokenizer, tokens, types)
    _add_template(tokenizer, metadata, tokens, add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have those tokens found in a text before anything else that are no ordinary ones."""
    by_kind: dict[int, list[str]] = {}
    for token, kind in zip(tokens, types, strict=False):
        by_kind.setdefault(kind, []).append(token)
    # All of a kind at once: each call goes through all tokens that were added before.
    special = by_kind.get(CONTROL, []) + by_kind.get(UNKNOWN, [])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in by_kind.get(USER_DEFINED, [])]
    )


def special_token(metadata: dict[str, Any], name: str) -> str | None:
    """The text of the token that the metadata call `name` (bos, eos, …), None when they do not."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.{name}_token_id is {token_id!r}; it must be the id of one of the {len(tokens)} "
            "tokens"
        )
    return str(tokens[token_id])


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    pre_tokenizer = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _needed(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(_vocab(tokens), merges, ignore_merges=pre_tokenizer.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer.split()
    if pre_tokenizer.normalizer is not None:
        tokenizer.normalizer = pre_tokenizer.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizer.add_bos


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    architecture = metadata.get("general.architecture")
    if architecture not in PREFIX_SPACE:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.model is 'llama' and general.architecture is {architecture!r}; "
            f"a sentencepiece tokenizer is supported for {', '.join(map(repr, PREFIX_SPACE))}"
        )
    scores = _needed(metadata, "tokenizer.ggml.scores")
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", PREFIX_SPACE[architecture])
    tokenizer = Tokenizer(
        models.BPE(
            _vocab(tokens),
            _merges_from_scores(tokens, scores),
            unk_token=special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prefix_space and _TURN_BEGIN not in tokens:
        # Before the text and behind every special token, as sentencepiece does: also where a space is there.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme="first" if prefix_space else "never", split=False
        )
    stages: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix_space:
        stages.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Each way to make a token of two others, the best-scored token first.

    Sentencepiece joins the two neighbours that make the best-scored token, which is BPE with this ranking.
    Ties among the ways go as in transformers (`generate_merges`).
    """
    vocab = _vocab(tokens)
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in ways if left in vocab and right in vocab]
        known.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        ranked += [(score, len(left), len(right), left, right) for left, right in known]
    ranked.sort(key=lambda way: way[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _add_template(
    tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, add_bos: bool
) -> None:
    """Make `encode` put the start and end tokens around a text, where the file asks for them."""
    before, after = [], []
    if add_bos and special_token(metadata, "bos") is not None:
        before.append(metadata["tokenizer.ggml.bos_token_id"])
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        after.append(_needed(metadata, "tokenizer.ggml.eos_token_id"))
        special_token(metadata, "eos")  # refuses what is none
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
        special_tokens=[(tokens[i], i) for i in {*before, *after}],
    )


def _vocab(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _needed(metadata: dict[str, Any], key: str) -> Any:
    try:
        return metadata[key]
    except KeyError:
        raise UnsupportedTokenizerError(f"the metadata have no {key}") from None
