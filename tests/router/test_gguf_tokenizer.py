"""GGUF tokenizers against transformers' reading of the same file, and against a tokenizer.json."""

import json
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPTNeoXTokenizer, PreTrainedTokenizerFast

from router import model_files
from router.model_files import ModelFilesError
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.rig.real_gemma import REAL_GEMMA, needs_real_gemma
from tests.router import gguf_files, prompts
from tests.router.real_model import REAL_MODEL, needs_real_model

Words = tuple[list[str], list[str]]  # tokens and merges
Pair = tuple[Tokenizer, PreTrainedTokenizerFast]  # ours and theirs

PROMPTS = prompts.load()
TRICKY = [
    *(
        "",
        " ",
        "a",
        " a",
        "  two  spaces ",
        "x = 12345;\n\n\n\ty=6",
        "it's I'LL",
        "1 22 333 4444",
        "a  1  22",
    ),
    *("don\u2019t", "<|im_start|>user\nhi<|im_end|>", "no<|eos|>space", "日本語と한국어", "\r\n\r\n x"),
    *("e\u0301", "ﬁ½²", "</s> text"),
]


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Words:
    """Tokens and merges of a byte-level BPE trained on the prompts, cut as the family to be tested cuts."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(PROMPTS.values(), trainer)
    vocab = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), *tiny_model.SPECIAL_TOKENS]
    return tokens, [" ".join(merge) for merge in merges]


@pytest.fixture(scope="module")
def words() -> Words:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def both(path: Path) -> Pair:
    return Tokenizer(model_files.read(path)), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_byte_level_ids_are_those_of_transformers(
    tmp_path: Path, words: Words, pre: str, add_bos: bool
) -> None:
    tokens, merges = words
    special = {
        "bos_token_id": tokens.index("<|bos|>"),
        "eos_token_id": tokens.index("<|eos|>"),
        "add_bos_token": add_bos,
    }
    ours, theirs = both(
        gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level(tokens, merges, pre=pre, **special))
    )
    if (
        pre == "llama-bpe"
    ):  # what the models' own tokenizer.json says, and transformers' reading of GGUF lacks
        theirs.backend_tokenizer.model.ignore_merges = True
    for text in [*PROMPTS.values(), *TRICKY]:
        # The same for Qwen's normalizer.
        ids = theirs(unicodedata.normalize("NFC", text) if pre == "qwen2" else text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_smollm_takes_digits_one_by_one_as_its_tokenizer_json_does(tmp_path: Path, words: Words) -> None:
    tokens, merges = words
    metadata = gguf_files.byte_level(tokens, merges, pre="smollm")
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    own = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(list(tiny_model.SPECIAL_TOKENS))
    for text in [*PROMPTS.values(), *TRICKY]:
        assert ours.encode(text) == own.encode(text).ids


def test_olmo_cuts_as_the_tokenizer_of_gpt_neox_does(tmp_path: Path, words: Words) -> None:
    tokens, merges = words
    metadata = gguf_files.byte_level(tokens, merges, pre="olmo")
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    theirs = GPTNeoXTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    # Of special tokens it knows its own alone.
    for text in [*PROMPTS.values(), *(each for each in TRICKY if "<|" not in each)]:
        assert ours.encode(text) == theirs(text).input_ids


def test_b78_llama_3_adds_its_start_token_when_the_file_does_not_say(tmp_path: Path, words: Words) -> None:
    tokens, merges = words
    bos = tokens.index("<|bos|>")
    metadata = gguf_files.byte_level(tokens, merges, pre="llama-bpe", bos_token_id=bos)
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    assert ours.encode("hi")[0] == bos
    assert bos not in ours.encode("hi")[1:]


def test_an_end_token_is_added_where_the_file_asks(tmp_path: Path, words: Words) -> None:
    tokens, merges = words
    eos = tokens.index("<|eos|>")
    metadata = gguf_files.byte_level(tokens, merges, pre="gpt-2", eos_token_id=eos, add_eos_token=True)
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    assert ours.encode("hi")[-1] == eos


def test_user_defined_tokens_are_found_whole_and_shown(tmp_path: Path, words: Words) -> None:
    tokens, merges = words
    metadata = gguf_files.byte_level([*tokens, "<think>"], merges, pre="gpt-2")
    metadata["tokenizer.ggml.token_type"][-1] = 4
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    ids = ours.encode("a<think>b")
    assert len(tokens) in ids
    assert ours.decode(ids) == "a<think>b"


def test_the_fingerprint_is_that_of_a_tokenizer_json_with_the_same_tokens(tmp_path: Path) -> None:
    from_json = model_files.read(tiny_model.build(tmp_path / "tiny"))
    from_json.tokenizer.add_tokens(["hi"])
    tokens = [*tiny_model.byte_alphabet(), *tiny_model.SPECIAL_TOKENS, "hi"]
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.byte_level(tokens, ["h i"], pre="gpt-2"))
    assert Tokenizer(model_files.read(path)).fingerprint == Tokenizer(from_json).fingerprint


def sentencepiece_pieces() -> dict[str, float]:
    """Pieces as sentencepiece BPE leaves them: characters last, joined pieces scored by their age."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    english = [text for prompt_id, text in PROMPTS.items() if prompt_id.startswith(("gsm8k-test", "mtb-en"))]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    backend.train_from_iterator(english, trainer)
    vocab = backend.get_vocab()
    characters = [piece for piece in vocab if len(piece) == 1]
    joined = sorted((piece for piece in vocab if len(piece) > 1), key=vocab.__getitem__)
    return {piece: -float(age) for age, piece in enumerate([*joined, *sorted(characters)])}


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("gguf")
    ours, theirs = both(gguf_files.write(folder / "m.gguf", gguf_files.sentencepiece(sentencepiece_pieces())))
    # What the models' own tokenizer.json says, and transformers' reading of GGUF lacks: it puts no space
    # before one, nor behind a special token.
    theirs.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    theirs.backend_tokenizer.pre_tokenizer = None
    return ours, theirs


def test_b78_sentencepiece_ids_are_those_of_transformers_with_one_start_token(llama_2: Pair) -> None:
    ours, theirs = llama_2
    for text in [*PROMPTS.values(), *TRICKY]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ids.count(1) == 1
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet="abehnot ▁\n.é", max_size=30))
def test_sentencepiece_joins_the_best_scored_neighbours_first(llama_2: Pair, text: str) -> None:
    """Against sentencepiece's own rule, spelled out."""
    ours, _ = llama_2
    assert ours.encode(text)[1:] == best_neighbours_first(text, sentencepiece_scores())


def test_a_space_is_put_before_a_text_that_has_one_and_behind_special_tokens(llama_2: Pair) -> None:
    ours, _ = llama_2
    space = ours.encode(" ")[1]
    assert ours.encode(" a") == [1, space, *ours.encode("a")[1:]]
    assert ours.encode("</s>a") == [1, 2, *ours.encode("a")[1:]]
    for text in ("a", " a", "  a"):
        assert ours.decode(ours.encode(text)) == text


def test_mistral_with_tokens_of_turns_puts_no_space_behind_them(tmp_path: Path) -> None:
    metadata = gguf_files.sentencepiece(sentencepiece_pieces() | {"[INST]": 0.0})
    metadata["tokenizer.ggml.token_type"][-1] = 3
    ours = Tokenizer(model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata)))
    turn = ours.vocab_size - 1
    assert ours.encode("[INST] a") == [1, turn, *ours.encode("a")[1:]]
    assert ours.encode("[INST]a") == [1, turn, *ours.encode("xa")[-1:]]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """No space is put before a text, and runs of spaces are tokens, spelled with spaces."""
    metadata = gguf_files.sentencepiece(sentencepiece_pieces() | {"  ": -1000.0, "   ": -1000.0})
    metadata["tokenizer.ggml.token_type"][-2:] = [4, 4]
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return Tokenizer(model_files.read(gguf_files.write(path, metadata, architecture="gemma3")))


@given(text=st.text(alphabet="abehnot \n.é", max_size=30))
def test_gemma_puts_no_space_before_a_text_and_keeps_runs_of_spaces_whole(
    gemma: Tokenizer, text: str
) -> None:
    runs = {"  ": gemma.vocab_size - 2, "   ": gemma.vocab_size - 1}
    ids: list[int] = []
    for part in re.split("(   |  )", text):
        others = best_neighbours_first(part, sentencepiece_scores(), prefix="")
        ids += [runs[part]] if part in runs else others
    assert gemma.encode(text)[1:] == ids
    assert gemma.decode(ids) == text


_SCORES: dict[str, tuple[int, float]] = {}


def sentencepiece_scores() -> dict[str, tuple[int, float]]:
    if not _SCORES:
        pieces = sentencepiece_pieces().items()
        _SCORES.update({piece: (259 + i, score) for i, (piece, score) in enumerate(pieces)})
    return _SCORES


def best_neighbours_first(text: str, scores: dict[str, tuple[int, float]], *, prefix: str = "▁") -> list[int]:
    text = text.replace(" ", "▁")
    if not text:
        return []
    parts = list(prefix + text)
    while True:
        neighbours = map("".join, pairwise(parts))
        joined = [(scores[both][1], -place) for place, both in enumerate(neighbours) if both in scores]
        if not joined:
            break
        place = -max(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        ids += [scores[part][0]] if part in scores else [3 + byte for byte in part.encode()]
    return ids


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.pre": "no-such"}, "tokenizer.ggml.pre is 'no-such'"),
        ({"tokenizer.ggml.merges": ["never seen"]}, "its metadata make no tokenizer"),
        ({"tokenizer.ggml.merges": ["one"]}, "its metadata make no tokenizer"),
        (
            {"tokenizer.ggml.eos_token_id": 70_000},
            "tokenizer.ggml.eos_token_id is 70000; it must be the id of one of the 904 tokens",
        ),
        ({"tokenizer.ggml.bos_token_id": 2**32 - 1}, "tokenizer.ggml.bos_token_id is 4294967295; it must be"),
    ],
)
def test_what_cannot_be_built_is_named(
    tmp_path: Path, words: Words, changes: dict[str, Any], sentence: str
) -> None:
    metadata = gguf_files.byte_level(*words, pre="gpt-2") | changes
    with pytest.raises(ModelFilesError, match=sentence) as raised:
        model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_key_is_named(tmp_path: Path, words: Words, key: str) -> None:
    metadata = gguf_files.byte_level(*words, pre="gpt-2")
    del metadata[key]
    with pytest.raises(ModelFilesError, match=f"the metadata have no {key}"):
        model_files.read(gguf_files.write(tmp_path / "m.gguf", metadata))


def test_a_sentencepiece_tokenizer_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.sentencepiece({"a": -1.0}), architecture="phi3")
    with pytest.raises(ModelFilesError, match=r"is 'phi3'; .* supported for 'llama', 'gemma2', 'gemma3'"):
        model_files.read(path)


@pytest.mark.model
@needs_real_model
def test_the_real_models_ids_are_those_of_its_tokenizer() -> None:
    """Those of transformers, told of the pre-tokenizer `smollm`, which its reading of GGUF does not know."""
    gguf_path = next(REAL_MODEL.glob("*.gguf"))
    theirs = AutoTokenizer.from_pretrained(REAL_MODEL, gguf_file=gguf_path.name)
    ours = Tokenizer(model_files.read(REAL_MODEL))
    as_it_reads = [ours.encode(text) == theirs(text).input_ids for text in PROMPTS.values()]
    assert sum(as_it_reads) >= len(PROMPTS) - 8
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*PROMPTS.values(), *TRICKY]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, include_special=True) == theirs.decode(ids)


@pytest.mark.model
@needs_real_model
def test_the_real_models_known_ids() -> None:
    ours = Tokenizer(model_files.read(REAL_MODEL))
    assert ours.encode("What is the capital of France?") == [1780, 314, 260, 3575, 282, 4649, 47]
    assert ours.encode("<|im_start|>user\n12") == [1, 4093, 198, 33, 34]


@pytest.mark.model
@needs_real_gemma
def test_the_real_gemmas_known_ids() -> None:
    """Those of sentencepiece with the file's pieces and scores, and the turn tokens found whole."""
    ours = Tokenizer(model_files.read(REAL_GEMMA))
    known = {
        "Question: What is the capital of France?\nAnswer:": [
            *(14977, 236787, 2900, 563, 506, 5279, 529, 7001, 236881, 107, 7925, 236787),
        ],
        "  two  spaces \n\n\n\tx = 12345;": [
            *(138, 13498, 138, 35220, 236743, 109, 255968, 236781, 578, 236743),
            *(236770, 236778, 236800, 236812, 236810, 236793),
        ],
        "<start_of_turn>user\n日本語と한국어 🙂<end_of_turn>": [
            *(105, 2364, 107, 94951, 237032, 114216, 237430, 57235, 106),
        ],
        "<h1>x</h1>": [184, 236781, 191],
    }
    for text, ids in known.items():
        assert ours.encode(text) == [2, *ids]
        assert ours.decode(ids, include_special=True) == text
