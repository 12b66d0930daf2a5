"""The device that is checked: a GPU, or the CPU in its place, on which all sizes are small and no figure
counts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from executor.accelerator import Accelerator, Cuda
from executor.attention.base import AttentionBackend, AttentionSpec
from executor.selection import BACKENDS
from tests.rig.fake_device import FakeDevice

Report = Callable[[dict[str, Any]], None]
"""Takes what a part has found so far."""


class WrongError(Exception):
    """A part found something wrong; `result` has what it found."""

    def __init__(self, sentence: str, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__(sentence)


@dataclass(frozen=True)
class Machine:
    """A device and what is measured of it."""

    accelerator: Accelerator
    deadline: float = math.inf
    """after which long parts end early, on the clock of `time.monotonic`"""

    @classmethod
    def here(cls, seconds: float) -> "Machine":
        is_there = torch.cuda.is_available()
        accelerator = Cuda(torch.device("cuda")) if is_there else FakeDevice()
        return cls(accelerator, time.monotonic() + seconds)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What is checked; the interpreter knows no bfloat16."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    @property
    def is_lost(self) -> bool:
        """Whether this process can use the device no more: after an illegal access every call fails."""
        try:
            self.synchronize()
        except Exception:  # noqa: BLE001 - whatever it is
            return True
        return False

    def seconds(self, work: Callable[[], None], *, times: int = 5, warm_ups: int = 2) -> float:
        """The median of so many runs by the GPU's own clock; on the CPU one run."""
        if not self.is_gpu:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        for _ in range(warm_ups):
            work()
        self.synchronize()
        marks = []
        for _ in range(times):
            marks.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]
            marks[-1][0].record()
            work()
            marks[-1][1].record()
        self.synchronize()
        return median(start.elapsed_time(end) for start, end in marks) / 1e3

    def spec(
        self,
        head_dim: int,
        num_kv_heads: int,
        group: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> AttentionSpec:
        return AttentionSpec(
            device=self.device,
            dtype=dtype or self.dtype,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            scale=head_dim**-0.5,
            soft_cap=soft_cap,
            has_window=window is not None,
        )

    def refusals(self, spec: AttentionSpec) -> dict[str, str | None]:
        """Of each back end; on a CPU the Triton kernels run in the interpreter."""
        found = {backend.name: backend.refusal(spec) for backend in BACKENDS}
        if not self.is_gpu:
            found["triton"] = interpreter_refusal()
        return found

    def backends(self, spec: AttentionSpec) -> list[type[AttentionBackend]]:
        refusals = self.refusals(spec)
        return [backend for backend in BACKENDS if refusals[backend.name] is None]


def interpreter_refusal() -> str | None:
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    return None if triton.knobs.runtime.interpret else "TRITON_INTERPRET is not 1"
