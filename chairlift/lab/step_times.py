"""How long a step takes: a model in place of an executor. Pure.

There are two models. `Linear` has prices for tokens, which were measured somewhere. `Roofline` knows a
model's shape and a device's speed, and adds up what a step must compute, read and exchange:

    matrices     the slower of 2 · parameters · tokens operations and one reading of the weights
    attention    the slower of 4 · layers · width · (query, key) pairs operations and one reading of the KV
    exchange     two all-reduces a layer of tokens · width, among the devices
    overhead     a constant for each step

Peaks are the makers' figures. No kernel reaches them: the share that is reached is one number for arithmetic
and one for memory, the same for every preset and never fitted to a paper.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from scheduler.plan import BatchPlan

COMPUTE_SHARE = 0.6  # of the peak, in matrices
MEMORY_SHARE = 0.8  # of the peak, streaming
OVERHEAD_SECONDS = 0.002  # of a step: launching kernels, sampling, the scheduler
ALL_REDUCE_SECONDS = 15e-6  # of one, beyond what its bytes take
BYTES_PER_VALUE = 2  # 16-bit weights, activations and KV


class StepTimes(Protocol):
    """Seconds of a plan that computes something."""

    def seconds(self, plan: BatchPlan) -> float:
        """How long an executor takes for `plan`."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan asks for."""

    num_tokens: int
    num_context_tokens: int  # KV entries read, each row's once
    num_pairs: int  # (query, key) pairs


def work_of(plan: BatchPlan) -> Work:
    """Adds up the columns. Chunks stand at the end of a plan, and `filled` names them in the same order."""
    num_rows, num_tokens = len(plan.rows), sum(plan.num_tokens)
    pairs = plan.positions_sum + num_rows  # as if every row had one token
    at = num_rows
    for _, seq_id, end in reversed(plan.filled):
        at -= 1
        if at < 0 or plan.seq_ids[at] != seq_id:
            break  # the rest of `filled` are last chunks of one token among the decoding rows
        count = plan.num_tokens[at]
        start = end - count
        pairs += count * start + count * (count + 1) // 2 - (start + 1)
    return Work(num_tokens, plan.positions_sum + num_tokens, pairs)


@dataclass(frozen=True, slots=True)
class Linear:
    """So much for a step, for each token it computes, each row and each token of context it reads."""

    base_us: float
    per_token_us: float
    per_row_us: float = 0.0
    per_context_token_us: float = 0.0

    def seconds(self, plan: BatchPlan) -> float:
        """How long an executor takes for `plan`."""
        num_tokens = sum(plan.num_tokens)
        return (
            self.base_us
            + self.per_token_us * num_tokens
            + self.per_row_us * len(plan.rows)
            + self.per_context_token_us * (plan.positions_sum + num_tokens)
        ) / 1e6


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder of 16-bit weights."""

    num_params: float
    num_layers: int
    hidden_size: int
    kv_size: int  # KV heads · head size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.kv_size * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one device."""

    flops: float  # 16-bit, with 32-bit sums
    bytes_per_second: float
    memory_bytes: float
    link_bytes_per_second: float  # to its peers


A100_40 = Device(312e12, 1.555e12, 40e9, 300e9)
A100_80 = Device(312e12, 2.039e12, 80e9, 300e9)
A10G = Device(125e12, 0.600e12, 24e9, 32e9)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on so many devices, the work split evenly among them."""

    model: Model
    device: Device
    num_devices: int = 1

    def seconds(self, plan: BatchPlan) -> float:
        """How long an executor takes for `plan`."""
        model, device, count = self.model, self.device, self.num_devices
        work = work_of(plan)
        flops = COMPUTE_SHARE * device.flops * count
        bandwidth = MEMORY_SHARE * device.bytes_per_second * count
        matrices = max(
            2 * model.num_params * work.num_tokens / flops, model.num_params * BYTES_PER_VALUE / bandwidth
        )
        attention = max(
            4 * model.num_layers * model.hidden_size * work.num_pairs / flops,
            model.kv_bytes_per_token * work.num_context_tokens / bandwidth,
        )
        return matrices + attention + self._exchange(work.num_tokens) + OVERHEAD_SECONDS

    def _exchange(self, num_tokens: int) -> float:
        if self.num_devices == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden_size * BYTES_PER_VALUE
        share = 2 * (self.num_devices - 1) / self.num_devices  # a ring passes everything around nearly twice
        each = share * num_bytes / self.device.link_bytes_per_second + ALL_REDUCE_SECONDS
        return 2 * self.model.num_layers * each

    def num_kv_tokens(self, memory_share: float = 0.9) -> int:
        """Tokens of KV that fit beside the weights when so much of the memory may be used."""
        free = memory_share * self.device.memory_bytes * self.num_devices
        free -= self.model.num_params * BYTES_PER_VALUE
        return int(free // self.model.kv_bytes_per_token)


PRESETS = {
    "gpt3-175b-16xa100-40": Roofline(Model(174.6e9, 96, 12288, 12288), A100_40, 16),
    "llama2-7b-a10g": Roofline(Model(6.74e9, 32, 4096, 4096), A10G),
    "mistral-7b-a100-80": Roofline(Model(7.24e9, 32, 4096, 1024), A100_80),
    "opt-13b-a100-40": Roofline(Model(12.85e9, 40, 5120, 5120), A100_40),
}


class StepTimesError(ValueError):
    """A preset or file that names no step times: a sentence."""


def preset(name: str) -> Roofline:
    """The one of this name. Raises StepTimesError."""
    if name not in PRESETS:
        raise StepTimesError(f"no preset is named {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def from_json(path: Path) -> Linear:
    """Prices from a file: {"base_us": …, "per_token_us": …}. Raises StepTimesError."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        why = f"{error.strerror or error} (`chairlift calibrate` makes them)"
        raise StepTimesError(f"step times cannot be read from {path}: {why}") from error
    except (ValueError, RecursionError) as error:
        raise StepTimesError(f"step times cannot be read from {path}: {error}") from error
    known = [item.name for item in fields(Linear)]
    if not isinstance(values, dict):
        raise StepTimesError(f"{path}: an object with {', '.join(known)} is wanted")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise StepTimesError(f"{path}: {unknown[0]!r} is unknown; there are {', '.join(known)}")
    for name in known[:2]:
        if name not in values:
            raise StepTimesError(f"{path}: {name!r} is missing")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:  # noqa: PLR2004 - eleven days
            raise StepTimesError(f"{path}: {name} is {value!r}, a number of microseconds >= 0 is wanted")
    if not values["base_us"] + values["per_token_us"]:
        raise StepTimesError(f"{path}: base_us and per_token_us are both 0: time would stand still")
    return Linear(**values)
