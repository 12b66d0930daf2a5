"""Forms of the fused operations' kernels that models ask for, and their compilation for sm_90 without a GPU.

python -m tests.gpu.operation_variants all
"""

import itertools
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from executor.attention.base import AttentionSpec
from executor.operations.base import Activation
from executor.operations.fused import (
    FEW_ROWS,
    MANY_ROWS,
    expert_form,
    filter_form,
    gate_form,
    norm_form,
    rotation_form,
)
from tests.gpu.variants import TYPE_NAMES, compiled

CONTRACTION: Final = re.compile(r"\bfma\.\S*f(32|64)\b")
"""A product that is added without being rounded first."""
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS: Final = (576, 4096, 5376, 16384, 32768)
HEADS: Final = ((9, 3, 64), (32, 8, 128), (16, 8, 256), (28, 4, 128), (8, 4, 20))
"""Query heads, key-value heads, head_dim."""
VOCABULARIES: Final = (1, 300, 49_152, 50_257, 128_256, 262_144)
EXPERTS: Final = ((128, 1536, 2048), (8, 4096, 14336), (60, 2048, 1408))
"""Experts, columns of a product, and what it sums over."""
OPTIONS: Final = ("num_warps", "enable_fp_fusion")

Variant = tuple[str, dict[str, str], dict[str, Any]]
"""A kernel's name, the types of its arguments, and its form."""


def norms(dtype: torch.dtype, widths: tuple[int, ...]) -> Iterator[Variant]:
    types = dict.fromkeys(("hidden", "norm_weight", "update_weight"), "*fp32")
    types |= dict.fromkeys(("update", "out"), f"*{TYPE_NAMES[dtype]}")
    types |= {"eps": "fp32", "update_eps": "fp32"}
    for width, (has_update, norms_update) in itertools.product(
        widths, ((False, False), (True, False), (True, True))
    ):
        yield "norm", types, norm_form(width, has_update=has_update, norms_update=norms_update)


def rotations(dtype: torch.dtype, heads: tuple[tuple[int, int, int], ...]) -> Iterator[Variant]:
    types = dict.fromkeys(("qkv", "query", "keys", "values"), f"*{TYPE_NAMES[dtype]}")
    types |= dict.fromkeys(("rope", "query_weight", "key_weight"), "*fp32")
    types |= dict.fromkeys(("positions", "slot_blocks", "slot_offsets"), "*i64")
    types |= {"query_eps": "fp32", "key_eps": "fp32"}
    for (num_heads, num_kv_heads, head_dim), has_norms in itertools.product(heads, (False, True)):
        spec = AttentionSpec(torch.device("cuda"), dtype, num_heads, num_kv_heads, head_dim, 16, 1.0)
        yield "rotate_and_store", types, rotation_form(spec, has_query_norm=has_norms, has_key_norm=has_norms)


def gates(dtype: torch.dtype) -> Iterator[Variant]:
    types = dict.fromkeys(("gate_up", "out"), f"*{TYPE_NAMES[dtype]}")
    for activation in Activation:
        yield "gate", types, gate_form(14336, activation)


def filters(vocabularies: tuple[int, ...]) -> Iterator[Variant]:
    types = {"weights": "*fp32", "rows": "*i64", "filters": "*fp64"}
    for vocab_size in vocabularies:
        yield "filter_rows", types, filter_form(vocab_size)


def experts(dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Variant]:
    types = dict.fromkeys(("rows", "weight", "out"), f"*{TYPE_NAMES[dtype]}")
    types |= dict.fromkeys(("sources", "tile_experts", "tile_rows", "ends"), "*i64")
    for shape, rows_per_tile in itertools.product(shapes, (FEW_ROWS, MANY_ROWS)):
        weight = torch.empty(shape, dtype=dtype, device="meta")
        yield "expert_product", types, expert_form(weight, rows_per_tile)


def few() -> Iterator[Variant]:
    yield from norms(torch.bfloat16, (4096,))
    yield from rotations(torch.bfloat16, ((32, 8, 128),))
    yield from gates(torch.bfloat16)
    yield from experts(torch.bfloat16, EXPERTS[:1])
    yield from filters((128_256,))


def every() -> Iterator[Variant]:
    for dtype in DTYPES:
        yield from norms(dtype, WIDTHS)
        yield from rotations(dtype, HEADS)
        yield from gates(dtype)
        yield from experts(dtype, EXPERTS)
    yield from filters(VOCABULARIES)


def main() -> int:
    from executor.operations import triton_filter, triton_kernels, triton_mixture

    for name, types, form in few() if sys.argv[1:] == ["few"] else every():
        started = time.monotonic()
        constants = {key: value for key, value in form.items() if key not in OPTIONS}
        options = {key: form[key] for key in OPTIONS if key in form}
        module = {"filter_rows": triton_filter, "expert_product": triton_mixture}.get(name, triton_kernels)
        kernel = compiled(getattr(module, name), types, constants, options)
        seconds = time.monotonic() - started
        print(
            f"{name} {sorted(set(types.values()))} {form}: {len(kernel.asm['cubin'])} bytes, {seconds:.1f} s"
        )
        contraction = CONTRACTION.search(kernel.asm["ptx"])
        if contraction is not None and "enable_fp_fusion" in form:  # a matrix product is free to
            print(f"{name}: {contraction[0]} rounds a product and a sum at once")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
