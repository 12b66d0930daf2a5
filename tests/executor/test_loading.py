"""What a model on disk may look like, and the sentence that refuses what it may not."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor.model import ModelError
from executor.model.checkpoint import tokenizer_fingerprint
from executor.model.opening import open_checkpoint
from tests.executor.loading import edit_json, refusal, weights
from tests.executor.numerics import load, one_shot_logits
from tests.rig import tiny_model

TEXT = list(b"all files of the model have a say")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model")


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the folder's tensors after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def split_into_shards(folder: Path, count: int = 3) -> tuple[list[str], dict[str, str]]:
    """Rewrite the folder with `count` shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    weight_map = {name: names[place % count] for place, name in enumerate(tensors)}
    for shard in names:
        save_file(
            {name: tensors[name].clone() for name in tensors if weight_map[name] == shard}, folder / shard
        )
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names, weight_map


# --- paths and files ------------------------------------------------------------------------------


def test_b120_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert f"--model is {tmp_path / 'nowhere'}, which does not exist" in refusal(tmp_path / "nowhere")


def test_a_folder_is_read_without_the_package_for_gguf_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("executor.model.gguf_file", "executor.model.gguf_reader"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert open_checkpoint(folder).tensors


def test_b120_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    assert "give a Hugging Face folder or a GGUF file" in refusal(folder / "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_b120_a_broken_settings_file_is_named(name: str, text: str, folder: Path) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    assert name in refusal(folder)


def test_b115_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "config.json does not exist" in refusal(tmp_path)


def test_b115_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_safetensors_are_refused(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors cannot be read as safetensors" in refusal(folder)


# --- shards ---------------------------------------------------------------------------------------


def test_shards_load_as_one_file_does(folder: Path) -> None:
    whole = one_shot_logits(load(folder), TEXT)
    split_into_shards(folder)
    assert torch.equal(one_shot_logits(load(folder), TEXT), whole)


def test_shards_beside_weights_in_one_file_are_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    split_into_shards(folder)
    (folder / "model.safetensors").write_bytes(whole)
    assert "model.safetensors.index.json, which does not name it: remove the older one" in refusal(folder)


def test_b115_a_missing_shard_is_named(folder: Path) -> None:
    names, _ = split_into_shards(folder)
    (folder / names[1]).unlink()
    assert names[1] in refusal(folder)


def test_b115_a_tensor_that_its_shard_does_not_have_is_named(folder: Path) -> None:
    names, weight_map = split_into_shards(folder)
    name = next(name for name, shard in weight_map.items() if shard == names[0])
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map | {name: names[2]})
    assert name in refusal(folder)


def test_an_index_cannot_reach_outside_of_its_folder(folder: Path) -> None:
    _, weight_map = split_into_shards(folder)
    stray = dict.fromkeys(weight_map, "../elsewhere.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map=stray)
    assert "not a plain file name" in refusal(folder)


# --- tensors --------------------------------------------------------------------------------------


def test_b115_an_extra_tensor_is_a_warning(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.stranger.weight": torch.ones(3)}))
    with capture_logs() as logs:
        weights(folder)
    warning = next(line for line in logs if line["log_level"] == "warning")
    assert "model.stranger.weight" in warning["reason"]


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight is missing" in refusal(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=4)
    assert "and 15 more are missing" in refusal(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=100)
    assert "model.layers.0.mlp.gate_proj.weight has shape [128, 64]" in refusal(folder)
    assert "needs [100, 64]" in refusal(folder)


def test_tensors_of_whole_numbers_are_refused(folder: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}))
    assert f"tensor {name} holds torch.int8" in refusal(folder)


def test_tensors_of_eight_bits_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"tensor {name} holds torch.float8_e4m3fn" in refusal(folder)


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name].view(-1)[77:78].fill_(float("nan")))
    assert f"tensor {name} holds numbers that are not finite" in refusal(folder)


def test_b114_no_head_and_not_tied_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "no output head" in refusal(folder)


def test_b114_a_head_beside_tied_embeddings_loads_when_it_is_the_same(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(folder, add_head)
    loaded = weights(folder)
    assert loaded.head is loaded.embeddings


def test_b114_a_head_beside_tied_embeddings_is_refused_when_it_differs(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight differs" in refusal(folder)


# --- configuration --------------------------------------------------------------------------------

QWEN_3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": None}
SUPPORTED = (
    "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
    "MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, OlmoeForCausalLM, "
    "Gemma2ForCausalLM, Gemma3ForCausalLM"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, f"'GPT2LMHeadModel' is not supported; {SUPPORTED}"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "text_config is None; it must be the shape of",
        ),
        ({"architectures": None}, SUPPORTED),
        ({"architectures": 7}, SUPPORTED),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu, gelu_pytorch_tanh"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 1}, "rope_theta is 1.0: rotary frequencies need a base above 1"),
        ({"layer_types": ["full_attention"]}, "a list of 2 of full_attention, sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is ['full_attention', 'chu"),
        ({"layer_types": [["full_attention"], 7]}, "layer_types is [['full_attention'], 7]"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"is_causal": False}, "is_causal False is not supported; supported: true"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config {'1': {'rms_norm_eps': 0.5}}"),
        (
            {"model_type": "mistral"},
            "architecture 'LlamaForCausalLM' and model_type 'mistral' are two models",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "model_type": None, "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 is not supported; supported: null",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 15}, "head_dim is 15"),
        (QWEN_3_MOE | {"num_experts": 2000}, "num_experts is 2000; it must be at most 1024"),
        (QWEN_3_MOE | {"num_experts": 0}, "num_experts is 0; it must be a whole number of at least 1"),
        (QWEN_3_MOE | {"num_experts": 8, "num_local_experts": 4}, "num_experts 8 and num_local_experts 4"),
        (
            QWEN_3_MOE | {"num_experts": 4, "num_experts_per_tok": 5},
            "5 experts for each token cannot be chosen of 4",
        ),
        (QWEN_3_MOE | {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        (QWEN_3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        (QWEN_3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (
            QWEN_3_MOE | {"mlp_only_layers": [2]},
            "mlp_only_layers is [2]; it must be a list of layers, 0 to 1",
        ),
        (QWEN_3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        (
            {"architectures": ["OlmoeForCausalLM"], "model_type": None, "clip_qkv": 8.0},
            "clip_qkv 8.0 is not supported; supported: null",
        ),
        (QWEN_3_MOE, "model.layers.0.mlp.gate.weight and 771 more are missing"),
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "qwen3_moe"},
            "architecture 'MixtralForCausalLM' and model_type 'qwen3_moe' are two models",
        ),
        ({"eos_token_id": 272}, "end token id 272 is outside of the vocabulary of 272 tokens"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], expected: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)
    assert expected in refusal(folder)


def test_b117_heads_that_cannot_be_shared_out_name_both_numbers(folder: Path) -> None:
    edit_json(folder / "config.json", num_attention_heads=8, num_key_value_heads=3)
    sentence = refusal(folder)
    assert "8 attention heads" in sentence
    assert "3 key-value heads" in sentence


def test_b117_a_hidden_size_that_heads_do_not_divide_names_both_numbers(folder: Path) -> None:
    edit_json(folder / "config.json", num_attention_heads=6, head_dim=None)
    sentence = refusal(folder)
    assert "hidden_size 64" in sentence
    assert "num_attention_heads 6" in sentence


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (
            {"type": "foo", "factor": 2.0},
            "'foo' is not supported; supported: default, linear, dynamic, llama3, yarn",
        ),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
        ({"rope_type": ["linear"]}, "['linear'] is not supported"),
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1}, "must be less"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": 3}, "3 is not supported"),
        ({"rope_type": "yarn", "factor": 2, "truncate": None}, "truncate is None; it must be true or false"),
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "they must agree"),
        ({"factor": 2.0}, "no rope_type"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}, "must be less"),
        ([1], "rope_scaling is [1]"),
    ],
)
def test_b116_rope_settings_that_are_not_understood_are_refused(
    scaling: Any, expected: str, folder: Path
) -> None:
    edit_json(folder / "config.json", rope_scaling=scaling)
    assert expected in refusal(folder)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def test_two_ways_to_say_how_positions_are_scaled_must_say_the_same(folder: Path) -> None:
    written = {"rope_type": "default", "rope_theta": 5e5}
    edit_json(folder / "config.json", rope_theta=5e5, rope_parameters=written, rope_scaling=YARN)
    assert "has rope_parameters and rope_scaling, and they do not mean the same: keep one" in refusal(folder)
    edit_json(folder / "config.json", rope_parameters=YARN | {"rope_theta": 5e5})
    twice = open_checkpoint(folder).config
    edit_json(folder / "config.json", rope_parameters=None)
    assert open_checkpoint(folder).config == twice


def test_the_length_before_stretching_may_stand_outside_of_the_scaling(folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling=YARN)
    inside = open_checkpoint(folder).config
    outside = {name: value for name, value in YARN.items() if not name.startswith("original")}
    edit_json(folder / "config.json", rope_scaling=outside, original_max_position_embeddings=64)
    assert open_checkpoint(folder).config == inside
    edit_json(folder / "config.json", rope_scaling=YARN, original_max_position_embeddings=32)
    assert "original_max_position_embeddings 32 and 64 in config.json: rope_scaling" in refusal(folder)


def test_gemma_3_names_the_scaling_of_each_type_of_layer(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        architectures=["Gemma3ForCausalLM"],
        model_type=None,
        rope_parameters={"rope_type": "linear", "factor": 8.0},
    )
    assert "an object with an entry for each of full_attention, sliding_attention" in refusal(folder)


@pytest.mark.parametrize(("family", "length"), [("Llama", 2048), ("Qwen2", 32_768), ("Gemma2", 8192)])
def test_a_length_that_is_not_said_is_that_of_the_family(family: str, length: int, folder: Path) -> None:
    edit_json(
        folder / "config.json",
        architectures=[f"{family}ForCausalLM"],
        model_type=None,
        max_position_embeddings=None,
    )
    assert open_checkpoint(folder).config.max_seq_len == length


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_b119_a_number_type_that_is_not_served_is_refused(dtype: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=rf"'{dtype}' is not supported on cpu; supported: float32, bfloat16"):
        load(folder, dtype=dtype)


# --- end tokens and vocabulary --------------------------------------------------------------------


def test_b118_all_files_say_which_tokens_end(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=2)
    edit_json(folder / "generation_config.json", eos_token_id=[2, 7])
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert open_checkpoint(folder).eos_token_ids == (2, 7, 258)


def test_a_folder_without_tokenizer_and_generation_config_loads(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (257,)
    assert tokenizer_fingerprint(checkpoint.token_texts) == ""


def test_end_tokens_whose_texts_are_not_known_leave_outputs_unconstrained(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    plain = {text: token_id for text, token_id in raw["model"]["vocab"].items() if token_id < 256}
    edit_json(folder / "tokenizer.json", added_tokens=[], model=raw["model"] | {"vocab": plain})
    assert "constraints" not in load(folder).features


def test_tokenizer_fingerprint_is_over_texts_in_id_order(folder: Path) -> None:
    texts = [*tiny_model.byte_alphabet(), *tiny_model.SPECIAL_TOKENS]
    expected = hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()
    assert tokenizer_fingerprint(open_checkpoint(folder).token_texts) == expected


def test_model_fingerprint_tells_weights_apart_and_not_folders(tmp_path: Path) -> None:
    first, same, other = (
        weights(tiny_model.build(tmp_path / name, seed=seed)).fingerprint
        for name, seed in (("first", 0), ("same", 0), ("other", 1))
    )
    assert first == same != other
