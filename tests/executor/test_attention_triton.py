"""Our Triton kernels, in Triton's interpreter, against float64; and whether they compile for a GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed (extra `triton`)")

from executor.attention import paged_triton
from executor.attention.paged_triton import TritonAttention
from executor.attention.splits import MOST_SPLITS, num_splits
from tests.executor.attending import relative_error, run, spec
from tests.gpu import variants

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}

rows_of_a_step = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 9, 40]), st.integers(0, 150)).map(
        lambda row: (row[0], row[0] + row[1])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=8, deadline=None)
@given(
    lengths=rows_of_a_step,
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([16, 24, 64]),
    block_size=st.sampled_from([1, 5, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.sampled_from([None, None, 1, 33, 100]),
    soft_cap=st.sampled_from([None, None, 0.5, 50.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_mixed_batches_equal_float64_and_never_read_unused_slots(
    lengths: list[tuple[int, int]], num_kv_heads: int, group: int, head_dim: int, block_size: int,
    dtype: torch.dtype, window: int | None, soft_cap: float | None, seed: int,
) -> None:  # fmt: skip
    wanted = spec(num_kv_heads, group, head_dim, block_size, dtype, soft_cap)
    backend = TritonAttention(wanted)
    result, expected = run(
        wanted, lengths, np.random.default_rng(seed), unused=np.nan, window=window, backend=backend
    )
    assert relative_error(result, expected) < TOLERANCE[dtype]


def test_a_lone_long_context_is_cut_into_parts_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = spec(num_kv_heads=1, group=2, head_dim=16)
    results = []
    for splits in (1, 4, 16):
        monkeypatch.setattr(paged_triton, "num_splits", lambda *_, splits=splits: splits)
        result, expected = run(
            wanted, [(1, 700), (1, 3), (1, 65)], np.random.default_rng(3), backend=TritonAttention(wanted)
        )
        assert relative_error(result, expected) < 1e-5
        results.append(result)
    assert relative_error(results[1], results[0]) < 1e-6


def test_splits_fill_the_gpu_and_depend_on_the_rows_alone() -> None:
    assert num_splits(1, 1) == MOST_SPLITS
    assert num_splits(32, 8) == 4
    assert num_splits(256, 8) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "it does not compute in float64"),
        ({"head_dim": 512}, "head_dim 512 is more than 256"),
        ({"group": 65}, "more than 64 query heads"),
    ],
)
def test_what_it_cannot_serve_is_said(change: dict[str, object], why: str) -> None:
    wanted = replace(spec(**change), device=torch.device("cuda"))  # type: ignore[arg-type]
    assert why in (TritonAttention.refusal(wanted) or "")


def test_it_serves_what_a_gpu_can_compute() -> None:
    assert TritonAttention.refusal(replace(spec(), device=torch.device("cuda"))) is None
    assert TritonAttention.refusal(spec()) == "it runs on cuda, not on cpu"


def compile_for_hopper(selection: str, timeout: float, variants: str = "tests.gpu.variants") -> None:
    """In a process without the interpreter."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", variants, selection],
        capture_output=True, text=True, timeout=timeout, env=environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_compile_for_hopper() -> None:
    compile_for_hopper("few", 110)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_variant_compiles_for_hopper() -> None:
    compile_for_hopper("all", 850)


def test_the_gpu_check_has_few_variants() -> None:
    assert len(variants.ALL) <= 40
