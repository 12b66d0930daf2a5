"""Models whose matrices are kept in codes: their logits, what they promise, and what is refused."""

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor.model import ModelError
from executor.model.opening import open_checkpoint
from executor.model.quantized import LARGEST_IN_8_BITS
from executor.parallel.shard import Shard
from executor.runner import ModelRunner
from tests.executor import family_models
from tests.executor.gguf_models import write_gguf
from tests.executor.numerics import load, logits_by_steps, one_shot_logits
from tests.rig import tiny_model

Kind = gguf.GGMLQuantizationType
TEXT = list(b"a matrix is kept in codes, and computed with as it is kept")
CLOSE = 0.06
"""Error of logits, relative to them, that 8 bits on both sides of products leave with random weights."""
CLOSE_OF_EXPERTS = 0.1
"""The same where they weigh experts too, by an exponential."""


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.build(tmp_path / "model", num_heads=9, num_kv_heads=3, hidden_size=288, num_layers=3)


def loaded(path: Path, **how: Any) -> tuple[ModelRunner, dict[str, Any]]:
    """The model, and what was logged of it."""
    with capture_logs() as logs:
        runner = load(path, **how)
    return runner, next(dict(entry) for entry in logs if entry["event"] == "model_loaded")


def test_logits_in_8_bits_are_close_to_those_in_float32(folder: Path) -> None:
    exact, in_full = loaded(folder)
    ours, in_codes = loaded(folder, quantization="int8")
    logits = one_shot_logits(exact, TEXT)
    assert 0 < error(one_shot_logits(ours, TEXT), logits) < CLOSE
    assert in_codes["quantization"] == "int8"
    assert in_codes["weight_bytes"] < 0.31 * in_full["weight_bytes"]
    # The model is the same one; who goes on with its sequences must know that it computes in another way.
    assert ours.fingerprints.model == exact.fingerprints.model
    assert ours.fingerprints.numerics != exact.fingerprints.numerics


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_a_file_in_blocks_of_32_is_computed_with_as_it_is_stored(
    kind: Kind, folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as=kind)
    as_stored, logged = loaded(path, quantization="stored")
    dequantized = one_shot_logits(load(path), TEXT)
    assert error(one_shot_logits(as_stored, TEXT), dequantized) < CLOSE
    in_8_bits, logged_8 = loaded(path, quantization="int8")
    assert error(one_shot_logits(in_8_bits, TEXT), dequantized) < CLOSE
    has_four_bits = logged["weight_bytes"] < 0.6 * logged_8["weight_bytes"]
    assert has_four_bits == kind.name.startswith("Q4")
    assert as_stored.fingerprints.model == in_8_bits.fingerprints.model


def test_what_is_not_stored_in_such_blocks_is_kept_in_8_bits(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as=Kind.F16)
    for place in (folder, path):
        in_8_bits = one_shot_logits(load(place, quantization="int8"), TEXT)
        assert torch.equal(one_shot_logits(load(place, quantization="stored"), TEXT), in_8_bits)


@pytest.mark.parametrize("quantization", ["int8", "stored"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b63_bits_are_the_same_in_every_chunk_and_company(
    dtype: str, quantization: str, folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", stored_as=Kind.Q4_1)
    runner = load(path, dtype=dtype, quantization=quantization)
    assert runner.row_invariant
    alone = one_shot_logits(runner, TEXT)
    others = [[500 % 256 + n] * (3 * n) for n in range(1, 6)]
    steps = [[(0, 13), *((n, n) for n in range(1, 6))] for _ in range(3)]
    steps += [[(0, 1)] for _ in range(7)] + [[(0, len(TEXT) - 46)]]
    assert torch.equal(logits_by_steps(runner, [TEXT, *others], steps)[0], alone)


@pytest.mark.parametrize(
    ("family", "architecture"), [("mixtral", "llama"), ("qwen_2_moe", "qwen2moe"), ("qwen_3_moe", "qwen3moe")]
)
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_experts_are_kept_in_codes_and_their_router_is_not(
    family: str, architecture: str, kind: Kind, tmp_path: Path
) -> None:
    # All experts are chosen: else a small error chooses others, and is a large one.
    experts = {"num_experts_per_tok": 4, "num_local_experts": 4}
    if family != "mixtral":
        experts = {"num_experts_per_tok": 4, "num_experts": 4, "moe_intermediate_size": 64}
    if family == "qwen_2_moe":
        experts["shared_expert_intermediate_size"] = 96
    folder = family_models.build(tmp_path / "model", family, hidden_size=128, **experts)
    said = {"rope__freq_base": 1e6} if family == "mixtral" else {}
    path = write_gguf(folder, tmp_path / "model.gguf", architecture=architecture, stored_as=kind, **said)
    as_stored, logged = loaded(path, quantization="stored")
    exact, in_full = loaded(path)
    dequantized = one_shot_logits(exact, TEXT)
    assert error(one_shot_logits(as_stored, TEXT), dequantized) < CLOSE_OF_EXPERTS
    assert error(one_shot_logits(load(path, quantization="int8"), TEXT), dequantized) < CLOSE_OF_EXPERTS
    assert logged["weight_bytes"] < (0.2 if kind is Kind.Q4_1 else 0.33) * in_full["weight_bytes"]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="holds numbers that are not finite"):
        load(folder, quantization="int8")


def test_numbers_beyond_what_blocks_of_8_bits_hold_are_refused(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    weight[3, 5] = LARGEST_IN_8_BITS
    save_file(tensors, folder / "model.safetensors")
    load(folder, quantization="int8")
    weight[3, 5] = -66_000.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="holds numbers beyond 64,960, which blocks of 8 bits"):
        load(folder, quantization="int8")


def test_without_our_own_kernels_codes_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelError) as refused:
        ModelRunner.load(
            folder,
            dtype="float32",
            quantization="int8",
            device="cpu",
            num_blocks=8,
            block_size=16,
            max_num_seqs=1,
            attention="reference",
        )
    assert "--quantization is int8, which only Chairlift's own kernels for CPUs compute" in str(refused.value)
    assert "say --quantization none" in str(refused.value)


def test_a_shard_has_its_part_of_the_blocks_or_none_where_it_cuts_one(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path / "model", num_heads=4, num_kv_heads=2, hidden_size=128, head_dim=32)
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf", stored_as=Kind.Q4_1))
    everything = slice(None)
    has_blocks = set()
    for name, whole in checkpoint.tensors.items():
        parts = [Shard(checkpoint.config, rank, 2).of(checkpoint).tensors[name] for rank in range(2)]
        if whole.read_blocks is None:
            assert all(part.read_blocks is None for part in parts)
            continue
        for part in parts:
            assert part.read_blocks is not None
            matrix = part.read_blocks(everything, everything)
            if matrix is not None:
                has_blocks.add(name.split(".")[-2])
                torch.testing.assert_close(matrix.dequantized(), part.read(), rtol=1e-6, atol=1e-6)
            else:
                assert part.shape[1] % 32
    assert {"q_proj", "k_proj", "o_proj", "gate_proj", "embed_tokens"} <= has_blocks


@pytest.mark.model
def test_the_real_model_as_it_is_stored_thinks_as_it_does_in_bfloat16() -> None:
    root = Path(__file__).parents[2]
    place = Path(os.environ.get("CHAIRLIFT_TEST_MODEL", root / "models" / "smollm2"))
    if not place.exists():
        pytest.skip(f"no model in {place}: run `chairlift pull smollm2`")
    token_ids = [(1000 + 97 * place) % 49_152 for place in range(60)]
    exact, ours = (
        one_shot_logits(load(place, **how), token_ids).log_softmax(-1)
        for how in ({"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "stored"})
    )
    likely = exact.topk(20, dim=-1).indices
    assert float((ours - exact).gather(-1, likely).abs().mean()) < 0.15
