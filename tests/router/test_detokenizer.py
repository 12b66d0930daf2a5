"""The law of kind 9: joined pieces + flush == decode(all ids), for every sequence and every cutting."""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from router import model_files
from router.model_files import GenerationDefaults, ModelFiles, ModelFilesError
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.router.real_model import REAL_MODEL, needs_real_model

Make = Callable[[], Tokenizer]

SPM_PIECES = ["▁Hello", "▁world", "▁", "x", "▁▁", "é", "\ufffd", "ab", "안", "<0x4>", "▁.", ","]
SPM_BYTE = 3  # id of <0x00>


@cache
def byte_level() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer(model_files.read(tiny_model.build(Path(folder))))


@cache
def byte_level_with_user_tokens() -> Tokenizer:
    backend = Backend.from_str(byte_level()._tokenizer.to_str())
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    backend.add_tokens([AddedToken("안녕", special=False)])
    return Tokenizer(files_of(backend))


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(files_of(backend))


@cache
def llama_2() -> Tokenizer:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(stages))


@cache
def three_leading_spaces_stripped() -> Tokenizer:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    return sentencepiece(decoders.Sequence(stages))


@cache
def gemma() -> Tokenizer:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return sentencepiece(decoders.Sequence(stages))


@cache
def metaspace_then_bytes() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]))


@cache
def bytes_then_metaspace() -> Tokenizer:
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@cache
def metaspace_alone() -> Tokenizer:
    return sentencepiece(decoders.Metaspace())


ALL_KINDS = [
    byte_level,
    byte_level_with_user_tokens,
    llama_2,
    three_leading_spaces_stripped,
    gemma,
    metaspace_then_bytes,
    bytes_then_metaspace,
    metaspace_alone,
]


def files_of(backend: Backend) -> ModelFiles:
    return ModelFiles("test", backend, None, None, None, (), GenerationDefaults(), None)


def assert_law(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, shown: frozenset[int] = frozenset()
) -> None:
    """Joined pieces equal decode(all); and what is out after each push is a beginning of what comes to be."""
    if shown:
        hidden = tokenizer._special_ids - shown
        whole = tokenizer.decode([one for one in ids if one not in hidden], include_special=True)
    else:
        whole = tokenizer.decode(ids)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    detokenizer = tokenizer.detokenizer(shown=shown)
    text = ""
    for start, end in pairwise(bounds):
        text += detokenizer.push(ids[start:end])
        assert whole.startswith(text)
    assert text + detokenizer.flush() == whole


CUTS = st.lists(st.integers(0, 100), max_size=12)
UTF_8_PARTS = st.sampled_from([*"a😀안é€", "\ufffd", "👩‍👩‍👧"]).flatmap(
    lambda text: st.integers(1, len(text.encode())).map(lambda end: list(text.encode()[:end]))
)
NEARLY_UTF_8 = st.lists(UTF_8_PARTS, max_size=10).map(lambda parts: [byte for part in parts for byte in part])


@pytest.mark.parametrize("make", ALL_KINDS)
@given(data=st.data(), cuts=CUTS)
def test_b52_joined_pieces_equal_decoding_all_random_ids(
    make: Make, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = make()
    ids = st.integers(0, tokenizer.vocab_size + 2)
    assert_law(tokenizer, data.draw(st.lists(ids, max_size=40)), cuts)


@pytest.mark.parametrize("make", ALL_KINDS)
@given(data=st.data(), cuts=CUTS)
def test_the_law_holds_where_some_special_tokens_are_shown(
    make: Make, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = make()
    special = sorted(tokenizer._special_ids)
    shown = data.draw(st.frozensets(st.sampled_from(special), min_size=1))
    ids = st.integers(0, tokenizer.vocab_size + 2) | st.sampled_from(special)
    assert_law(tokenizer, data.draw(st.lists(ids, max_size=40)), cuts, shown=shown)


@pytest.mark.parametrize("make", ALL_KINDS)
@given(data=st.data(), cuts=CUTS)
def test_b50_joined_pieces_equal_decoding_all_of_nearly_utf_8(
    make: Make, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = make()
    first_byte = 0 if make in {byte_level, byte_level_with_user_tokens} else SPM_BYTE
    pieces = st.lists(st.integers(first_byte + 256, tokenizer.vocab_size - 1), max_size=2)
    ids = [first_byte + byte for byte in data.draw(NEARLY_UTF_8)] + data.draw(pieces)
    ids += [first_byte + byte for byte in data.draw(NEARLY_UTF_8)]
    assert_law(tokenizer, ids, cuts)


@pytest.mark.parametrize("make", [llama_2, three_leading_spaces_stripped, gemma, metaspace_alone])
@given(
    ids=st.lists(st.integers(SPM_BYTE + 256, SPM_BYTE + 256 + len(SPM_PIECES) - 1), max_size=10), cuts=CUTS
)
def test_b51_spaces_at_the_start_of_words_and_of_the_answer_are_those_of_decode(
    make: Make, ids: list[int], cuts: list[int]
) -> None:
    assert_law(make(), ids, cuts)


def test_b51_a_sentencepiece_answer_has_one_space_between_words() -> None:
    tokenizer = llama_2()
    pieces = {piece: SPM_BYTE + 256 + place for place, piece in enumerate(SPM_PIECES)}
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([pieces[p]]) for p in ("▁Hello", "▁world", "▁", "x")] == [
        "Hello", " world", " ", "x"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["a😀b", "a한국어b", "a\u0645\u0631\u062d\u0628\u0627b", "a👨‍👩‍👧‍👦b"])
def test_b49_characters_of_several_tokens_come_whole(text: str) -> None:
    detokenizer = byte_level().detokenizer()
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert not detokenizer.flush()


def test_b50_half_a_character_at_the_end_is_one_replacement_character() -> None:
    detokenizer = byte_level().detokenizer()
    assert detokenizer.push([ord("a"), *"😀".encode()[:2]]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_b50_the_word_after_half_a_character_is_intact() -> None:
    detokenizer = byte_level().detokenizer()
    assert detokenizer.push([*"😀".encode()[:2], *b" word"]) == "\ufffd word"
    assert not detokenizer.flush()


def test_a_run_of_byte_tokens_is_held_because_its_end_decides_what_it_means() -> None:
    tokenizer = llama_2()
    good = [SPM_BYTE + byte for byte in "é\n".encode()]
    comma = SPM_BYTE + 256 + SPM_PIECES.index(",")
    detokenizer = tokenizer.detokenizer()
    assert not detokenizer.push(good)
    assert detokenizer.push([comma]) == "é\n,"
    detokenizer = tokenizer.detokenizer()
    assert not detokenizer.push(good)
    assert detokenizer.push([SPM_BYTE + 0xFF, comma]) == "\ufffd" * 4 + ","


def test_special_tokens_are_hidden_and_leave_a_half_character_open() -> None:
    detokenizer = byte_level().detokenizer()
    assert not detokenizer.push([tiny_model.BOS_ID, 0xC3, tiny_model.EOS_ID])
    assert detokenizer.push([0xA9]) == "é"


def test_special_tokens_that_are_shown_are_spelt_out() -> None:
    tokenizer = byte_level()
    shown = tokenizer.special_ids(["<|eos|>", "a", "unheard of"])
    assert shown == {tiny_model.EOS_ID}
    pieces = [ord("a"), tiny_model.BOS_ID, tiny_model.EOS_ID, ord("b")]
    assert [tokenizer.detokenizer(shown=shown).push([one]) for one in pieces] == ["a", "", "<|eos|>", "b"]


def test_detokenizers_of_one_tokenizer_share_no_state() -> None:
    first, second = byte_level().detokenizer(), byte_level().detokenizer()
    assert not first.push([0xC3])
    assert second.push([ord("x")]) == "x"
    assert first.push([0xA9]) == "é"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    ],
)
def test_a_decoder_that_takes_text_back_is_refused_at_the_start(decoder: decoders.Decoder) -> None:
    with pytest.raises(ModelFilesError, match="cannot be streamed exactly"):
        sentencepiece(decoder)


@pytest.mark.model
@needs_real_model
def test_b52_the_law_holds_on_the_real_vocabulary() -> None:
    tokenizer = Tokenizer(model_files.read(REAL_MODEL))
    draw = random.Random(9)
    for _ in range(2000):
        ids = [draw.randrange(tokenizer.vocab_size + 2) for _ in range(draw.randrange(60))]
        assert_law(tokenizer, ids, [draw.randrange(60) for _ in range(5)])
