"""The settings of an executor. Read once, typed, strict."""

from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from rpc.settings import ServiceSettings

_DEFAULT_TOKEN_BUDGET: Final = {"cpu": 256, "cuda": 2048}


class ExecutorSettings(ServiceSettings):
    """Flags and CHAIRLIFT_ environment variables of `chairlift executor`."""

    model: Path = Field(description="Folder of a Hugging Face model, or a GGUF file.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Number type of weights, KV cache and computation."
    )
    quantization: Literal["none", "int8", "stored"] = Field(
        default="none",
        description="Form of the matrices in memory, on cpu. int8: 8 bits; stored: as in a GGUF file "
        "of 4, 5 or 8 bits in blocks of 32, else 8 bits. Less memory and more tokens a second, less exact.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute. auto: cuda where torch finds a GPU, cpu elsewhere."
    )
    attention: Literal["flash3", "flash2", "triton", "reference"] | None = Field(
        default=None,
        description="What computes attention. Default: the first of these that can, on cpu our own kernels.",
    )
    num_blocks: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="KV blocks. Default: what fits into memory."
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Tokens in a KV block. Default: 16, or 256 where flash2 computes attention.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0.0, le=1.0, description="Share of a GPU's memory that the executor may fill."
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Most sequences in a step. Schedulers seat no more than --max-num-batched-tokens.",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Most tokens in a step. Default: 256 on cpu, 2048 on cuda.",
    )
    window: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Most plans that may wait for their results, the running one included.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of a CPU computation, which the ranks on this machine divide among them. "
        "Default: torch's choice, or what the container's limit allows if that is less.",
    )
    tensor_parallel: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Processes that share the model out among them: started here, or by torchrun. "
        "Default: as many as torchrun started, else 1.",
    )

    trace_steps: int = Field(
        default=100,
        ge=0,
        le=2**31 - 1,
        description="With --traces, every how many steps one gets a span of its own; 0: none.",
    )

    def token_budget(self, device: str) -> int:
        """Most tokens in a step on a kind of device, the default filled in."""
        return self.max_num_batched_tokens or _DEFAULT_TOKEN_BUDGET[device]
