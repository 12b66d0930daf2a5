"""Each family of models against transformers: a tiny random one, in one step and in any pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor.model import ModelError
from executor.operations.cpu import CpuOperations
from executor.runner import ModelRunner
from tests.executor import family_models
from tests.executor.numerics import load, logits_by_steps, one_shot_logits, reference_logits

TEXT = list(b"The slowest rider does not hold the others up: chairs keep moving, one after another.")
OTHER = list(b"Nobody waits at the foot of the hill.")


def in_old_words(folder: Path) -> Path:
    """config.json as transformers wrote it before version 5: as it stands on the hub."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["kernels", "torch"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our kernels, and what stands in for them."""
    if request.param == "torch":
        monkeypatch.setattr(CpuOperations, "refusal", lambda _: "the test wants torch")
    return str(request.param)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_logits_equal_the_reference(family: str, arithmetic: str, tmp_path: Path) -> None:
    folder = family_models.build(tmp_path, family)
    equal(one_shot_logits(load(folder), TEXT), reference_logits(folder, TEXT))


@pytest.mark.parametrize(
    "family",
    ["llama_3", "mistral", "qwen_2_sliding", "mixtral", "qwen_2_moe", "qwen_3_moe", "gemma_2", "gemma_3"],
)
def test_a_config_json_in_the_words_of_the_hub_means_the_same(family: str, tmp_path: Path) -> None:
    expected = one_shot_logits(load(family_models.build(tmp_path, family)), TEXT)
    assert torch.equal(one_shot_logits(load(in_old_words(tmp_path)), TEXT), expected)
    equal(expected, reference_logits(tmp_path, TEXT))


def in_pieces(runner: ModelRunner) -> list[torch.Tensor]:
    """Two sequences in chunks that cross the window, mixed with single tokens."""
    steps = [[(0, 9)], [(0, 30), (1, 1)], [(0, 1), (1, 1)], [(1, 20), (0, 40)]]
    steps += [[(0, 1), (1, 1)]] * 5
    steps += [[(1, len(OTHER) - 27)]]
    return logits_by_steps(runner, [TEXT, OTHER], steps, seed=3)


@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "qwen_2_sliding",
        "qwen_3",
        "gemma_2",
        "gemma_3",
        "mixtral_sliding",
        "olmoe",
        "qwen_2_moe",
        "qwen_3_moe",
    ],
)
def test_b22_chunks_and_mixed_batches_equal_one_shot(family: str, arithmetic: str, tmp_path: Path) -> None:
    runner = load(family_models.build(tmp_path, family))
    assert runner.row_invariant == (arithmetic == "kernels")
    for found, token_ids in zip(in_pieces(runner), (TEXT, OTHER), strict=True):
        equal(found, one_shot_logits(runner, token_ids[: len(found)]))


@pytest.mark.parametrize("family", ["qwen_3", "gemma_2", "gemma_3", "qwen_3_moe"])
def test_b119_bfloat16_is_no_further_from_float32_than_the_reference(family: str, tmp_path: Path) -> None:
    folder = family_models.build(tmp_path, family)
    exact = one_shot_logits(load(folder), TEXT)
    rounded = one_shot_logits(load(folder, dtype="bfloat16"), TEXT)
    reference = reference_logits(folder, TEXT, torch.bfloat16).float()
    error, reference_error = ((other - exact).norm() / exact.norm() for other in (rounded, reference))
    assert error <= reference_error


# --- rotary positions -----------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
        YARN | {"truncate": False},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
        YARN | {"rope_theta": 2.0},
    ],
    ids=["plain", "betas", "unrounded", "attention_factor", "mscales", "step"],
)
def test_b116_yarn_equals_the_reference(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = family_models.build(tmp_path, "qwen_2", rope_parameters=rope)
    token_ids = (TEXT * 5)[:401]
    found, expected = one_shot_logits(load(folder), token_ids), reference_logits(folder, token_ids)
    for position in (10, 100, 400):
        equal(found[position], expected[position])


@pytest.mark.parametrize("family", ["mistral", "gemma_2", "gemma_3_scaled"])
def test_b116_scaled_positions_behind_a_window_equal_the_reference(family: str, tmp_path: Path) -> None:
    more = {} if family == "gemma_3_scaled" else {"rope_parameters": dict(LINEAR)}
    folder = family_models.build(tmp_path, family, **more)
    token_ids = (TEXT * 5)[:401]
    found, expected = one_shot_logits(load(folder), token_ids), reference_logits(folder, token_ids)
    for position in (10, 100, 400):
        equal(found[position], expected[position])


def test_yarn_stretches_a_context_whose_length_was_left_as_it_was(tmp_path: Path) -> None:
    rope = YARN | {"original_max_position_embeddings": 512}
    assert load(family_models.build(tmp_path, "qwen_3", rope_parameters=rope)).max_seq_len == 2048
    (tmp_path / "long").mkdir()
    longer = family_models.build(
        tmp_path / "long", "qwen_3", rope_parameters=rope, max_position_embeddings=4096
    )
    assert load(longer).max_seq_len == 4096


def test_layers_with_dynamic_scaling_hold_stretched_ones_back(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "dynamic", "factor": 4.0}, "sliding_attention": dict(YARN)}
    rope["sliding_attention"]["original_max_position_embeddings"] = 512
    assert load(family_models.build(tmp_path, "gemma_3", rope_parameters=rope)).max_seq_len == 512


# --- what kernels cannot do -----------------------------------------------------------------------


def test_a_head_size_without_kernels_is_served_by_torch(tmp_path: Path) -> None:
    folder = family_models.build(tmp_path, "qwen_3", head_dim=20)
    with capture_logs() as logs:
        runner = load(folder)
    selected = next(line for line in logs if line["event"] == "operations_selected")
    assert "head_dim 20" in selected["no_kernels"]
    equal(one_shot_logits(runner, TEXT), reference_logits(folder, TEXT))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees_pictures_is_served(prefix: str, tmp_path: Path) -> None:
    text = family_models.build(tmp_path / "text", "gemma_3")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    del config["architectures"]
    seeing = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [2, 3]}
    seeing |= {"text_config": config, "vision_config": {"hidden_size": 8}}
    (whole / "config.json").write_text(json.dumps(seeing))
    tensors = load_file(text / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.x": torch.ones(3)}, whole / "model.safetensors")
    found, expected = load(whole), load(text)
    assert found.eos_token_ids == (2, 3)
    assert torch.equal(one_shot_logits(found, TEXT), one_shot_logits(expected, TEXT))


def test_a_model_that_sees_pictures_without_a_text_part_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="text_config"):
        load(tmp_path)
