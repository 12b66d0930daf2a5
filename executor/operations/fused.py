"""A decoder's operations on a GPU: torch's matrix products, and one kernel for all between two of them.

A layer is four products, attention and four kernels, where plain torch has dozens that each read and write
all of their numbers. After the last layer, a kernel finds what top-k, top-p and min-p leave, where plain
torch sorts the vocabulary. Nothing here waits for the device or looks at its numbers, and a launch depends
only on the number of tokens: so a captured step is also right for other sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from executor.attention.base import AttentionBackend, AttentionSpec, write_slots
from executor.kv_cache import LayerCache
from executor.model.config import Mixture
from executor.operations.arranged import Arranged, arranged
from executor.operations.base import Activation, Experts, Linear, Mlp, Norm, StepTensors
from executor.operations.plain import PlainOperations, routed

TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
MOST_WIDTH: Final = 32_768
"""Of what is normed: one program has a whole row in its registers."""
GATE_TILE: Final = 1024
FEW_ROWS: Final = 16
MANY_ROWS: Final = 64
"""Of a tile of one expert's rows: few while there are no more for each expert."""
FILTER_TILE: Final = (4, 2048)
"""Of a row that is filtered: so many tokens are read at once, in the order of their ids row by row."""
_HALVES: Final = 512
"""Numbers of one half of the heads that a program turns."""


@dataclass(frozen=True, slots=True)
class StackedExperts(Experts):
    """A mixture whose routed experts are one tensor for each projection."""

    gate_up: Tensor
    """`[num_experts, 2 * intermediate_size, hidden_size]`"""
    down: Tensor
    """`[num_experts, hidden_size, intermediate_size]`"""
    shared: Mlp | None
    """The expert that every token has."""


class FusedOperations(PlainOperations):
    """`Operations` in torch and Triton around an attention back end."""

    @classmethod
    def refusal(cls, spec: AttentionSpec, hidden_size: int) -> str | None:
        """Why the kernels cannot compute this, as a clause for people; None when they can.

        In triton's interpreter they run on a CPU, for tests alone.
        """
        if spec.device.type != "cuda":
            return f"the fused kernels run on cuda, not on {spec.device.type}"
        if find_spec("triton") is None:
            return "triton is not installed"
        if spec.dtype not in TYPES:
            return f"the fused kernels do not compute in {str(spec.dtype).removeprefix('torch.')}"
        widest = max(hidden_size, spec.head_dim)
        if widest > MOST_WIDTH:
            return f"rows of {widest} numbers are normed, and {MOST_WIDTH} are the most"
        return not_built(spec.device)

    def __init__(self, attention: AttentionBackend) -> None:
        from executor.operations import triton_filter, triton_kernels, triton_mixture

        super().__init__(attention)
        assert attention.write_kv is write_slots, "keys and values are written here as every back end does"
        self._kernels = triton_kernels
        self._filter = triton_filter.filter_rows
        self._expert_product = triton_mixture.expert_product
        self.name = f"torch with fused kernels, {attention.name} attention"

    def filter_rows(self, weights: Tensor, rows: Tensor, filters: Tensor) -> None:
        """One kernel, which sorts nothing."""
        assert weights.dtype == torch.float32
        self._filter[len(rows),](_rows(weights), rows, _rows(filters), **filter_form(weights.shape[-1]))

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """One kernel."""
        return self._normed(hidden, None, norm, None)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm, *, update_norm: Norm | None) -> Tensor:
        """One kernel."""
        return self._normed(hidden, update, norm, update_norm)

    def pack_experts(self, router: Tensor, mlps: Sequence[Mlp], mixture: Mixture) -> Experts:
        """Stacked, and so for a moment twice in memory: those of one layer."""
        routed_to, shared = mlps[: mixture.num_experts], mlps[mixture.num_experts :]
        return StackedExperts(
            router,
            mixture,
            gate_up=torch.stack([mlp.gate_up.weight for mlp in routed_to]),
            down=torch.stack([mlp.down.weight for mlp in routed_to]),
            shared=shared[0] if shared else None,
        )

    def mixture(self, inputs: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """One kernel for all experts' products, twice; what is routed where is worked out on the device."""
        assert isinstance(experts, StackedExperts)
        per_token, num_experts = experts.mixture.num_experts_per_token, experts.mixture.num_experts
        chosen, weights = routed(functional.linear(inputs.float(), experts.router), experts.mixture)
        rows_per_tile = FEW_ROWS if chosen.numel() <= FEW_ROWS * num_experts else MANY_ROWS
        rows = arranged(chosen[:, :per_token].contiguous(), num_experts, rows_per_tile)
        gate_up = self._multiplied(inputs, rows.tokens, experts.gate_up, rows, rows_per_tile)
        middle = self._gate(gate_up, activation)
        own = torch.arange(len(middle), device=middle.device)
        updates = self._multiplied(middle, own, experts.down, rows, rows_per_tile)
        total = (updates[rows.places].float() * weights[:, :per_token, None]).sum(dim=1)
        if experts.shared is not None:
            middle = self.gated(inputs, experts.shared.gate_up, activation)
            total = total + self.linear(middle, experts.shared.down).float() * weights[:, per_token:]
        return total.to(self._spec.dtype)

    def _multiplied(
        self, inputs: Tensor, sources: Tensor, weight: Tensor, rows: Arranged, rows_per_tile: int
    ) -> Tensor:
        """Each of the rows, which is `inputs` at its source, times the matrix of its expert."""
        out = inputs.new_empty(len(sources), weight.shape[1])
        form = expert_form(weight, rows_per_tile)
        self._expert_product[len(rows.tile_rows), -(-weight.shape[1] // form["TILE_COLUMNS"])](
            _rows(inputs), _rows(weight), out, sources, rows.tile_experts, rows.tile_rows, rows.ends, **form
        )
        return out

    def gated(self, inputs: Tensor, layer: Linear, activation: Activation) -> Tensor:
        """One product for both halves, and one kernel."""
        return self._gate(self.linear(inputs, layer), activation)

    def _gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, width)
        self._kernels.gate[num_tokens, -(-width // GATE_TILE)](
            _rows(gate_up), out, **gate_form(width, activation)
        )
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        step: StepTensors,
        cache: LayerCache,
        *,
        rope: Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> Tensor:
        """One kernel; where heads are normed together, plain torch."""
        spec, num_tokens = self._spec, qkv.shape[0]
        if any(norm is not None and len(norm.weight) > spec.head_dim for norm in (query_norm, key_norm)):
            return super().rotate_and_store(
                qkv, step, cache, rope=rope, query_norm=query_norm, key_norm=key_norm
            )
        query = qkv.new_empty(num_tokens, spec.num_heads, spec.head_dim)
        assert cache.keys.stride() == cache.values.stride()
        assert cache.keys.stride(-1) == 1
        form = rotation_form(spec, has_query_norm=query_norm is not None, has_key_norm=key_norm is not None)
        groups = -(-spec.num_heads // form["HEADS"]) + 2 * -(-spec.num_kv_heads // form["HEADS"])
        self._kernels.rotate_and_store[num_tokens, groups](
            _rows(qkv), step.positions, step.attention.slot_blocks, step.attention.slot_offsets, _rows(rope),
            rope if query_norm is None else query_norm.weight, rope if key_norm is None else key_norm.weight,
            query, cache.keys, cache.values,
            0.0 if query_norm is None else query_norm.eps, 0.0 if key_norm is None else key_norm.eps,
            *cache.keys.stride()[:3], **form,
        )  # fmt: skip
        return query

    def _normed(self, hidden: Tensor, update: Tensor | None, norm: Norm, update_norm: Norm | None) -> Tensor:
        num_tokens, width = hidden.shape
        out = torch.empty(num_tokens, width, dtype=self._spec.dtype, device=hidden.device)
        update_by = norm if update_norm is None else update_norm
        form = norm_form(width, has_update=update is not None, norms_update=update_norm is not None)
        self._kernels.norm[num_tokens,](
            _rows(hidden), hidden if update is None else _rows(update), norm.weight, update_by.weight, out,
            norm.eps, update_by.eps, **form,
        )  # fmt: skip
        return out


def not_built(device: torch.device) -> str | None:
    """Why triton cannot build and launch a kernel here, as a clause for people; None when it can.

    It wants more than to be installed: a C compiler and Python's headers at run time, and a folder to write.
    """
    try:
        from executor.operations import triton_kernels

        gate_up, out = torch.zeros(1, 2, device=device), torch.empty(1, 1, device=device)
        triton_kernels.gate[1, 1](gate_up, out, **gate_form(1, Activation.SILU))
    except Exception as error:  # noqa: BLE001 - whatever it is, torch computes without it
        reason = next(iter(str(error).splitlines()), "")
        return f"triton cannot build a kernel here ({type(error).__name__}: {reason[:200]})"
    return None


# --- the forms of the kernels: their constants, and how they are launched ---------------------------


def norm_form(width: int, *, has_update: bool, norms_update: bool) -> dict[str, Any]:
    """Of `norm`: sixteen numbers of a row for a thread, as far as that goes."""
    return {
        "WIDTH": width,
        "PADDED_WIDTH": _power_of_two(width),
        "HAS_UPDATE": has_update,
        "NORMS_UPDATE": norms_update,
        "num_warps": min(max(1, _power_of_two(width) // 512), 16),
        "enable_fp_fusion": False,
    }


def rotation_form(spec: AttentionSpec, *, has_query_norm: bool, has_key_norm: bool) -> dict[str, Any]:
    """Of `rotate_and_store`."""
    half = spec.head_dim // 2
    padded_half = _power_of_two(half)
    return {
        "NUM_HEADS": spec.num_heads,
        "NUM_KV_HEADS": spec.num_kv_heads,
        "HALF": half,
        "PADDED_HALF": padded_half,
        "HEADS": min(max(1, _HALVES // padded_half), _power_of_two(spec.num_heads)),
        "HAS_QUERY_NORM": has_query_norm,
        "HAS_KEY_NORM": has_key_norm,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def gate_form(width: int, activation: Activation) -> dict[str, Any]:
    """Of `gate`."""
    return {
        "WIDTH": width,
        "TILE": GATE_TILE,
        "ACTIVATION": activation.value,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def expert_form(weight: Tensor, rows_per_tile: int) -> dict[str, Any]:
    """Of `expert_product` with matrices `weight` `[num_experts, columns, width]`."""
    num_experts, num_columns, width = weight.shape
    return {
        "WIDTH": width,
        "NUM_COLUMNS": num_columns,
        "NUM_EXPERTS": num_experts,
        "TILE_ROWS": rows_per_tile,
        "TILE_COLUMNS": 64,
        "TILE_DEPTH": 128 // weight.itemsize,
        "num_warps": 4,
    }


def filter_form(vocab_size: int) -> dict[str, Any]:
    """Of `filter_rows`."""
    depth, width = FILTER_TILE
    return {
        "ID_STEPS": -(-vocab_size.bit_length() // 2),
        "VOCAB": vocab_size,
        "WIDTH": width,
        "DEPTH": depth,
        "num_warps": 16,
        "enable_fp_fusion": False,
    }


def _power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


def _rows(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "the kernels are given no strides of rows"
    return tensor
