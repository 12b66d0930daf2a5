import json
from pathlib import Path

import pytest

from executor.model.opening import open_checkpoint
from executor.model.token_bytes import of_gguf, of_tokenizer_json
from router import model_files
from router.tokenizer import Tokenizer
from tests.router.real_model import REAL_MODEL, needs_real_model

PIECES = {"<unk>": 0, "</s>": 1, "▁Hello": 2, "▁": 3, "<0xE2>": 4, "x▁y": 5, "<tool>": 6}
ADDED = [
    {"id": 0, "content": "<unk>", "special": True},
    {"id": 1, "content": "</s>", "special": True},
    {"id": 6, "content": "<tool>", "special": False},
]


def test_bytes_are_those_of_the_routers_tokenizer(tiny_model_folder: Path) -> None:
    ours = open_checkpoint(tiny_model_folder).token_bytes
    theirs = Tokenizer(model_files.read(tiny_model_folder))
    assert ours is not None
    for token_id, token in enumerate(ours.tokens):
        assert token == theirs.token_bytes(token_id)
    assert [ours.tokens[token_id] for token_id in sorted(ours.special_ids)][:2] == [b"<|bos|>", b"<|eos|>"]


@pytest.mark.model
@needs_real_model
def test_bytes_of_the_real_model_are_those_of_the_routers_tokenizer() -> None:
    ours = open_checkpoint(REAL_MODEL).token_bytes
    theirs = Tokenizer(model_files.read(REAL_MODEL))
    assert ours is not None
    assert list(ours.tokens) == [theirs.token_bytes(i) for i in range(theirs.vocab_size)]
    assert len(ours.special_ids) == 17


def test_pieces_have_spaces_and_bytes() -> None:
    stages = [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}]
    raw = {"added_tokens": ADDED, "decoder": {"type": "Sequence", "decoders": stages}}
    known = of_tokenizer_json(json.loads(json.dumps(raw)), PIECES)
    assert known is not None
    assert known.tokens == (b"<unk>", b"</s>", b" Hello", b" ", b"\xe2", b"x y", b"<tool>")
    assert known.special_ids == {0, 1}


def test_pieces_of_a_gguf_are_the_same() -> None:
    known = of_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(PIECES),
            "tokenizer.ggml.token_type": [2, 3, 1, 1, 6, 1, 4],
        }
    )
    assert known is not None
    assert known.tokens == (b"<unk>", b"</s>", b" Hello", b" ", b"\xe2", b"x y", b"<tool>")
    assert known.special_ids == {0, 1}


@pytest.mark.parametrize("raw", [{}, {"decoder": {"type": "WordPiece"}}, {"decoder": None}])
def test_a_family_that_is_not_known_has_none(raw: dict[str, object]) -> None:
    assert of_tokenizer_json(raw, PIECES) is None


def test_a_gguf_of_another_family_has_none() -> None:
    assert of_gguf({"tokenizer.ggml.model": "bert"}) is None
    assert of_gguf({}) is None
