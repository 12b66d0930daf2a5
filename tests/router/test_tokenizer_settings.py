"""Settings of tokenizer_config.json that change ids, against transformers' reading of the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Built
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from router import gguf_tokenizer, model_files
from router.chat import ChatMessage
from router.model_files import ModelFilesError
from router.tokenizer import Tokenizer
from tests.rig import tiny_model

TEXTS = ["a<|im_end|> b", "<|im_start|>", " a", "a  b\n", "", "it's 12345", "<|bos|>x<|eos|>", "é\u3000ß"]
TURNS = [{"role": "user", "content": "Hi <|im_end|> you"}, {"role": "assistant", "content": "x"}]
CLASSES = [
    "PreTrainedTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "LlamaTokenizer",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "tiny")


def settings(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return folder


def split_as(folder: Path, name: str) -> None:
    """The pre-tokenizer that transformers builds for the class: in tokenizer.json, as its models have it."""
    raw = Built.from_file(str(folder / "tokenizer.json"))
    if name.startswith("GPT2"):
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name.startswith("Qwen2"):
        raw.pre_tokenizer = gguf_tokenizer.PRE_TOKENIZERS["qwen2"].split()
        raw.normalizer = normalizers.NFC()
    raw.save(str(folder / "tokenizer.json"))


def check(folder: Path) -> list[list[int]]:
    """That all ids are those of transformers; returns them."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(model_files.read(folder))
    ids = [ours.encode(text) for text in TEXTS]
    assert ids == [theirs(text)["input_ids"] for text in TEXTS]
    messages = [ChatMessage(turn["role"], turn["content"]) for turn in TURNS]
    in_template = ours.encode_chat(messages, [], add_generation_prompt=True)
    assert in_template == theirs.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    return [*ids, in_template]


@pytest.mark.parametrize("name", CLASSES)
def test_special_tokens_that_are_to_be_split_are_letters(folder: Path, name: str) -> None:
    split_as(folder, name)
    ids = {
        value: check(settings(folder, tokenizer_class=name, split_special_tokens=value))
        for value in (True, False)
    }
    assert max(map(max, filter(None, ids[True]))) < 256
    assert ids[False][0] == [ord("a"), tiny_model.IM_END_ID, ord(" "), ord("b")]
    assert check(settings(folder, split_special_tokens="absent")) == ids[False]


@pytest.mark.parametrize("name", CLASSES)
def test_a_space_is_put_before_a_text_where_the_class_follows_the_setting(folder: Path, name: str) -> None:
    split_as(folder, name)
    ids = {
        value: check(settings(folder, tokenizer_class=name, add_prefix_space=value))
        for value in (True, False)
    }
    follows = name.startswith(("GPT2", "Qwen2"))
    assert (ids[True] != ids[False]) is follows
    assert ids[False][0][0] == ord("a")
    assert ids[True][0][0] == (ord(" ") if follows else ord("a"))


def test_a_model_says_its_class_where_the_tokenizer_does_not(folder: Path) -> None:
    split_as(folder, "Qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    settings(folder, tokenizer_class="absent", add_prefix_space=True)
    assert check(folder)[0][0] == ord(" ")


def test_what_tokenizer_json_has_is_overruled(folder: Path) -> None:
    raw = Built.from_file(str(folder / "tokenizer.json"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    raw.save(str(folder / "tokenizer.json"))
    settings(folder, tokenizer_class="GPT2Tokenizer", add_prefix_space=False)
    assert check(folder)[0][0] == ord("a")
    settings(folder, tokenizer_class="PreTrainedTokenizerFast")
    assert check(folder)[0][0] == ord(" ")


def pieces(folder: Path, *, scheme: str | None) -> Path:
    """A sentencepiece tokenizer that puts a space before a text by `scheme`, or by a normalizer (None)."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "a": 4, "\u2581a": 5}
    tokenizer = Built(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("scheme", ["always", "first", "never", None])
def test_pieces_whose_space_is_said_in_two_ways_are_refused(folder: Path, scheme: str | None) -> None:
    pieces(folder, scheme=scheme)
    has_space = scheme != "never"
    settings(folder, tokenizer_class="LlamaTokenizer", add_prefix_space=has_space)
    assert model_files.read(folder).tokenizer.encode("a").ids == ([5] if has_space else [4])
    settings(folder, add_prefix_space=not has_space)
    word = "a" if has_space else "no"
    said = rf"add_prefix_space is {json.dumps(not has_space)}, and tokenizer\.json puts {word} space before"
    with pytest.raises(ModelFilesError, match=said):
        model_files.read(folder)
    settings(folder, tokenizer_class="PreTrainedTokenizerFast")  # transformers goes by tokenizer.json there
    assert model_files.read(folder).tokenizer.encode("a").ids == ([5] if has_space else [4])


@pytest.mark.parametrize("name", ["split_special_tokens", "add_prefix_space"])
def test_a_switch_is_true_or_false(folder: Path, name: str) -> None:
    with pytest.raises(
        ModelFilesError, match=rf"tokenizer_config\.json: {name} is 'yes', it must be true or false"
    ):
        model_files.read(settings(folder, **{name: "yes"}))
