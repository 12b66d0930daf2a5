"""Fills a model's weights from a checkpoint, and refuses a checkpoint that does not fit exactly.

Every tensor that the shape of the model asks for must be there in that size; nothing is left as it was
allocated. Projections that read the same input are stored as one matrix, so that a layer runs four matrix
products:

    qkv:      [query rows | key rows | value rows]   x hidden_size
    gate_up:  [gate rows | up rows]                  x hidden_size
    router:   [experts | shared expert's gate]       x hidden_size

A mixture's experts are as many small MLPs, and its router is never quantised: what it chooses would change.

How a matrix lies in memory is up to the operations that will compute with it: each is packed as soon as it is
read, so that a model is never in memory twice.
"""

import hashlib
import math
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from executor.model.checkpoint import Checkpoint, StoredTensor
from executor.model.config import LayerKind, Mixture, ModelConfig
from executor.model.errors import ModelError
from executor.model.quantized import LARGEST_IN_8_BITS, Quantization, QuantizedMatrix, quantized, stacked
from executor.operations.base import Experts, Linear, Matrix, Mlp, Norm, Operations

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; only GGUF files have them."""
ROUTER = "mlp.gate"
SHARED_EXPERT = "mlp.shared_expert"
SHARED_GATE = "mlp.shared_expert_gate"

_SAMPLE_SIZE = 256
_MOST_NAMED = 3

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are `[hidden_size]`, those of queries and keys of a head's size or of all."""

    attention_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: Linear
    attention_update_norm: Norm | None
    mlp_norm: Norm
    mlp: Mlp | Experts
    mlp_update_norm: Norm | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, on the device; matrices in the number type of the computation, norms in float32."""

    embeddings: Linear
    """`[vocab_size, hidden_size]`"""
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    """`[vocab_size, hidden_size]`; the same object as the embeddings when tied."""
    rope_divisors: Tensor | None
    """`[head_dim / 2]`, float32, on the CPU."""
    fingerprint: str
    """SHA-256 (hex) over names, shapes, stored types and a sample of the values."""
    num_bytes: int


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    quantization: Quantization = Quantization.NONE,
) -> ModelWeights:
    """Read `checkpoint` as `dtype` onto `device`, packed for `operations`. Raises `ModelError`.

    Its matrices are in the form that `quantization` names.
    """
    check_names_and_shapes(checkpoint)
    return _Reader(checkpoint, dtype, device, operations, quantization).weights()


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a layer's norms are called; None is one that the model does not have."""

    attention: str
    query: str | None
    key: str | None
    attention_update: str | None
    mlp: str
    mlp_update: str | None


def norm_names(config: ModelConfig) -> NormNames:
    """Llama calls the norm before the MLP by the name that Gemma has for the one after attention."""
    between = "post_attention_layernorm"
    sandwiched = config.update_norms
    return NormNames(
        attention="input_layernorm",
        query="self_attn.q_norm" if config.qk_norm else None,
        key="self_attn.k_norm" if config.qk_norm else None,
        attention_update=between if sandwiched else None,
        mlp="pre_feedforward_layernorm" if sandwiched else between,
        mlp_update="post_feedforward_layernorm" if sandwiched else None,
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model needs."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_out_bias),
    }
    dense = _mlp_shapes("mlp", hidden, mlp, has_bias=config.mlp_bias)
    experts = {} if config.mixture is None else _mixture_shapes(config.mixture, hidden)
    names = norm_names(config)
    norms = dict.fromkeys((names.attention, names.attention_update, names.mlp, names.mlp_update), (hidden,))
    together = config.norms_heads_together
    norms |= {
        names.query: (q_size if together else config.head_dim,),
        names.key: (kv_size if together else config.head_dim,),
    }
    for layer, kind in enumerate(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in norms.items() if name is not None}
        matrices = projections | (experts if kind.has_experts else dense)
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _mlp_shapes(
    prefix: str, hidden_size: int, size: int, *, has_bias: bool = False
) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and biases of an MLP's matrices."""
    return {
        f"{prefix}.gate_proj": (size, hidden_size, has_bias),
        f"{prefix}.up_proj": (size, hidden_size, has_bias),
        f"{prefix}.down_proj": (hidden_size, size, has_bias),
    }


def _mixture_shapes(mixture: Mixture, hidden_size: int) -> dict[str, tuple[int, int, bool]]:
    """The same of a mixture's, and of what weighs its experts."""
    shapes = {ROUTER: (mixture.num_experts, hidden_size, False)}
    for expert in range(mixture.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden_size, mixture.intermediate_size)
    if mixture.shared_intermediate_size is not None:
        shapes |= _mlp_shapes(SHARED_EXPERT, hidden_size, mixture.shared_intermediate_size)
        shapes[SHARED_GATE] = (1, hidden_size, False)
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights take in memory: matrices and biases in `dtype`, norms and routers in float32."""
    in_full = ("norm.weight", f"{ROUTER}.weight", f"{SHARED_GATE}.weight")
    return sum(
        math.prod(shape) * (torch.float32 if name.endswith(in_full) else dtype).itemsize
        for name, shape in expected_shapes(config).items()
    )


def check_names_and_shapes(checkpoint: Checkpoint) -> None:
    """Raises `ModelError` unless every tensor that the model needs is there in its size."""
    expected = expected_shapes(checkpoint.config)
    missing = [name for name in expected if name not in checkpoint.tensors]
    if HEAD in missing:
        raise ModelError(
            f"{checkpoint.path}: {HEAD} is missing and tie_word_embeddings is false: "
            "the model has no output head."
        )
    if missing:
        raise ModelError(f"{checkpoint.path}: {_named(missing)} missing.")
    for name, shape in expected.items():
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise ModelError(
                f"{checkpoint.path}: tensor {name} has shape {list(found)}; the model's configuration needs "
                f"{list(shape)}."
            )
    optional = {HEAD, ROPE_DIVISORS}
    extra = [
        name
        for name in checkpoint.tensors
        if name not in expected and name not in optional and not name.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        log.warning(
            "tensors_ignored", path=str(checkpoint.path), reason=f"{_named(extra)} not part of the model"
        )


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    if len(names) == 1:
        return f"tensor {shown} is"
    return f"tensors {shown} and {more} more are" if more > 0 else f"tensors {shown} are"


class _Reader:
    """Reads tensors one by one into their places, and digests each on its way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        quantization: Quantization,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._norm_names = norm_names(checkpoint.config)
        self._dtype = dtype
        self._device = device
        self._operations = operations
        self._quantization = quantization
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def weights(self) -> ModelWeights:
        # A tied checkpoint may store its head once more: compared before the embeddings are packed away.
        table = self._matrix(EMBEDDINGS)
        self._check_tied_head(table)
        embeddings = self._operations.pack(table, None)
        del table
        layers = tuple(
            self._layer(f"model.layers.{layer}.", kind) for layer, kind in enumerate(self._config.layers)
        )
        final_norm = self._norm("model.", "norm")
        tied = self._config.tie_word_embeddings
        return ModelWeights(
            embeddings=embeddings,
            layers=layers,
            final_norm=final_norm,
            head=embeddings if tied else self._operations.pack(self._matrix(HEAD), None),
            rope_divisors=self._rope_divisors(),
            fingerprint=self._digest.hexdigest(),
            num_bytes=self._num_bytes,
        )

    def _layer(self, prefix: str, kind: LayerKind) -> LayerWeights:
        config, norms, pack = self._config, self._norm_names, self._operations.pack
        attention = f"{prefix}self_attn."
        return LayerWeights(
            attention_norm=self._norm(prefix, norms.attention),
            qkv=pack(*self._projection(config.qkv_bias, *(f"{attention}{part}_proj" for part in "qkv"))),
            query_norm=self._optional_norm(prefix, norms.query),
            key_norm=self._optional_norm(prefix, norms.key),
            attention_out=pack(*self._projection(config.attention_out_bias, f"{attention}o_proj")),
            attention_update_norm=self._optional_norm(prefix, norms.attention_update),
            mlp_norm=self._norm(prefix, norms.mlp),
            mlp=self._experts(prefix) if kind.has_experts else self._mlp(f"{prefix}mlp", config.mlp_bias),
            mlp_update_norm=self._optional_norm(prefix, norms.mlp_update),
        )

    def _mlp(self, prefix: str, has_bias: bool = False) -> Mlp:  # noqa: FBT001, FBT002 - private
        gate_up = self._projection(has_bias, f"{prefix}.gate_proj", f"{prefix}.up_proj")
        down = self._projection(has_bias, f"{prefix}.down_proj")
        return Mlp(self._operations.pack_gated(*gate_up), self._operations.pack(*down))

    def _experts(self, prefix: str) -> Experts:
        mixture = self._config.mixture
        assert mixture is not None, "a layer with experts is a layer of a mixture"
        routers = [ROUTER]
        mlps = [self._mlp(f"{prefix}mlp.experts.{expert}") for expert in range(mixture.num_experts)]
        if mixture.shared_intermediate_size is not None:
            routers.append(SHARED_GATE)
            mlps.append(self._mlp(prefix + SHARED_EXPERT))
        router = self._fused(*(f"{prefix}{name}.weight" for name in routers), dtype=torch.float32)
        return self._operations.pack_experts(router, mlps, mixture)

    def _norm(self, prefix: str, name: str) -> Norm:
        weight = self._fused(f"{prefix}{name}.weight", dtype=torch.float32)
        return Norm(weight + self._config.norm_offset, self._config.rms_norm_eps)

    def _optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self._norm(prefix, name)

    def _projection(self, has_bias: bool, *names: str) -> tuple[Matrix, Tensor | None]:  # noqa: FBT001 - private
        weight = self._matrix(*(f"{name}.weight" for name in names))
        return weight, self._fused(*(f"{name}.bias" for name in names)) if has_bias else None

    def _matrix(self, *names: str) -> Matrix:
        """The matrices `names`, one under the other, in the form that was asked for."""
        if self._quantization is Quantization.NONE:
            return self._fused(*names)
        matrix = stacked([self._quantized(name, self._checkpoint.tensors[name]) for name in names])
        self._num_bytes += matrix.num_bytes
        return matrix

    def _quantized(self, name: str, stored: StoredTensor) -> QuantizedMatrix:
        if self._quantization is Quantization.STORED and stored.read_blocks is not None:
            everything = slice(None)
            matrix = stored.read_blocks(everything, everything)
            if matrix is not None:
                self._add_to_digest(name, stored)
                return matrix
        matrix = quantized(self._read(name, stored))
        if not matrix.offsets.isfinite().all():  # 128 scales: a scale that is infinite makes them so too
            raise ModelError(
                f"{self._checkpoint.path}: tensor {name} holds numbers beyond {LARGEST_IN_8_BITS:,}, "
                "which blocks of 8 bits cannot hold: say --quantization none."
            )
        return matrix

    def _fused(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors `names`, one under the other, in the computation's type if no other is named."""
        stored = [self._checkpoint.tensors[name] for name in names]
        num_rows = [tensor.shape[0] for tensor in stored]
        place = torch.empty(
            (sum(num_rows), *stored[0].shape[1:]), dtype=dtype or self._dtype, device=self._device
        )
        for name, tensor, rows in zip(names, stored, torch.split(place, num_rows), strict=True):
            rows.copy_(self._read(name, tensor))
        self._num_bytes += place.nbytes
        return place

    def _read(self, name: str, stored: StoredTensor) -> Tensor:
        values = stored.read()
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(values)):  # a NaN is both of them
            raise ModelError(f"{self._checkpoint.path}: tensor {name} holds numbers that are not finite.")
        self._add_to_digest(name, stored)
        return values

    def _add_to_digest(self, name: str, stored: StoredTensor) -> None:
        # Of the whole tensor, if this is a part: however it is shared out, a model is the same model.
        whole = stored.whole or stored
        self._digest.update(f"{name} {list(whole.shape)} {whole.dtype}\n".encode())
        self._digest.update(whole.ends(_SAMPLE_SIZE).float().numpy().tobytes())

    def _check_tied_head(self, table: Matrix) -> None:
        if not self._config.tie_word_embeddings or HEAD not in self._checkpoint.tensors:
            return
        head = self._checkpoint.tensors[HEAD].read()
        # Of codes the numbers that they were made of: a head that was stored in another form has other codes.
        embeddings = table if isinstance(table, Tensor) else self._checkpoint.tensors[EMBEDDINGS].read()
        if head.shape != embeddings.shape or not torch.equal(head.to(embeddings), embeddings):
            raise ModelError(
                f"{self._checkpoint.path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDINGS}."
            )

    def _rope_divisors(self) -> Tensor | None:
        stored = self._checkpoint.tensors.get(ROPE_DIVISORS)
        if stored is None:
            return None
        if stored.shape != (self._config.head_dim // 2,):
            raise ModelError(
                f"{self._checkpoint.path}: tensor {ROPE_DIVISORS} has shape {list(stored.shape)}; "
                f"half of head_dim {self._config.head_dim} is needed."
            )
        return self._read(ROPE_DIVISORS, stored).float()
