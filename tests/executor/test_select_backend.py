"""Which attention back end is taken, and what is said of the others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from executor.attention.base import AttentionSpec, named_backend, select_backend
from executor.attention.reference import ReferenceAttention
from executor.config import ExecutorSettings
from executor.model import ModelError
from executor.model.config import LayerKind, Mixture, ModelConfig, Rope
from executor.operations.plain import PlainOperations
from executor.runner import ModelRunner
from executor.selection import BACKENDS, checked_device, operations_for, select_operations
from tests.executor.attending import spec
from tests.rig import fake_flash


class Picky:
    name = "picky"
    block_size = 16

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str:
        return "head_dim must be 7"


def on_hopper(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name in ("flash_attn_interface", "flash_attn"):
        module = getattr(fake_flash, name)() if name in packages else None
        monkeypatch.setitem(sys.modules, name, module)


def cuda_spec(block_size: int | None = None, dtype: torch.dtype = torch.bfloat16) -> AttentionSpec:
    wanted = spec(dtype=dtype, head_dim=64)
    return replace(wanted, device=torch.device("cuda"), block_size=block_size or 16)


def taken(
    block_size: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, int, dict[str, str]]:
    with capture_logs() as logs:
        backend = select_backend(
            BACKENDS, lambda own: replace(cuda_spec(dtype=dtype), block_size=block_size or own)
        )
    (line,) = [line for line in logs if line["event"] == "attention_selected"]
    assert line["backend"] == backend.name
    return backend.name, backend.spec.block_size, line["refused"]


def test_a_mixture_of_experts_is_refused_on_a_gpu_without_the_fused_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executor.operations.fused.find_spec", lambda _: None)
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_seq_len=8,
        layers=(LayerKind(Rope(1e4), has_experts=True),),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_scale=1.0,
        mixture=Mixture(2, 1, 8, norm_topk_prob=False),
    )
    with pytest.raises(ModelError, match="by torch, reference attention, which cannot: it needs the"):
        operations_for(config, torch.device("cuda"), torch.bfloat16, block_size=16, attention="reference")


def test_the_first_back_end_that_can_serve_is_taken() -> None:
    assert isinstance(select_backend([Picky, ReferenceAttention], lambda _: spec()), ReferenceAttention)  # type: ignore[list-item]


def test_when_none_can_serve_each_one_says_why() -> None:
    with pytest.raises(ModelError, match="picky: head_dim must be 7"):
        select_backend([Picky], lambda _: spec())  # type: ignore[list-item]


def test_flash3_is_taken_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch, "flash_attn_interface", "flash_attn")
    assert taken() == ("flash3", 16, {})


def test_flash2_alone_makes_blocks_of_256_unless_another_size_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    on_hopper(monkeypatch, "flash_attn")
    name, block_size, refused = taken()
    assert (name, block_size) == ("flash2", 256)
    assert "flash_attn_interface cannot be used" in refused["flash3"]
    name, block_size, refused = taken(block_size=64)
    assert (name, block_size) == ("triton", 64)
    assert refused["flash2"] == "block_size 64 is not a multiple of 256"


def test_without_packages_or_in_float32_our_own_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")
    on_hopper(monkeypatch)
    assert taken()[:2] == ("triton", 16)
    on_hopper(monkeypatch, "flash_attn_interface", "flash_attn")
    name, block_size, refused = taken(dtype=torch.float32)
    assert (name, block_size) == ("triton", 16)
    assert refused["flash3"] == "it computes in bfloat16 or float16, not in float32"


def test_without_triton_there_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    monkeypatch.setattr("executor.attention.paged_triton.find_spec", lambda _: None)
    name, _, refused = taken()
    assert name == "reference"
    assert refused["triton"] == "triton is not installed"


def test_a_name_overrides_and_one_that_cannot_serve_is_refused() -> None:
    operations = select_operations(lambda own: replace(spec(), block_size=own), "reference", 64)
    assert isinstance(operations, PlainOperations)
    with pytest.raises(ModelError, match="flash3: it runs on cuda, not on cpu"):
        select_operations(lambda own: replace(spec(), block_size=own), "flash3", 64)
    with pytest.raises(
        ModelError, match="'flash4' is not known; there are flash3, flash2, triton, reference"
    ):
        named_backend(BACKENDS, "flash4")


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError, match=r"--device is cuda, and this torch, .*, was built without CUDA"):
        checked_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ModelError, match=r"finds no GPU: .* driver .* CUDA 13.0, .* say --device cpu"):
        checked_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert checked_device("auto") == torch.device("cuda")


def test_the_token_budget_follows_the_device_unless_told(tmp_path: Path) -> None:
    settings = ExecutorSettings(model=tmp_path, listen="unix:/x")
    assert (settings.token_budget("cpu"), settings.token_budget("cuda")) == (256, 2048)
    told = ExecutorSettings(model=tmp_path, listen="unix:/x", max_num_batched_tokens=77)
    assert told.token_budget("cuda") == 77


def test_the_cpu_keeps_its_kernels_and_its_blocks(tiny_folder: Path) -> None:
    runner = ModelRunner.load(
        tiny_folder, dtype="float32", device="auto", num_blocks=8, block_size=None, max_num_seqs=2
    )
    if torch.cuda.is_available():
        pytest.skip("a GPU is there: auto takes it")
    assert (runner.device, runner.block_size, runner.pipeline) == ("cpu", 16, None)
    assert "kernels" in runner.fingerprints.numerics
