"""What an executor can be told. Read once, typed, strict."""

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
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where to compute.")
    num_blocks: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="KV blocks. Default: what fits into memory."
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in a KV block.")
    max_num_seqs: int = Field(default=256, ge=1, le=65_536, description="Most sequences in a step.")
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
        "Default: torch's choice.",
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

    @property
    def token_budget(self) -> int:
        """Most tokens in a step, the default filled in."""
        return self.max_num_batched_tokens or _DEFAULT_TOKEN_BUDGET[self.device]
