"""A decoder's operations by our own kernels: each is one call and one parallel region.

Every result of a token is summed in an order that depends on nothing but the model and the instruction set:
the bits are the same whatever the batch, the chunks, the block size and the number of threads.

Results are in buffers that are made once for each shape and reused by every layer and step: steady decoding
allocates nothing, and all its layers are one call (`executor.operations.tape`).
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor import memory
from executor.attention.base import AttentionSpec
from executor.inputs import StepInputs
from executor.kernels.library import (
    BLOCK_BYTES,
    COLUMN_PADDING,
    MOST_HEAD_DIM,
    MOST_QUERY_ROWS,
    MOST_TOKENS_MIXED,
    UNIT_PADDING,
    AttentionCall,
    EmbedCall,
    Finish,
    Kernels,
    Kind,
    LinearCall,
    MixtureCall,
    NormCall,
    Operation,
    PackingCall,
    RotateCall,
    SamplingCall,
    StepArrays,
)
from executor.kv_cache import KVCache, LayerCache
from executor.memory import HUGE_PAGE_BYTES, Arena
from executor.model.config import Mixture
from executor.model.quantized import QuantizedMatrix
from executor.operations.base import Activation, Experts, Linear, Matrix, Mlp, Norm, StepTensors
from executor.operations.tape import Tapes
from executor.philox import uniforms
from executor.rows import SampleRow

_GATES = {Activation.SILU: Finish.SILU_GATE, Activation.GELU_TANH: Finish.GELU_TANH_GATE}
_EVERYTHING = 2**31 - 1
"""A window that no context reaches."""
_PANEL = 16
_UNIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedLinear(Linear):
    """A projection in panels (`linear.hpp`), with the call that computes it, as far as it is known."""

    call: LinearCall

    def call_for(self, inputs: Tensor, out: Tensor, soft_cap: float) -> LinearCall:
        """The call that computes `out`."""
        call = LinearCall.from_buffer_copy(self.call)
        call.rows, call.row_stride = inputs.data_ptr(), inputs.stride(0)
        call.out, call.out_stride = out.data_ptr(), out.stride(0)
        call.num_rows, call.soft_cap = inputs.shape[0], soft_cap
        return call


@dataclass(frozen=True, slots=True)
class PackedExperts(Experts):
    """A mixture in panels, with the call that computes it, as far as it is known."""

    mlps: tuple[Mlp, ...]
    """Kept because the calls only have their addresses."""
    call: MixtureCall
    gate_up: ctypes.Array[LinearCall]
    """Where `call` looks for each expert's projections."""
    down: ctypes.Array[LinearCall]
    """The same."""
    widest: int
    """Columns of the widest expert's middle."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the kernels of one step read beside its tokens and the layers' tensors."""

    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    first_block: Tensor
    """running count of blocks of query rows, of one key-value head"""


class Buffers:
    """Tensors by name and shape, `[rows, width]`: zero from `width` to the row's padded end, for ever.

    The same name and shape give the same memory again; more rows than ever before make it anew, and `moved`
    is called. In huge pages: a product writes rows that lie a page or more apart, more of them at a time than
    the processor remembers addresses of small pages.
    """

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._arena = Arena()
        self._storage: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, int, torch.dtype, int], Tensor] = {}

    def take(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The buffer `name` for so many rows."""
        view = self._views.get((name, width, dtype, num_rows))
        return view if view is not None else self._made(name, num_rows, width, dtype)

    def _made(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        key = (name, width, dtype)
        storage = self._storage.get(key)
        if storage is None or storage.shape[0] < num_rows:
            capacity = max(num_rows, 0 if storage is None else 2 * storage.shape[0])
            row_width = padded(width, UNIT_PADDING)
            num_elements = capacity * row_width
            # What fills huge pages of its own gives them back when it is made anew.
            if num_elements * dtype.itemsize >= HUGE_PAGE_BYTES:
                storage = memory.zeros((num_elements,), dtype)
            else:
                storage = self._arena.zeros(num_elements, dtype)
            storage = self._storage[key] = storage.view(capacity, row_width)
            self._moved()
            self._views = {place: view for place, view in self._views.items() if place[:3] != key}
        view = self._views[*key, num_rows] = storage[:num_rows, :width]
        return view


class CpuOperations:
    """`Operations` by kernels, for float32 and bfloat16."""

    row_invariant = True

    def __init__(self, kernels: Kernels, spec: AttentionSpec) -> None:
        self._kernels = kernels
        self._spec = spec
        self.block_size = spec.block_size
        self._is_bfloat16 = spec.dtype == torch.bfloat16
        self._arena = Arena()
        self._step_arrays = StepArrays()
        self._step_in_progress: StepTensors | None = None
        self._tapes = Tapes()
        self._buffers = Buffers(moved=self._tapes.forget)
        self.name = f"{kernels.name} kernels {kernels.digest}"

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Why the kernels cannot compute this, as a clause for people; None when they can."""
        if spec.device.type != "cpu":
            return f"the kernels run on the cpu, not on {spec.device.type}"
        if spec.head_dim % _PANEL or spec.head_dim > MOST_HEAD_DIM:
            return f"head_dim {spec.head_dim} is not a multiple of {_PANEL} up to {MOST_HEAD_DIM}"
        return None

    # --- once per model -----------------------------------------------------------------------------

    def pack(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        """In panels of sixteen columns."""
        num_rows, in_features = weight.shape
        columns = padded(num_rows, COLUMN_PADDING)
        return self._packed(weight, bias, np.arange(num_rows), columns, (in_features, num_rows), gated=False)

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        """In panels of sixteen columns, gate and up alternating."""
        num_rows, in_features = weight.shape
        half = num_rows // 2
        place = np.arange(half) // _PANEL * COLUMN_PADDING + np.arange(half) % _PANEL
        columns = 2 * padded(half, _PANEL)
        places = np.concatenate([place, place + _PANEL])
        return self._packed(weight, bias, places, columns, (in_features, half), gated=True)

    def pack_experts(self, router: Tensor, mlps: Sequence[Mlp], mixture: Mixture) -> PackedExperts:
        """A call that lists all experts' projections; the router in panels of float32."""
        packed_router = self.pack(router, None)
        gate_up, down = ((LinearCall * len(mlps))() for _ in range(2))
        for index, mlp in enumerate(mlps):
            assert isinstance(mlp.gate_up, PackedLinear)
            assert isinstance(mlp.down, PackedLinear)
            gate_up[index], down[index] = mlp.gate_up.call, mlp.down.call
        call = MixtureCall(
            router=packed_router.call,
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            num_experts=mixture.num_experts,
            num_routed=mixture.num_experts_per_token,
            num_chosen=mixture.num_experts_per_token + len(mlps) - mixture.num_experts,
            norms_weights=mixture.norm_topk_prob,
            out_features=mlps[0].down.out_features,
        )
        widest = max(mlp.down.in_features for mlp in mlps)
        return PackedExperts(packed_router.weight, mixture, tuple(mlps), call, gate_up, down, widest)

    def _packed(
        self,
        weight: Matrix,
        bias: Tensor | None,
        bias_places: np.ndarray,
        num_columns: int,
        features: tuple[int, int],
        *,
        gated: bool,
    ) -> PackedLinear:
        in_features, out_features = features
        if isinstance(weight, QuantizedMatrix):
            packed, num_units, bits = self._packed_codes(weight, num_columns, gated=gated)
        else:
            packed = self._packed_numbers(weight, num_columns, gated=gated)
            num_units, bits = padded(in_features, UNIT_PADDING) * weight.itemsize // _UNIT_BYTES, 0
        packed_bias = None
        if bias is not None:
            packed_bias = torch.zeros(num_columns)
            packed_bias[torch.from_numpy(bias_places)] = bias.float()
        call = LinearCall(
            weight=packed.data_ptr(),
            bias=None if packed_bias is None else packed_bias.data_ptr(),
            num_units=num_units,
            num_pairs=num_columns // COLUMN_PADDING,
            num_columns=out_features,
            weight_bits=bits,
        )
        return PackedLinear(packed, packed_bias, in_features, out_features, call)

    def _packed_numbers(self, weight: Tensor, num_columns: int, *, gated: bool) -> Tensor:
        """Numbers of their own type, float32 or bfloat16."""
        num_rows, in_features = weight.shape
        weight = weight.contiguous()
        packed = self._arena.zeros(num_columns * padded(in_features, UNIT_PADDING), weight.dtype)
        is_bfloat16 = weight.dtype == torch.bfloat16
        self._kernels.pack_weight(
            weight.data_ptr(), num_rows, in_features, gated, packed.data_ptr(), is_bfloat16
        )
        return packed

    def _packed_codes(
        self, weight: QuantizedMatrix, num_columns: int, *, gated: bool
    ) -> tuple[Tensor, int, int]:
        """Codes, the blocks of a panel, and the bits of a code."""
        num_rows, num_blocks = weight.scales.shape
        codes, scales, offsets = (each.contiguous() for each in (weight.codes, weight.scales, weight.offsets))
        num_bytes = num_columns // _PANEL * num_blocks * BLOCK_BYTES[weight.bits]
        packed = self._arena.zeros(num_bytes, torch.uint8)
        call = PackingCall(
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            offsets=offsets.data_ptr(),
            packed=packed.data_ptr(),
            num_rows=num_rows,
            num_blocks=num_blocks,
            bits=weight.bits,
            gated=gated,
        )
        self._kernels.pack_codes(byref(call))
        return packed, num_blocks, weight.bits

    # --- once per step ------------------------------------------------------------------------------

    def prepare(self, inputs: StepInputs) -> StepTensors:
        """The step's arrays as they are, and attention's work cut into blocks of query rows."""
        spec = self._spec
        query_rows = np.diff(inputs.query_start_loc) * (spec.num_heads // spec.num_kv_heads)
        first_block = np.zeros_like(inputs.query_start_loc)
        np.cumsum(-(-query_rows // MOST_QUERY_ROWS), out=first_block[1:])
        return StepTensors(
            token_ids=torch.from_numpy(inputs.token_ids),
            positions=torch.from_numpy(inputs.positions),
            logits_indices=torch.from_numpy(inputs.logits_indices),
            attention=AttentionStep(
                slots=torch.from_numpy(inputs.slot_mapping),
                block_tables=torch.from_numpy(inputs.block_tables),
                seq_lens=torch.from_numpy(inputs.seq_lens),
                query_start=torch.from_numpy(inputs.query_start_loc),
                first_block=torch.from_numpy(first_block),
            ),
        )

    def _arrays(self, step: StepTensors) -> int:
        """Where all calls look for the arrays of the step in progress, which is this one from now on."""
        if self._step_in_progress is not step:
            self._step_in_progress = step  # alive as long as somebody may look
            arrays, attention = self._step_arrays, step.attention
            arrays.token_ids, arrays.positions = step.token_ids.data_ptr(), step.positions.data_ptr()
            arrays.slots = attention.slots.data_ptr()
            arrays.block_tables = attention.block_tables.data_ptr()
            arrays.table_stride = attention.block_tables.shape[1]
            arrays.seq_lens = attention.seq_lens.data_ptr()
            arrays.query_start = attention.query_start.data_ptr()
            arrays.first_block = attention.first_block.data_ptr()
            arrays.num_rows = len(attention.seq_lens)
        return ctypes.addressof(self._step_arrays)

    def repeat(self, step: StepTensors, kv_cache: KVCache) -> Tensor | None:
        """By the tape of a step of as many tokens."""
        self._arrays(step)
        tape = self._tapes.find((len(step.token_ids), kv_cache))
        return None if tape is None else tape.compute(self._kernels, is_bfloat16=self._is_bfloat16)

    def embed(self, step: StepTensors, table: Linear, scale: float) -> Tensor:
        """Rows of the packed table."""
        assert isinstance(table, PackedLinear)
        num_tokens = len(step.token_ids)
        hidden = self._buffers.take("hidden", num_tokens, table.in_features, torch.float32)
        call = EmbedCall(
            weight=table.call.weight,
            step=self._arrays(step),
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride(0),
            num_tokens=num_tokens,
            num_units=table.call.num_units,
            in_features=table.in_features,
            weight_bits=table.call.weight_bits,
            scale=scale,
        )
        self._compute(Kind.EMBED, call)
        return hidden

    def logits(self, normed: Tensor, step: StepTensors, head: Linear, soft_cap: float | None) -> Tensor:
        """Logits of the sampling rows, straight from the float32 sums."""
        self._tapes.end(normed)
        num_rows = len(step.logits_indices)
        rows = normed
        if num_rows < normed.shape[0]:  # else it is every row, in order: a step of decodes alone
            rows = self._buffers.take("sampling rows", num_rows, normed.shape[1], normed.dtype)
            torch.index_select(normed, 0, step.logits_indices, out=rows)
        finish = Finish.AS_IS if soft_cap is None else Finish.SOFT_CAP
        return self._linear("logits", rows, head, finish, torch.float32, soft_cap=soft_cap or 0.0)

    def choose(self, allowed: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """Row by row, without sorting the vocabulary."""
        num_rows, vocab_size = allowed.shape
        params = [row.params for row in rows]
        numbers = uniforms([each.seed for each in params], [row.output_index for row in rows])
        wishes = np.array([(each.temperature, each.top_p, each.min_p) for each in params]).T.copy()
        top_k = np.array([each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params])
        token_ids, highest = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
        call = SamplingCall(
            logits=allowed.data_ptr(),
            stride=allowed.stride(0),
            uniforms=numbers.ctypes.data,
            temperatures=wishes[0].ctypes.data,
            top_p=wishes[1].ctypes.data,
            min_p=wishes[2].ctypes.data,
            top_k=top_k.ctypes.data,
            token_ids=token_ids.ctypes.data,
            highest=highest.ctypes.data,
            num_rows=num_rows,
            vocab_size=vocab_size,
        )
        self._kernels.choose_tokens(byref(call))
        return token_ids.tolist(), highest.tolist()

    # --- once or more per layer ---------------------------------------------------------------------

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """`hidden`, normed."""
        return self._normed(hidden, None, norm, None)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm, *, update_norm: Norm | None) -> Tensor:
        """Add in place, and norm the sum."""
        return self._normed(hidden, update, norm, update_norm)

    def linear(self, inputs: Tensor, layer: Linear) -> Tensor:
        """One product."""
        return self._linear("linear", inputs, layer, Finish.AS_IS, self._spec.dtype)

    def update(self, inputs: Tensor, layer: Linear) -> Tensor:
        """One product."""
        return self.linear(inputs, layer)

    def gated(self, inputs: Tensor, layer: Linear, activation: Activation) -> Tensor:
        """One product of both halves; the gate is applied to the float32 sums."""
        return self._linear("gated", inputs, layer, _GATES[activation], self._spec.dtype)

    def mixture(self, inputs: Tensor, experts: Experts, activation: Activation) -> Tensor:
        """One call: the rows of all experts are computed side by side."""
        assert isinstance(experts, PackedExperts)
        call = MixtureCall.from_buffer_copy(experts.call)
        num_tokens, in_features = inputs.shape
        most_tokens = min(num_tokens, MOST_TOKENS_MIXED)
        most_rows = most_tokens * call.num_chosen

        def room(name: str, num_rows: int, width: int, dtype: torch.dtype) -> int:
            return self._buffers.take(f"mixture {name}", num_rows, width, dtype).data_ptr()

        factor_width = max(padded(in_features, UNIT_PADDING), padded(experts.widest, UNIT_PADDING))
        middle = self._buffers.take("mixture middle", most_rows, experts.widest, self._spec.dtype)
        out = self._buffers.take("mixture", num_tokens, call.out_features, self._spec.dtype)
        call.rows, call.row_stride = inputs.data_ptr(), inputs.stride(0)
        call.wide = room("wide", most_tokens, in_features, torch.float32)
        call.logits = room("logits", most_tokens, call.router.num_columns, torch.float32)
        call.weights = room("weights", most_tokens, call.num_chosen, torch.float32)
        call.chosen = room("chosen", most_tokens, call.num_chosen, torch.int32)
        call.places = room("places", most_tokens, call.num_chosen, torch.int32)
        call.tokens = room("tokens", most_rows, 1, torch.int32)
        call.experts = room("experts", most_rows, 1, torch.int32)
        call.factors = room("factors", most_rows, factor_width, torch.float32)
        call.factor_bytes = factor_width * torch.float32.itemsize
        call.middle, call.middle_stride = middle.data_ptr(), middle.stride(0)
        call.updates = room("updates", most_rows, call.out_features, torch.float32)
        call.out, call.out_stride = out.data_ptr(), out.stride(0)
        call.num_tokens = num_tokens
        self._compute(Kind.MIX, call, _GATES[activation])
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
        """Heads, norms, rotation and the write into the cache, token by token."""
        spec, num_tokens = self._spec, qkv.shape[0]
        # What the kernels count on (rows.hpp): they are given two pointers and no strides.
        run_bytes = spec.block_size * spec.head_dim * spec.dtype.itemsize
        assert cache.values.data_ptr() - cache.keys.data_ptr() == run_bytes, "values lie behind their keys"
        query = self._buffers.take("query", num_tokens, spec.num_heads * spec.head_dim, spec.dtype)
        call = RotateCall(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            step=self._arrays(step),
            rope=rope.data_ptr(),
            query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
            key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
            query=query.data_ptr(),
            query_stride=query.stride(0),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            num_tokens=num_tokens,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            query_eps=0.0 if query_norm is None else query_norm.eps,
            key_eps=0.0 if key_norm is None else key_norm.eps,
            query_norm_heads=0 if query_norm is None else len(query_norm.weight) // spec.head_dim,
            key_norm_heads=0 if key_norm is None else len(key_norm.weight) // spec.head_dim,
        )
        self._compute(Kind.ROTATE, call)
        return query

    def attend(self, query: Tensor, step: StepTensors, cache: LayerCache, *, window: int | None) -> Tensor:
        """Tile by tile of the context, in its order."""
        attended = self._buffers.take("attended", query.shape[0], query.shape[1], query.dtype)
        spec = self._spec
        call = AttentionCall(
            query=query.data_ptr(),
            query_stride=query.stride(0),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            step=self._arrays(step),
            out=attended.data_ptr(),
            out_stride=attended.stride(0),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            window=_EVERYTHING if window is None else min(window, _EVERYTHING),
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
        )
        self._compute(Kind.ATTEND, call)
        return attended

    def _normed(self, hidden: Tensor, update: Tensor | None, norm: Norm, update_norm: Norm | None) -> Tensor:
        num_tokens, size = hidden.shape
        normed = self._buffers.take("normed", num_tokens, size, self._spec.dtype)
        call = NormCall(
            hidden=hidden.data_ptr(),
            hidden_stride=hidden.stride(0),
            weight=norm.weight.data_ptr(),
            out=normed.data_ptr(),
            out_stride=normed.stride(0),
            num_tokens=num_tokens,
            size=size,
            eps=norm.eps,
        )
        if update is not None:
            call.update, call.update_stride = update.data_ptr(), update.stride(0)
        if update_norm is not None:
            call.update_weight, call.update_eps = update_norm.weight.data_ptr(), update_norm.eps
        self._compute(Kind.NORM, call)
        return normed

    def _linear(
        self,
        name: str,
        inputs: Tensor,
        layer: Linear,
        finish: Finish,
        dtype: torch.dtype,
        *,
        soft_cap: float = 0.0,
    ) -> Tensor:
        assert isinstance(layer, PackedLinear)
        out = self._buffers.take(name, inputs.shape[0], layer.out_features, dtype)
        call = layer.call_for(inputs, out, soft_cap)
        factors = self._buffers.take("factors", inputs.shape[0], layer.in_features, torch.float32)
        call.factors = factors.data_ptr()
        self._compute(Kind.LINEAR, call, finish, float_out=dtype == torch.float32)
        return out

    def _compute(
        self, kind: Kind, call: ctypes.Structure, finish: Finish = Finish.AS_IS, *, float_out: bool = False
    ) -> None:
        operation = Operation(kind, finish, float_out, ctypes.addressof(call))
        self._kernels.compute(byref(operation), 1, self._is_bfloat16)
        self._tapes.add(operation, call)


def padded(count: int, multiple: int) -> int:
    """`count`, or the next multiple."""
    return -(-count // multiple) * multiple
