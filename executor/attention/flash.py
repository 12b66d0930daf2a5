"""What the adapters of both flash-attn packages check, and how they find their functions."""

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any, Final

import torch

from executor.attention.base import AttentionSpec

HALF_TYPES: Final = (torch.bfloat16, torch.float16)
MOST_HEAD_DIM: Final = 256


def function(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a package that is installed."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def missing(module: str, name: str, arguments: Collection[str]) -> str | None:
    """Why the function cannot be called with all of `arguments`, as a clause; None when it can.

    A package built for another torch fails at its import with whatever the linker says.
    """
    try:
        found = function(module, name)
    except Exception as error:  # noqa: BLE001 - see above
        said = str(error).partition("\n")[0]
        return f"{module} cannot be used: {said}"
    known = inspect.signature(found).parameters
    lacking = [argument for argument in arguments if argument not in known]
    return f"this {module}.{name} does not know {', '.join(lacking)}" if lacking else None


def unfit(spec: AttentionSpec, *, least: int, newest: int | None = None) -> str | None:
    """Why no flash kernel serves `spec`, as a clause; None when one may.

    `least` is the compute capability that is needed, `newest` the last one that there is code for.
    """
    if spec.device.type != "cuda":
        return f"it runs on cuda, not on {spec.device.type}"
    if spec.dtype not in HALF_TYPES:
        return f"it computes in bfloat16 or float16, not in {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim % 8 or spec.head_dim > MOST_HEAD_DIM:
        return f"head_dim {spec.head_dim} is not a multiple of 8 up to {MOST_HEAD_DIM}"
    major, minor = torch.cuda.get_device_capability(spec.device)
    if major < least or (newest is not None and major > newest):
        needed = f"{least}.x" if least == newest else f"{least}.0"
        return f"the GPU has compute capability {major}.{minor}; {needed} is needed"
    return None


def wanted_arguments(spec: AttentionSpec) -> tuple[str, ...]:
    """Arguments that only some models need: older packages lack them."""
    return ("window_size",) * spec.has_window + ("softcap",) * (spec.soft_cap is not None)


def mask_options(spec: AttentionSpec, window: int | None) -> dict[str, Any]:
    """What of `wanted_arguments` a layer is called with; a window is tokens to the left and to the right."""
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    return options if spec.soft_cap is None else options | {"softcap": spec.soft_cap}
