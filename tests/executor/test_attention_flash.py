"""The adapters of both flash-attn packages, against fakes that demand what the packages do."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.attention.base import AttentionBackend, AttentionSpec
from executor.attention.flash2 import Flash2Attention
from executor.attention.flash3 import HEURISTIC, Flash3Attention
from tests.executor.attending import relative_error, run, spec
from tests.rig import fake_flash

torch.set_num_threads(1)

rows_of_a_step = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 9]), st.integers(0, 70)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    modules = {
        "flash_attn_interface": fake_flash.flash_attn_interface(),
        "flash_attn": fake_flash.flash_attn(),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return modules


def on_cuda(**changes: object) -> AttentionSpec:
    wanted = spec(**{"dtype": torch.bfloat16, "block_size": 256, **changes})  # type: ignore[arg-type]
    return AttentionSpec(
        **{name: getattr(wanted, name) for name in AttentionSpec.__slots__} | {"device": torch.device("cuda")}
    )


@pytest.mark.parametrize(("adapter", "block_size"), [(Flash3Attention, 16), (Flash2Attention, 256)])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=rows_of_a_step,
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 64]),
    dtype=st.sampled_from([(torch.bfloat16, 5e-3), (torch.float16, 2e-3)]),
    window=st.sampled_from([None, 1, 20]),
    soft_cap=st.sampled_from([None, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_packages_get_what_they_demand_and_the_result_is_float64s(
    adapter: type[AttentionBackend], block_size: int, packages: dict[str, ModuleType],
    lengths: list[tuple[int, int]], group: int, head_dim: int, dtype: tuple[torch.dtype, float],
    window: int | None, soft_cap: float | None, seed: int,
) -> None:  # fmt: skip
    wanted = spec(2, group, head_dim, block_size, dtype[0], soft_cap)
    result, expected = run(
        wanted, lengths, np.random.default_rng(seed), unused=0.0, window=window, backend=adapter(wanted)
    )
    assert relative_error(result, expected) < dtype[1]


def test_flash2_takes_one_function_for_decode_rows_and_the_other_for_the_rest(
    packages: dict[str, ModuleType],
) -> None:
    wanted = spec(block_size=256, dtype=torch.bfloat16)
    for lengths in ([(1, 9), (1, 300)], [(1, 9), (3, 5)]):
        run(wanted, lengths, np.random.default_rng(0), backend=Flash2Attention(wanted))
    assert packages["flash_attn"].calls == ["flash_attn_with_kvcache", "flash_attn_varlen_func"]


def test_flash3_fixes_the_splits_of_decode_steps_alone(packages: dict[str, ModuleType]) -> None:
    wanted = spec(dtype=torch.bfloat16)
    for lengths in ([(1, 9), (1, 300)], [(1, 70), (1, 2)], [(1, 9), (3, 5)]):
        run(wanted, lengths, np.random.default_rng(0), backend=Flash3Attention(wanted))
    first, second, mixed = packages["flash_attn_interface"].splits
    assert first == second > 1
    assert mixed == HEURISTIC


@pytest.mark.parametrize("adapter", [Flash3Attention, Flash2Attention])
def test_an_installed_package_on_hopper_is_taken(
    adapter: type[AttentionBackend], packages: dict[str, ModuleType]
) -> None:
    assert adapter.refusal(on_cuda(soft_cap=30.0)) is None


@pytest.mark.parametrize("adapter", [Flash3Attention, Flash2Attention])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": torch.float32}, "it computes in bfloat16 or float16, not in float32"),
        ({"head_dim": 12}, "head_dim 12 is not a multiple of 8"),
        ({"head_dim": 264}, "head_dim 264 is not a multiple of 8 up to 256"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(
    adapter: type[AttentionBackend], changes: dict[str, object], why: str, packages: dict[str, ModuleType]
) -> None:
    assert why in (adapter.refusal(on_cuda(**changes)) or "")


def test_flash2_refuses_small_blocks(packages: dict[str, ModuleType]) -> None:
    assert Flash2Attention.refusal(on_cuda(block_size=16)) == "block_size 16 is not a multiple of 256"


def test_an_older_gpu_gets_flash2_alone(
    packages: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert Flash2Attention.refusal(on_cuda()) is None
    assert "compute capability 8.6; 9.x is needed" in (Flash3Attention.refusal(on_cuda()) or "")


def test_a_newer_gpu_than_hopper_has_no_flash3(
    packages: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert "compute capability 10.0; 9.x is needed" in (Flash3Attention.refusal(on_cuda()) or "")
    assert Flash2Attention.refusal(on_cuda()) is None


@pytest.mark.parametrize(
    ("flag", "changes", "word"),
    [
        ("SOFTCAP", {"soft_cap": 30.0}, "soft caps"),
        ("LOCAL", {"has_window": True}, "windows"),
        ("FP16", {"dtype": torch.float16}, "float16"),
        ("PAGEDKV", {}, "pages"),
    ],
)
def test_what_was_left_out_of_the_build_is_refused_to_who_needs_it(
    flag: str,
    changes: dict[str, Any],
    word: str,
    packages: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    needing = replace(on_cuda(), **changes)
    assert Flash3Attention.refusal(needing) == f"this flash_attn_interface was built without {word}"
    assert (Flash3Attention.refusal(on_cuda()) is None) == bool(changes)
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": False}}  # type: ignore[attr-defined]
    assert Flash3Attention.refusal(needing) is None
    config.CONFIG = "of another package"  # type: ignore[attr-defined]
    assert Flash3Attention.refusal(needing) is None


def test_heads_larger_than_any_of_the_build_are_refused(
    packages: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModuleType("flash_attn_config")
    left_out = {f"FLASHATTENTION_DISABLE_HDIM{dim}": True for dim in (96, 192, 256)}
    config.CONFIG = {"build_flags": left_out}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    assert Flash3Attention.refusal(on_cuda(head_dim=256)) == (
        "this flash_attn_interface was built without heads of 256"
    )
    assert Flash3Attention.refusal(on_cuda(head_dim=96)) is None, "it gets the next larger size"
    assert Flash3Attention.refusal(on_cuda(head_dim=128)) is None


def test_an_old_package_is_refused_by_its_signature(packages: dict[str, ModuleType]) -> None:
    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        raise AssertionError

    packages["flash_attn"].flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    assert "does not know block_table, num_splits" in (Flash2Attention.refusal(on_cuda()) or "")


def test_a_package_without_windows_and_soft_caps_serves_models_without_them(
    packages: dict[str, ModuleType],
) -> None:
    known = packages["flash_attn_interface"].flash_attn_with_kvcache

    def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]  # noqa: ANN202
        q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,  # noqa: ANN001
        softmax_scale=None, causal=False, num_splits=0,  # noqa: ANN001
    ):  # fmt: skip
        return known(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale,
            causal=causal, num_splits=num_splits,
        )  # fmt: skip

    packages["flash_attn_interface"].flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    assert Flash3Attention.refusal(on_cuda()) is None
    wanted = spec(dtype=torch.bfloat16)
    run(wanted, [(1, 20), (3, 9)], np.random.default_rng(0), backend=Flash3Attention(wanted))
    assert "does not know softcap" in (Flash3Attention.refusal(on_cuda(soft_cap=30.0)) or "")
    assert "does not know window_size" in (Flash3Attention.refusal(replace(on_cuda(), has_window=True)) or "")


def test_a_package_that_is_not_there_or_broken_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "flash_attn_interface cannot be used" in (Flash3Attention.refusal(on_cuda()) or "")


@pytest.mark.parametrize("adapter", [Flash3Attention, Flash2Attention])
def test_on_the_cpu_they_are_not_tried(adapter: type[AttentionBackend]) -> None:
    assert adapter.refusal(spec()) == "it runs on cuda, not on cpu"
