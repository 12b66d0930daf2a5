import contextlib
import hashlib
import itertools
import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import processors

from router import model_files
from router.chat import ChatError, ChatMessage
from router.model_files import ModelFilesError
from router.tokenizer import Tokenizer, TooManyTokensError
from tests.rig import tiny_model
from tests.router import prompts
from tests.router.test_detokenizer import llama_2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "tiny")


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(model_files.read(folder))


def test_one_byte_is_one_id_and_back(tokenizer: Tokenizer) -> None:
    for text in prompts.load().values():
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(text.encode()) == text


def test_special_tokens_show_on_request(tokenizer: Tokenizer) -> None:
    ids = [tiny_model.BOS_ID, ord("a"), tiny_model.IM_END_ID]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, include_special=True) == "<|bos|>a<|im_end|>"


def test_a_token_stands_for_its_bytes_and_a_special_one_for_its_spelling(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(tiny_model.EOS_ID) == b"<|eos|>"
    assert tokenizer.token_bytes(tiny_model.VOCAB_SIZE - 1) == b""


def test_a_piece_stands_for_its_space_too_and_a_byte_token_for_its_byte() -> None:
    pieces = llama_2()
    stands_for = {pieces.token_text(i): pieces.token_bytes(i) for i in range(pieces.vocab_size)}
    assert stands_for["▁Hello"] == b" Hello"
    assert stands_for["<0xFC>"] == b"\xfc"
    assert stands_for["<0x4>"] == b"<0x4>"
    assert stands_for["</s>"] == b"</s>"


def test_b78_a_start_token_is_added_to_plain_text_and_not_to_a_templates(folder: Path) -> None:
    files = model_files.read(folder)
    files.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tiny_model.BOS_ID)]
    )
    writes_it = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(
        model_files.ModelFiles(
            **{f: getattr(files, f) for f in files.__slots__} | {"chat_template": writes_it}
        )
    )
    expected = [tiny_model.BOS_ID, *b"Hi"]
    assert tokenizer.encode("Hi") == expected
    assert tokenizer.encode_chat([ChatMessage("user", "Hi")], [], add_generation_prompt=True) == expected


def test_the_ids_of_special_tokens_are_told_by_their_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids(["<|im_end|>", "H", "<tool_call>"]) == {tiny_model.IM_END_ID}


def test_a_conversation_becomes_the_ids_of_its_template(tokenizer: Tokenizer) -> None:
    start, end = tiny_model.IM_START_ID, tiny_model.IM_END_ID
    turn = [start, *b"user\nHi", end, ord("\n")]
    messages = [ChatMessage("user", "Hi")]
    assert tokenizer.encode_chat(messages, [], add_generation_prompt=False) == turn
    assert tokenizer.encode_chat(messages, [], add_generation_prompt=True) == [*turn, start, *b"assistant\n"]


def test_a_model_without_a_template_says_so(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    settings.write_text("{}")
    tokenizer = Tokenizer(model_files.read(folder))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatError, match="no chat template"):
        tokenizer.encode_chat([ChatMessage("user", "Hi")], [], add_generation_prompt=True)


def test_a_broken_template_is_refused_at_the_start(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelFilesError, match="tiny: the chat template is broken at line 1"):
        Tokenizer(model_files.read(folder))


@pytest.mark.parametrize(
    ("text", "as_if"),
    [
        ("a\ud800", "a\ufffd"),
        ("\udc00b", "\ufffdb"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
    ],
)
def test_b104_a_lone_surrogate_counts_as_a_replacement_character(
    tokenizer: Tokenizer, text: str, as_if: str
) -> None:
    assert tokenizer.encode(text) == list(as_if.encode())


def test_b104_surrogates_in_a_conversation_do_the_same(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([ChatMessage("user", "\udc00")], [], add_generation_prompt=False)
    assert "\ufffd" in tokenizer.decode(ids)


def test_an_empty_text_has_no_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert not tokenizer.decode([])


def test_the_vocabulary_is_as_large_as_its_largest_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 260
    assert tokenizer.token_text(tiny_model.EOS_ID) == "<|eos|>"
    assert tokenizer.token_text(ord(" ")) == "Ġ"
    assert tokenizer.token_text(260) is None


def test_the_fingerprint_is_of_the_tokens_in_id_order(tokenizer: Tokenizer) -> None:
    tokens = [*tiny_model.byte_alphabet(), *tiny_model.SPECIAL_TOKENS]
    expected = hashlib.sha256(b"".join(token.encode() + b"\0" for token in tokens)).hexdigest()
    assert tokenizer.fingerprint == expected


def test_the_fingerprint_tells_vocabularies_apart(folder: Path, tokenizer: Tokenizer) -> None:
    files = model_files.read(folder)
    files.tokenizer.add_tokens(["one more"])
    assert Tokenizer(files).fingerprint != tokenizer.fingerprint


def test_more_tokens_than_wanted_are_counted_and_not_listed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x" * 10, at_most=10) == [120] * 10
    with pytest.raises(TooManyTokensError) as raised:
        tokenizer.encode("x" * 11, at_most=10)
    assert raised.value.num_tokens == 11
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_chat([ChatMessage("user", "x" * 11)], [], True, at_most=10)


def test_what_a_text_far_too_long_costs_depends_on_what_is_wanted(tokenizer: Tokenizer) -> None:
    """The library would take gigabytes for it."""
    for text in ("😀" * 4_000_000, "x" * 8_000_000):
        with pytest.raises(TooManyTokensError) as raised:
            tokenizer.encode(text, at_most=100_000)
        assert not raised.value.whole
        assert 100_000 < raised.value.num_tokens <= 400_000


@pytest.mark.parametrize("num_characters", [65_535, 65_536, 65_537, 300_000])
def test_a_text_that_is_not_too_long_is_counted_as_a_whole(tokenizer: Tokenizer, num_characters: int) -> None:
    text = "é" * num_characters  # two tokens each
    assert tokenizer.encode(text, at_most=2 * num_characters) == tokenizer.encode(text)
    with pytest.raises(TooManyTokensError) as raised:
        tokenizer.encode(text, at_most=2 * num_characters - 1)
    assert raised.value.whole
    assert raised.value.num_tokens == 2 * num_characters


def test_b103_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    """However long the work takes here, no pause of the others lasts for most of it."""
    ended = threading.Event()
    seconds = 0.0

    def work() -> None:
        nonlocal seconds
        began = time.perf_counter()
        with contextlib.suppress(TooManyTokensError):
            tokenizer.encode("Grüße aus Köln. " * 50_000, at_most=800_000)
        seconds = time.perf_counter() - began
        ended.set()

    thread = threading.Thread(target=work)
    turns = [time.perf_counter()]
    thread.start()
    while not ended.wait(0.001):
        turns.append(time.perf_counter())
    thread.join()
    longest = max(later - earlier for earlier, later in itertools.pairwise(turns))
    assert longest < seconds / 2


def test_an_absurd_id_of_a_token_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"]["Zz"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFilesError, match=r"the id of token 'Zz' is 4294967295; at most 16777215 is"):
        Tokenizer(model_files.read(folder))
