"""What a model is computed with: the device, the number type, the attention back end, whose kernels.

Asked once, before the weights are loaded. What cannot be had is refused with a sentence; what is taken, and
why not something better, is logged. Knows no weights and no step.
"""

from collections.abc import Callable
from typing import Final

import structlog
import torch

from executor.accelerator import Accelerator, Cuda
from executor.attention.base import AttentionBackend, AttentionSpec, named_backend, select_backend
from executor.attention.flash2 import Flash2Attention
from executor.attention.flash3 import Flash3Attention
from executor.attention.paged_triton import TritonAttention
from executor.attention.reference import ReferenceAttention
from executor.kernels.build import KernelsUnavailableError
from executor.kernels.library import fastest
from executor.model import ModelError
from executor.model.config import ModelConfig
from executor.model.quantized import Quantization
from executor.operations.base import Operations
from executor.operations.cpu import CpuOperations
from executor.operations.fused import FusedOperations
from executor.operations.plain import PlainOperations

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BACKENDS: Final[tuple[type[AttentionBackend], ...]] = (
    Flash3Attention,
    Flash2Attention,
    TritonAttention,
    ReferenceAttention,
)
"""In order of preference."""
CPU_BLOCK_SIZE: Final = 16

log = structlog.get_logger()


def checked_dtype(dtype: str, device: str) -> torch.dtype:
    """The torch type named `dtype`. Raises `ModelError` for one that is not served."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported on {device}; supported: {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def checked_device(device: str) -> torch.device:
    """The torch device of kind `device`, auto being a GPU if there is one. Raises `ModelError` without it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in {"cpu", "cuda"}:
        raise ModelError(f"device {device!r} is not supported; supported: auto, cpu, cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--device is cuda, and {_why_no_gpu()}. Without a GPU, say --device cpu.")
    return torch.device(device)


def _why_no_gpu() -> str:
    """Why torch finds no GPU, and what would help."""
    if torch.version.cuda is None:
        return f"this torch, {torch.__version__}, was built without CUDA: install one that was built with it"
    return (
        f"torch {torch.__version__} finds no GPU: see whether nvidia-smi lists one, whether its driver is "
        f"new enough for CUDA {torch.version.cuda}, whether CUDA_VISIBLE_DEVICES hides it, and whether the "
        "container was given it"
    )


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The device as one that works while the host goes on; None for the CPU."""
    return Cuda(device) if device.type == "cuda" else None


def operations_for(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    block_size: int | None,
    attention: str | None,
    quantization: Quantization = Quantization.NONE,
) -> Operations:
    """What computes a model of this shape; `block_size` None is what suits the attention back end.

    Raises `ModelError` when the back end named `attention`, or every one there is, refuses; when
    `quantization` is what only our own kernels compute, and they cannot be had; and for a mixture of experts
    on a GPU without the fused kernels, where captured steps would have to wait for what the router says.
    """

    def spec_of(own_block_size: int) -> AttentionSpec:
        return AttentionSpec(
            device=device,
            dtype=dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size or own_block_size,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            has_window=any(kind.window is not None for kind in config.layers),
        )

    operations = select_operations(spec_of, attention, config.hidden_size)
    if config.mixture is not None and device.type != "cpu" and not isinstance(operations, FusedOperations):
        raise ModelError(
            f"the model is a mixture of experts, and on {device.type} it would be computed by "
            f"{operations.name}, which cannot: it needs the fused kernels, and the log says why they are not "
            "there. Mend that, or say --device cpu."
        )
    if quantization is not Quantization.NONE and not isinstance(operations, CpuOperations):
        raise ModelError(
            f"--quantization is {quantization.value}, which only Chairlift's own kernels for CPUs compute, "
            f"and here it would be {operations.name} on {device.type}: say --quantization none, or --device "
            "cpu and no --attention. The log says why the kernels were not taken, where that is not it."
        )
    return operations


def select_operations(
    spec_of: Callable[[int], AttentionSpec], attention: str | None, hidden_size: int
) -> Operations:
    """Our own kernels where they can compute this; plain torch where not, and the log says why.

    `spec_of` says what is needed, given the block size that suits who is asked. `attention` names the back
    end to take.
    """
    if attention is not None:
        candidates = [named_backend(BACKENDS, attention)]
        return _around(select_backend(candidates, spec_of), hidden_size, asked_for=attention)
    spec = spec_of(CPU_BLOCK_SIZE)
    if spec.device.type != "cpu":
        return _around(select_backend(BACKENDS, spec_of), hidden_size)
    refusal = CpuOperations.refusal(spec)
    if refusal is None:
        try:
            operations = CpuOperations(fastest(torch.get_num_threads()), spec)
        except KernelsUnavailableError as error:
            refusal = str(error)
        else:
            log.info("operations_selected", operations=operations.name)
            return operations
    return _around(select_backend(BACKENDS, spec_of), hidden_size, no_kernels=refusal)


def _around(backend: AttentionBackend, hidden_size: int, **known: str) -> PlainOperations:
    """Operations in torch around a back end, fused where they can be; what is `known` is logged too."""
    refusal = FusedOperations.refusal(backend.spec, hidden_size)
    if refusal is None:
        operations: PlainOperations = FusedOperations(backend)
    else:
        operations, known = PlainOperations(backend), {"no_kernels": refusal} | known
    log.info("operations_selected", operations=operations.name, **known)
    return operations


def numerics(device: torch.device, dtype: str, operations: Operations, quantization: Quantization) -> str:
    """What the bits of the logits depend on beside the weights."""
    weights = "" if quantization is Quantization.NONE else f", weights {quantization.value}"
    kind = (
        torch.backends.cpu.get_cpu_capability()
        if device.type == "cpu"
        else torch.cuda.get_device_name(device)
    )
    return f"{device.type} {kind}, {dtype}{weights}, {operations.name}, torch {torch.__version__}"
