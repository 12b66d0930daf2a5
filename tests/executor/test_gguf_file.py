"""A GGUF file against the folder that it was made from, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from executor.model import ModelError
from executor.model.config import LayerKind, Mixture, ModelConfig, Rope, RopeScaling
from executor.model.gguf_config import ARCHITECTURES, config_from_metadata
from executor.model.opening import open_checkpoint
from tests.executor import family_models
from tests.executor.gguf_models import write_gguf
from tests.executor.loading import refusal, weights
from tests.executor.numerics import load, one_shot_logits, reference_logits
from tests.rig import tiny_model

TEXT = list(b"all files of the model have a say")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model")


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_heads": 9, "num_kv_heads": 3, "hidden_size": 144},
        {"attention_bias": True},
    ],
    ids=["untied", "tied", "nine_heads", "bias"],
)
def test_a_gguf_file_equals_the_folder_it_was_made_from(shape: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "model", **shape)
    path = write_gguf(folder, tmp_path / "model.gguf")
    from_folder, from_file = load(folder), load(path)
    expected = one_shot_logits(from_folder, TEXT)
    assert torch.equal(one_shot_logits(from_file, TEXT), expected)
    assert from_file.fingerprints == from_folder.fingerprints
    assert from_file.eos_token_ids == from_folder.eos_token_ids == (257, 259)
    assert from_file.max_seq_len == from_folder.max_seq_len


GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": family_models.WINDOW}
SLIDING = {"attention__sliding_window": family_models.WINDOW}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "changes", "architecture", "said"),
    [
        ("llama_2", {}, "llama", {}),
        ("smollm", {}, "llama", {}),
        ("mistral", {}, "llama", SLIDING),
        ("qwen_2", {}, "qwen2", {"rope__freq_base": 1e6}),
        ("qwen_3", {}, "qwen3", {}),
        (
            "gemma_2",
            GEMMA,
            "gemma2",
            SLIDING | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        ),
        ("mixtral", {}, "llama", {"rope__freq_base": 1e6}),
        ("olmoe", {}, "olmoe", {}),
        ("qwen_2_moe", {}, "qwen2moe", {}),
        ("qwen_2_moe", {"norm_topk_prob": True}, "qwen2moe", {"expert_weights_norm": True}),
        ("qwen_3_moe", {}, "qwen3moe", {}),
        ("gemma_3", GEMMA, "gemma3", SLIDING | {"attention__sliding_window_pattern": 3}),
        ("gemma_3", GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 6}, "gemma3", SLIDING),
        (
            "qwen_2",
            {"rope_parameters": YARN},
            "qwen2",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
        ),
    ],
    ids=[
        *("llama", "smollm", "mistral", "qwen2", "qwen3", "gemma2"),
        *("mixtral", "olmoe", "qwen2moe", "qwen2moe_normed", "qwen3moe"),
        *("gemma3", "gemma3_deep", "yarn"),
    ],
)
def test_each_architecture_equals_the_folder_it_was_made_from(
    family: str, changes: dict[str, Any], architecture: str, said: dict[str, Any], tmp_path: Path
) -> None:
    folder = family_models.build(tmp_path / "model", family, **changes)
    path = write_gguf(folder, tmp_path / "model.gguf", architecture=architecture, **said)
    token_ids = (TEXT * 4)[:120]
    found = one_shot_logits(load(path), token_ids)
    assert torch.equal(found, one_shot_logits(load(folder), token_ids))
    torch.testing.assert_close(found, reference_logits(folder, token_ids), atol=1e-4, rtol=0)


Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Kind.F16, 1e-3), (Kind.BF16, 1e-2), (Kind.Q8_0, 2e-2), (Kind.Q5_0, 0.15), (Kind.Q4_1, 0.25)],
    ids=["f16", "bf16", "q8_0", "q5_0", "q4_1"],
)
def test_quantised_tensors_are_the_folders_to_within_their_step(
    kind: Kind, error: float, folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as=kind)
    exact, rounded = open_checkpoint(folder).tensors, open_checkpoint(path).tensors
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"):
        assert rounded[name].dtype == kind.name
        expected, found = exact[name].read(), rounded[name].read()
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        assert (found - expected).abs().max() <= error * expected.abs().max()


EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def metadata(architecture: str, **said: Any) -> dict[str, Any]:
    """Metadata of an eight-headed model; `__` stands for a dot."""
    needed = {"embedding_length": 96, "feed_forward_length": 8, "block_count": 2, "context_length": 64}
    values = needed | {"attention__head_count": 8, "attention__key_length": 16} | said
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return {"general.architecture": architecture} | named


def config(architecture: str, **said: Any) -> ModelConfig:
    return config_from_metadata(metadata(architecture, **said), [], 7, "model.gguf")


@pytest.mark.parametrize(("architecture", "layers_at_27b"), [("gemma2", 46), ("gemma3", 62)])
def test_gemma_of_27_billions_scales_attention_by_another_size(architecture: str, layers_at_27b: int) -> None:
    said = {"attention__sliding_window": 4}
    assert config(architecture, **said).attention_scale == 16**-0.5
    assert config(architecture, **said, block_count=layers_at_27b).attention_scale == (96 / 8) ** -0.5


def test_what_gemma_2_leaves_unsaid_is_what_it_was_trained_with() -> None:
    gemma = config("gemma2", block_count=4)
    assert [kind.window for kind in gemma.layers] == [4096, None, 4096, None]
    assert (gemma.attention_soft_cap, gemma.logits_soft_cap) == (50.0, 30.0)


def test_scaling_in_gemma_3_is_that_of_the_layers_without_window() -> None:
    gemma = config("gemma3", block_count=6, attention__sliding_window=4, rope__scaling__factor=8.0)
    first, last = gemma.layers[0], gemma.layers[5]
    assert first == LayerKind(Rope(10_000.0), window=4)
    assert last == LayerKind(Rope(1_000_000.0, RopeScaling("linear", factor=8.0)))


@pytest.mark.parametrize(
    ("architecture", "said", "sentence"),
    [
        ("gemma3", {}, "gemma3.attention.sliding_window is missing"),
        ("qwen3", {"expert_count": 4}, "qwen3.expert_count 4 is not supported"),
        ("qwen3moe", {}, "qwen3moe.expert_count is missing"),
        ("olmoe", EXPERTS | {"attention__clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv 8.0 is not supported"),
        ("llama", {"expert_count": 4}, "llama.expert_used_count is missing"),
        ("qwen3moe", EXPERTS | {"expert_count": 2000}, "expert_count is 2000; it must be at most 1024"),
        ("qwen2moe", EXPERTS | {"expert_gating_func": 2}, "expert_gating_func 2 is not supported"),
        ("qwen3moe", EXPERTS | {"expert_weights_scale": 2.5}, "expert_weights_scale 2.5 is not supported"),
        ("llama", EXPERTS | {"expert_shared_count": 1}, "llama.expert_shared_count 1 is not supported"),
        ("qwen3moe", EXPERTS | {"leading_dense_block_count": 1}, "leading_dense_block_count 1 is not"),
        ("qwen2", {"attention__value_length": 8}, "qwen2.attention.value_length 8 is not supported"),
        ("llama", {"rope__dimension_count": 8}, "llama.rope.dimension_count 8 is not supported"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "llama.attention.head_count_kv is [1, 2]"),
        (
            "llama",
            {"rope__scaling__type": "longrope"},
            "'longrope' is not supported; supported: none, linear, yarn",
        ),
        ("llama", {"rope__scaling__type": "linear"}, "llama.rope.scaling.factor is missing"),
        (
            "qwen2",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 2.0,
                "rope__scaling__yarn_ext_factor": 0.5,
            },
            "qwen2.rope.scaling.yarn_ext_factor 0.5 is not supported",
        ),
        ("llama", {"rope__scaling__attn_factor": 1.2}, "llama.rope.scaling.attn_factor 1.2 is not supported"),
    ],
)
def test_metadata_that_cannot_be_served_are_refused_by_name(
    architecture: str, said: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError) as raised:
        config(architecture, **said)
    assert sentence in str(raised.value)
    assert str(raised.value).startswith("model.gguf: ")


def test_what_is_not_said_of_experts_is_what_llama_cpp_takes() -> None:
    qwen = config("qwen3moe", **EXPERTS, feed_forward_length=8).mixture
    assert qwen == Mixture(4, 2, intermediate_size=4, norm_topk_prob=True)
    shared = config("qwen2moe", **EXPERTS, feed_forward_length=8).mixture
    assert shared == Mixture(4, 2, intermediate_size=4, norm_topk_prob=False, shared_intermediate_size=8)
    mixtral = config("llama", **EXPERTS, feed_forward_length=8).mixture
    assert mixtral == Mixture(4, 2, intermediate_size=8, norm_topk_prob=True)
    assert config("llama", expert_count=0).mixture is None


def test_experts_that_stand_alone_are_those_of_a_stack(tmp_path: Path) -> None:
    folder = family_models.build(tmp_path / "model", "mixtral")
    stacked = write_gguf(folder, tmp_path / "stacked.gguf")
    alone = write_gguf(folder, tmp_path / "alone.gguf", stacks=False)
    names = {tensor.name for tensor in gguf.GGUFReader(alone).tensors}
    assert "blk.0.ffn_gate.3.weight" in names
    assert "blk.0.ffn_gate_exps.weight" not in names
    assert weights(alone).fingerprint == weights(stacked).fingerprint == weights(folder).fingerprint


def test_a_shared_experts_gate_may_be_a_vector(tmp_path: Path) -> None:
    folder = family_models.build(tmp_path / "model", "qwen_2_moe")
    path = write_gguf(
        folder, tmp_path / "model.gguf", architecture="qwen2moe", vectors=["shared_expert_gate"]
    )
    assert weights(path).fingerprint == weights(folder).fingerprint


@pytest.mark.parametrize(
    "said",
    [{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}],
    ids=["named", "of_2023"],
)
def test_linear_scaling_of_a_gguf_file_equals_the_folders(said: dict[str, Any], tmp_path: Path) -> None:
    scaled = tiny_model.build(tmp_path / "model", rope_scaling={"type": "linear", "factor": 4.0})
    path = write_gguf(scaled, tmp_path / "model.gguf", **said)
    expected = one_shot_logits(load(scaled), TEXT)
    assert torch.equal(one_shot_logits(load(path), TEXT), expected)


def test_frequency_divisors_of_a_gguf_file_scale_as_linear_does(tmp_path: Path) -> None:
    scaled = tiny_model.build(tmp_path / "model", rope_scaling={"type": "linear", "factor": 4.0})
    path = write_gguf(scaled, tmp_path / "model.gguf", rope_divisors=[4.0] * 8)
    expected = one_shot_logits(load(scaled), TEXT)
    assert torch.equal(one_shot_logits(load(path), TEXT), expected)


def test_tensors_that_scale_others_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", scales={"blk.1.attn_q.scale": 0.5})
    assert "tensor blk.1.attn_q.scale scales another one, which is not supported" in refusal(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 3000, -100])
def test_a_truncated_gguf_file_is_refused(keep: int, folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    assert "cannot be read as GGUF" in refusal(path)


def test_a_foreign_file_named_gguf_is_refused(folder: Path, tmp_path: Path) -> None:
    path = shutil.copy(folder / "model.safetensors", tmp_path / "model.gguf")
    assert "cannot be read as GGUF" in refusal(path)


def test_a_folder_with_one_gguf_file_is_that_file(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "pulled"
    place.mkdir()
    path = write_gguf(folder, place / "model.gguf")
    assert weights(place).fingerprint == weights(path).fingerprint
    (place / "generation_config.json").write_text('{"eos_token_id": [7, 257]}')
    assert open_checkpoint(place).eos_token_ids == (7, 257, 259)
    assert open_checkpoint(path).eos_token_ids == (257, 259)


def test_a_folder_with_two_gguf_files_asks_which(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "pulled"
    place.mkdir()
    for name in ("a.gguf", "b.gguf"):
        write_gguf(folder, place / name)
    assert "2 GGUF files (a.gguf, b.gguf)" in refusal(place)


@pytest.mark.parametrize(
    ("text", "ends"),
    [("<|im_end|>", {258}), ("<|eot_id|>", {258}), ("<end_of_turn>", {258}), ("<turn>", set())],
)
def test_the_end_of_a_turn_is_known_by_its_text_where_the_metadata_name_none(
    text: str, ends: set[int], folder: Path, tmp_path: Path
) -> None:
    texts = [*tiny_model.byte_alphabet(), "<s>", "</s>", text]
    path = write_gguf(folder, tmp_path / "model.gguf", token_texts=texts)
    assert set(open_checkpoint(path).eos_token_ids) == {tiny_model.EOS_ID} | ends


def test_one_of_the_files_of_a_model_is_refused_by_their_number(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model-00001-of-00003.gguf", num_files=3)
    assert "is one of the 3 files of a model: join them" in refusal(path)


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "phi3")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'phi3' is not supported; supported: " + ", ".join(ARCHITECTURES) in refusal(path)
