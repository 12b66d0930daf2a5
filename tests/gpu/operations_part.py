"""The part of the GPU check that has the fused operations beside plain torch, each on the same numbers."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from executor.attention.base import AttentionSpec
from executor.attention.reference import ReferenceAttention
from executor.kv_cache import LayerCache, layers_of
from executor.model.config import Mixture, Rope
from executor.model.rope import rope_table
from executor.operations.base import Activation, Experts, Mlp, Norm, StepTensors
from executor.operations.fused import FusedOperations
from executor.operations.plain import PlainOperations
from tests.gpu import machine as machines
from tests.gpu.attention_parts import random_tables, rows_on
from tests.gpu.machine import Machine, WrongError

MOST_ROUNDINGS: Final = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 64.0}
"""How far a number may be from plain torch's, in roundings of itself or of its row's mean square root."""
SHAPES: Final = (
    ("Llama 3 8B", 4096, 14336, 8, 4, 128),
    ("SmolLM2", 576, 1536, 3, 3, 64),
    ("Gemma 3 27B", 5376, 21504, 16, 2, 128),
    ("odd", 1000, 1500, 2, 5, 20),
)
"""Hidden size, columns of the MLP, key-value heads, query heads for each, head_dim."""
SMALL: Final = (("small", 72, 40, 2, 3, 20),)
BLOCK_SIZE: Final = 16
MOST_HIDDEN: Final = 1024
"""Of a mixture of experts here."""
CONTEXTS: Final = [(1, 700), (1, 30), (100, 612), (5, 5)]
SMALL_CONTEXTS: Final = [(1, 20), (3, 9)]


class Case:
    """One model's shapes in one type: what its operations are asked, on random numbers."""

    def __init__(
        self, machine: Machine, shape: tuple[str, int, int, int, int, int], dtype: torch.dtype
    ) -> None:
        _, hidden, mlp, num_kv_heads, group, head_dim = shape
        self.spec: AttentionSpec = machine.spec(head_dim, num_kv_heads, group, BLOCK_SIZE, dtype)
        backend = ReferenceAttention(self.spec)
        self.fused, self.plain = FusedOperations(backend), PlainOperations(backend)
        self._generator = torch.Generator(machine.device).manual_seed(1)
        self._device = machine.device
        lengths = CONTEXTS if machine.is_gpu else SMALL_CONTEXTS
        tables, self.num_blocks = random_tables(lengths, BLOCK_SIZE, seed=1)
        self.step: StepTensors = self.plain.prepare(rows_on(tables, lengths, BLOCK_SIZE))
        num_tokens = len(self.step.token_ids)
        self.hidden = self.random(num_tokens, hidden)
        self.update = self.random(num_tokens, hidden).to(dtype)
        width = (self.spec.num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = self.random(num_tokens, width).to(dtype)
        self.inputs = self.random(num_tokens, 64).to(dtype)
        self.gate_up = self.plain.pack_gated(self.random(2 * mlp, 64).to(dtype), None)
        self.experts = {
            operations: self.mixture(operations, min(hidden, MOST_HIDDEN), dtype)
            for operations in (self.fused, self.plain)
        }
        self.norms = [Norm(self.random(hidden), eps) for eps in (1e-6, 1e-5)]
        self.head_norms = [Norm(self.random(head_dim), 1e-6) for _ in "qk"]
        self.rope = rope_table(Rope(5e5), head_dim, 1024, None, machine.device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)

    def mixture(self, operations: PlainOperations, hidden: int, dtype: torch.dtype) -> Experts:
        """Ten experts, three for each token, and a shared one; the same for both."""
        generator, self._generator = self._generator, torch.Generator(self._device).manual_seed(2)
        mlps = []
        for size in (*[48] * 10, 80):
            gate_up = self.random(2 * size, hidden).div(hidden**0.5).to(dtype)
            down = self.random(hidden, size).div(size**0.5).to(dtype)
            mlps.append(Mlp(operations.pack_gated(gate_up, None), operations.pack(down, None)))
        router = self.random(11, hidden)
        self._generator = generator
        return operations.pack_experts(
            router, mlps, Mixture(10, 3, 48, norm_topk_prob=True, shared_intermediate_size=80)
        )

    def mixed(self, operations: PlainOperations) -> list[Tensor]:
        experts = self.experts[operations]
        return [
            operations.mixture(
                self.update[:, : experts.router.shape[1]].contiguous(), experts, Activation.SILU
            )
        ]

    def cache(self) -> LayerCache:
        of = self.spec
        shape = (1, self.num_blocks, of.num_kv_heads, 2, of.block_size, of.head_dim)
        return layers_of(torch.zeros(shape, dtype=of.dtype, device=of.device))[0]

    def added(self, operations: PlainOperations, *, norms_update: bool) -> list[Tensor]:
        hidden = self.hidden.clone()
        by = self.norms[1] if norms_update else None
        return [operations.add_norm(hidden, self.update, self.norms[0], update_norm=by), hidden]

    def stored(self, operations: PlainOperations, *, norms_heads: bool) -> list[Tensor]:
        cache = self.cache()
        query_norm, key_norm = self.head_norms if norms_heads else (None, None)
        query = operations.rotate_and_store(
            self.qkv, self.step, cache, rope=self.rope, query_norm=query_norm, key_norm=key_norm
        )
        return [query, cache.keys, cache.values]

    def questions(self) -> dict[str, Callable[[PlainOperations], list[Tensor]]]:
        return {
            "norm": lambda on: [on.norm(self.hidden, self.norms[0])],
            "add": lambda on: self.added(on, norms_update=False)[1:],
            "add_norm": lambda on: self.added(on, norms_update=False),
            "normed update": lambda on: self.added(on, norms_update=True),
            "heads": lambda on: self.stored(on, norms_heads=False),
            "normed heads": lambda on: self.stored(on, norms_heads=True),
            **{
                activation.value: lambda on, by=activation: [on.gated(self.inputs, self.gate_up, by)]  # type: ignore[misc]
                for activation in Activation
            },
            "experts": self.mixed,
        }


SAME_BITS: Final = ("add", "heads")
"""What has no sum over a row in it."""


def roundings(found: Tensor, expected: Tensor) -> float:
    """The largest distance, in roundings of its type; NaN where one of them is."""
    square_root = expected.float().pow(2).mean(-1, keepdim=True).sqrt()
    size = torch.maximum(expected.float().abs(), square_root).clamp(min=1e-30)
    return float(((found.float() - expected.float()).abs() / size).max()) / torch.finfo(found.dtype).eps


def is_replayed(machine: Machine, case: Case) -> bool:
    """Whether captured kernels compute on other numbers what kernels that were not captured compute."""
    results: list[Tensor] = []

    def work() -> None:
        results[:] = [each for ask in case.questions().values() for each in ask(case.fused)]

    graph = machine.accelerator.capture(work)
    captured = list(results)
    for numbers in (case.hidden, case.update, case.qkv, case.inputs):
        numbers.copy_(torch.roll(numbers, 1, 0))
    case.step.positions.copy_(case.step.positions.flip(0))
    graph.replay()
    replayed = [each.clone() for each in captured]
    work()
    return all(found.equal(expected) for found, expected in zip(replayed, results, strict=True))


@torch.inference_mode()
def operations(machine: Machine) -> dict[str, Any]:
    """Every fused operation beside plain torch's, in each type, and once more out of a captured graph."""
    if not machine.is_gpu and (refusal := machines.interpreter_refusal()) is not None:
        return {"refused": refusal}
    types = (torch.bfloat16, torch.float16, torch.float32) if machine.is_gpu else (torch.float32,)
    worst: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    not_run: list[str] = []
    for shape, dtype in itertools.product(SHAPES if machine.is_gpu else SMALL, types):
        if machine.is_late:
            not_run.append(f"{shape[0]} {dtype}")
            continue
        case, kind = Case(machine, shape, dtype), str(dtype).removeprefix("torch.")
        for name, ask in case.questions().items():
            pairs = list(zip(ask(case.fused), ask(case.plain), strict=True))
            off = max(roundings(*pair) for pair in pairs)
            worst.setdefault(kind, {})[name] = max(worst.get(kind, {}).get(name, 0.0), off)
            if name in SAME_BITS and not all(found.equal(expected) for found, expected in pairs):
                wrong.append(f"{shape[0]} {kind} {name}: other bits, {off:.1f} roundings off")
            elif not off <= MOST_ROUNDINGS[dtype]:
                wrong.append(f"{shape[0]} {kind} {name}: {off:.1f} roundings off")
        if machine.is_gpu and not is_replayed(machine, case):
            wrong.append(f"{shape[0]} {kind}: a captured step computes something else")
    result = {"worst_roundings": worst, "wrong": wrong, "not_run": not_run}
    if wrong:
        raise WrongError(f"{len(wrong)} answers differ from plain torch's, the first: {wrong[0]}", result)
    return result
