"""Triton's interpreter, mended where it computes what no GPU does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """It cuts bfloat16 off instead of rounding it, warns of infinite exponentials, and copies whole storages
    onto themselves."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(numbers: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if wanted != tl.bfloat16:
            return convert(numbers, given, wanted, mode)
        bits = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16).view(torch.int16)
        return bits.numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield
