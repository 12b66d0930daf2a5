import json
from pathlib import Path
from typing import Any

import pytest

from router import model_files
from router.model_files import GenerationDefaults, ModelFilesError
from tests.rig import tiny_model
from tests.router import gguf_files
from tests.router.real_model import REAL_MODEL, needs_real_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "tiny", max_seq_len=512)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tiny_gguf(path: Path, **more: Any) -> Path:
    tokens = [*tiny_model.byte_alphabet(), *tiny_model.SPECIAL_TOKENS, "hi"]
    metadata = gguf_files.byte_level(
        tokens, ["h i"], pre="gpt-2", bos_token_id=tiny_model.BOS_ID, eos_token_id=tiny_model.EOS_ID
    )
    return gguf_files.write(path, metadata | {"llama.context_length": 512} | more)


def test_a_folder_says_what_its_files_say(folder: Path) -> None:
    files = model_files.read(folder)
    assert files.name == "tiny"
    assert files.chat_template == tiny_model.CHAT_TEMPLATE
    assert (files.bos_token, files.eos_token) == ("<|bos|>", "<|eos|>")
    assert files.eos_token_ids == (tiny_model.EOS_ID, tiny_model.IM_END_ID)
    assert files.generation_defaults == GenerationDefaults()
    assert files.max_seq_len == 512


def test_b118_end_tokens_are_those_of_all_files(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=2)
    change(folder / "generation_config.json", eos_token_id=[2, 7])
    assert model_files.read(folder).eos_token_ids == (2, 7, tiny_model.EOS_ID)


def test_no_end_token_in_any_file_is_none(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    change(folder / "tokenizer_config.json", eos_token=None)
    assert model_files.read(folder).eos_token_ids == ()


def test_generation_defaults_count_whatever_do_sample_says(folder: Path) -> None:
    change(
        folder / "generation_config.json",
        do_sample=False, temperature=0.6, top_p=0.9, top_k=50, min_p=0.05, max_new_tokens=99, max_length=20,
        repetition_penalty=1.1,
    )  # fmt: skip
    assert model_files.read(folder).generation_defaults == GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=50, min_p=0.05, repetition_penalty=1.1, max_tokens=99
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("max_new_tokens", 0),
        ("eos_token_id", -1),
        ("eos_token_id", ["x"]),
    ],
)
def test_b120_a_default_out_of_range_names_file_and_value(folder: Path, key: str, value: Any) -> None:
    change(folder / "generation_config.json", **{key: value})
    with pytest.raises(ModelFilesError, match=rf"generation_config\.json: {key} is .* must be"):
        model_files.read(folder)


def test_special_tokens_may_be_objects(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert model_files.read(folder).eos_token == "<|im_end|>"


def test_a_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own file")
    assert model_files.read(folder).chat_template == "own file"


def test_of_several_templates_the_default_counts(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    change(folder / "tokenizer_config.json", chat_template=several)
    assert model_files.read(folder).chat_template == "b"


def test_lengths_left_in_the_tokenizer_file_do_not_cut_prompts(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", truncation=truncation)
    assert len(model_files.read(folder).tokenizer.encode("twelve bytes").ids) == 12


def test_a_gguf_file_says_what_its_metadata_say(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "tiny.Q4_1.gguf",
        **{
            "tokenizer.chat_template": "t",
            "tokenizer.ggml.eot_token_id": tiny_model.IM_END_ID,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 7,
        },
    )
    files = model_files.read(path)
    assert files.name == "tiny.Q4_1"
    assert files.chat_template == "t"
    assert (files.bos_token, files.eos_token) == ("<|bos|>", "<|eos|>")
    assert files.eos_token_ids == (tiny_model.EOS_ID, tiny_model.IM_END_ID)
    assert files.generation_defaults == GenerationDefaults(temperature=0.5, top_k=7)
    assert files.max_seq_len == 512


def test_a_folder_with_one_gguf_file_is_that_file_under_the_folders_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    tiny_gguf(tmp_path / "my-model" / "weights.gguf")
    (tmp_path / "my-model" / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 5}')
    files = model_files.read(tmp_path / "my-model")
    assert files.name == "my-model"
    assert files.generation_defaults == GenerationDefaults(temperature=0.2)
    assert files.eos_token_ids == (5, tiny_model.EOS_ID)


def test_b120_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"nowhere, which does not exist: give a folder"):
        model_files.read(tmp_path / "nowhere")


def test_b120_an_empty_folder_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"holds no tokenizer\.json and no GGUF file"):
        model_files.read(tmp_path)


def test_b120_a_folder_without_its_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"tiny holds no tokenizer\.json"):
        model_files.read(folder)


def test_two_gguf_files_are_one_too_many(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        tiny_gguf(tmp_path / name)
    with pytest.raises(ModelFilesError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"):
        model_files.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"a text about llamas"])
def test_b120_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="not a GGUF file"):
        model_files.read(path)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.99])
def test_b120_a_gguf_file_cut_off_in_its_metadata_is_refused(tmp_path: Path, share: float) -> None:
    whole = tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: max(8, int(len(whole) * share))])
    with pytest.raises(ModelFilesError, match=r"cut\.gguf"):
        model_files.read(cut)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_b120_a_broken_settings_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match=name.replace(".", r"\.")) as refusal:
        model_files.read(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.model
@needs_real_model
def test_the_real_model_is_read() -> None:
    files = model_files.read(REAL_MODEL)
    assert files.eos_token == "<|im_end|>"
    assert files.eos_token_ids == (2,)
    assert files.max_seq_len == 8192
    assert files.tokenizer.get_vocab_size() == 49_152
