"""Every form of the Triton kernels that the GPU check uses, and their compilation for sm_90 without a GPU.

    python -m tests.gpu.variants all            each of them
    python -m tests.gpu.variants all 2 8        every eighth, from the third on

What is compiled is kept where Triton keeps its kernels, and launches find it there.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from executor.attention.paged_triton import chunk_tiles, decode_tiles, power_of_two

TYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS: Final = ("query", "keys", "values", "out")
FLOAT_POINTERS: Final = ("partial_out", "partial_max", "partial_sum")
INT_POINTERS: Final = ("block_tables", "seq_lens", "query_start_loc")


@dataclass(frozen=True)
class Variant:
    """One form of `attend`; `is_split` decides between decode rows and chunks."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    kind: str
    """split, whole (decode rows, one part), chunk"""
    has_window: bool = False
    has_soft_cap: bool = False

    @property
    def name(self) -> str:
        extra = " window" * self.has_window + " soft cap" * self.has_soft_cap
        return f"{TYPE_NAMES[self.dtype]} d{self.head_dim} block {self.block_size} {self.kind}{extra}"


ALL: Final = (
    *(
        Variant(torch.bfloat16, head_dim, block_size, kind)
        for head_dim in (64, 128)
        for block_size in (16, 64, 256)
        for kind in ("split", "whole", "chunk")
    ),
    *(Variant(torch.float16, 128, 16, kind) for kind in ("split", "chunk")),
    *(Variant(torch.float32, 64, 16, kind) for kind in ("split", "whole", "chunk")),
    *(Variant(torch.float32, 128, 16, kind) for kind in ("split", "chunk")),
    *(
        Variant(torch.bfloat16, 128, 16, kind, has_window=has_window, has_soft_cap=has_soft_cap)
        for has_window, has_soft_cap in ((True, False), (False, True), (True, True))
        for kind in ("split", "chunk")
    ),
    *(Variant(torch.bfloat16, 256, 16, kind, has_window=True) for kind in ("split", "chunk")),
    *(Variant(torch.bfloat16, 256, 16, kind, has_soft_cap=True) for kind in ("split", "chunk")),
    *(
        Variant(torch.bfloat16, 256, 16, kind, has_window=True, has_soft_cap=True)
        for kind in ("split", "chunk")
    ),
)
FEW: Final = (
    Variant(torch.bfloat16, 128, 16, "split"),
    Variant(torch.bfloat16, 64, 16, "chunk", has_window=True, has_soft_cap=True),
)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> Any:
    """A kernel's machine code for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    # Pointers and strides are multiples of 16, as the launcher finds them where it looks.
    aligned = [
        (place,)
        for place, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True))
        if name not in constants
        and not parameter.do_not_specialize
        and (signature[name].startswith("*") or name.endswith("_stride"))
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


STEPS_OWN: Final = frozenset({"table_stride", "num_splits", "tiles_per_row", "first_row"})
"""Integers of `attend` and `combine` that differ between two steps of one model."""


def specialized() -> set[str]:
    """Of `STEPS_OWN` those that a launch looks at, and may have a kernel built for."""
    from executor.attention import triton_kernels

    return {
        parameter.name
        for kernel in (triton_kernels.attend, triton_kernels.combine)
        for parameter in kernel.params
        if parameter.name in STEPS_OWN and not parameter.do_not_specialize
    }


def attend_compiled(variant: Variant) -> Any:
    from executor.attention import triton_kernels

    group = 4
    tiles = chunk_tiles(group, variant.dtype) if variant.kind == "chunk" else decode_tiles(group)
    pointer = f"*{TYPE_NAMES[variant.dtype]}"
    partial = "*fp32" if variant.kind == "split" else pointer
    types = (
        dict.fromkeys(POINTERS, pointer)
        | dict.fromkeys(FLOAT_POINTERS, partial)
        | dict.fromkeys(INT_POINTERS, "*i32")
        | {"scale": "fp32", "soft_cap": "fp32"}
    )
    constants = {
        "HEAD_DIM": variant.head_dim,
        "PADDED_DIM": power_of_two(variant.head_dim),
        "BLOCK_SIZE": variant.block_size,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.positions,
        "HAS_SOFT_CAP": variant.has_soft_cap,
        "HAS_WINDOW": variant.has_window,
        "IS_SPLIT": variant.kind == "split",
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compiled(triton_kernels.attend, types, constants, options)


def combine_compiled(dtype: torch.dtype, head_dim: int) -> Any:
    from executor.attention import triton_kernels

    types = {"out": f"*{TYPE_NAMES[dtype]}"} | dict.fromkeys(FLOAT_POINTERS, "*fp32")
    constants = {"HEAD_DIM": head_dim, "PADDED_DIM": power_of_two(head_dim)}
    return compiled(triton_kernels.combine, types, constants, {"num_warps": 4})


def wanted(arguments: list[str]) -> tuple[Variant, ...]:
    """`few` or `all`, and of all of them a share."""
    first, of = (int(each) for each in arguments[1:] or ("0", "1"))
    return FEW if arguments[:1] == ["few"] else ALL[first::of]


def main() -> int:
    if names := specialized():
        print(f"a step may have a kernel built for its own {', '.join(sorted(names))}")
        return 1
    for variant in wanted(sys.argv[1:]):
        started = time.monotonic()
        kernel = attend_compiled(variant)
        size, shared = len(kernel.asm["cubin"]), kernel.metadata.shared
        print(f"{variant.name}: {size} bytes, {shared} shared, {time.monotonic() - started:.1f} s")
        if shared > 227 * 1024:
            print(f"{variant.name}: more shared memory than a multiprocessor of sm_90 has")
            return 1
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        combine_compiled(dtype, head_dim)
    return 0


if __name__ == "__main__":
    sys.exit(main())
