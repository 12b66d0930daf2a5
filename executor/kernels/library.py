"""The built kernels as Python calls them: structures and signatures, in the order of `kernels.cpp`.

Every pointer is the address of memory that the caller keeps alive during the call.
"""

import ctypes
import hashlib
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import structlog

from executor.kernels.build import InstructionSet, KernelsUnavailableError, available, built

MOST_QUERY_ROWS = 32
"""Query rows (heads of tokens) that attention computes together."""
MOST_HEAD_DIM = 512
BLOCK_BYTES = {8: 16 * (2 * 2 + 32), 4: 16 * (2 * 2 + 16)}
"""Of sixteen columns' blocks of 32 numbers in so many bits, scales and offsets included: `block_bytes`."""
UNIT_PADDING = 32
"""Inputs of a projection are zero up to the next multiple of so many numbers."""
COLUMN_PADDING = 32
"""Packed columns come in multiples of so many."""
MOST_TOKENS_MIXED = 512
"""Tokens that a mixture of experts computes together: there is room for no more of them."""

log = structlog.get_logger()


class Finish(IntEnum):
    """What is done to a projection's sums before they are stored."""

    AS_IS = 0
    SILU_GATE = 1
    GELU_TANH_GATE = 2
    SOFT_CAP = 3


class Kind(IntEnum):
    """What an operation is."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    MIX = 5


class Operation(Structure):
    """`Operation` of kernels.cpp."""

    _fields_ = (("kind", c_int), ("finishing", c_int), ("float_out", c_int), ("call", c_void_p))


class StepArrays(Structure):
    """`StepArrays` of rows.hpp."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_start", c_void_p),
        ("first_block", c_void_p),
        ("num_rows", c_int),
    )


class EmbedCall(Structure):
    """`EmbedCall` of linear.hpp."""

    _fields_ = (
        ("weight", c_void_p),
        ("step", c_void_p),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("num_tokens", c_int),
        ("num_units", c_int),
        ("in_features", c_int),
        ("weight_bits", c_int),
        ("scale", c_float),
    )


class NormCall(Structure):
    """`NormCall` of rows.hpp."""

    _fields_ = (
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("update", c_void_p),
        ("update_stride", c_int64),
        ("update_weight", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_tokens", c_int),
        ("size", c_int),
        ("update_eps", c_float),
        ("eps", c_float),
    )


class LinearCall(Structure):
    """`LinearCall` of linear.hpp."""

    _fields_ = (
        ("rows", c_void_p),
        ("row_stride", c_int64),
        ("weight", c_void_p),
        ("factors", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_rows", c_int),
        ("num_units", c_int),
        ("num_pairs", c_int),
        ("num_columns", c_int),
        ("weight_bits", c_int),
        ("soft_cap", c_float),
    )


class MixtureCall(Structure):
    """`MixtureCall` of mixture.hpp."""

    _fields_ = (
        ("rows", c_void_p),
        ("row_stride", c_int64),
        ("router", LinearCall),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("wide", c_void_p),
        ("logits", c_void_p),
        ("weights", c_void_p),
        ("chosen", c_void_p),
        ("places", c_void_p),
        ("tokens", c_void_p),
        ("experts", c_void_p),
        ("factors", c_void_p),
        ("middle", c_void_p),
        ("updates", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("factor_bytes", c_int64),
        ("middle_stride", c_int64),
        ("num_tokens", c_int),
        ("num_experts", c_int),
        ("num_routed", c_int),
        ("num_chosen", c_int),
        ("norms_weights", c_int),
        ("out_features", c_int),
    )


class PackingCall(Structure):
    """`PackingCall` of quantized.hpp."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("packed", c_void_p),
        ("num_rows", c_int),
        ("num_blocks", c_int),
        ("bits", c_int),
        ("gated", c_int),
    )


class RotateCall(Structure):
    """`RotateCall` of rows.hpp."""

    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("step", c_void_p),
        ("rope", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_tokens", c_int),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("block_size", c_int),
        ("query_eps", c_float),
        ("key_eps", c_float),
        ("query_norm_heads", c_int),
        ("key_norm_heads", c_int),
    )


class AttentionCall(Structure):
    """`AttentionCall` of attention.hpp."""

    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("step", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("head_dim", c_int),
        ("block_size", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class SamplingCall(Structure):
    """`SamplingCall` of sampling.hpp."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("uniforms", c_void_p),
        ("temperatures", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("token_ids", c_void_p),
        ("highest", c_void_p),
        ("num_rows", c_int),
        ("vocab_size", c_int),
    )


class Kernels:
    """One built set of kernels, its threads started."""

    def __init__(self, instruction_set: InstructionSet, num_threads: int) -> None:
        """Raises KernelsUnavailableError."""
        path = built(instruction_set, tell=_tell)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"{path} cannot be loaded: {error}") from error

        def function(name: str, *arguments: Any, returns: Any = None) -> Any:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, returns
            return found

        self.name = instruction_set.name
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        """Of what the compiler made of the sources: another version or compiler may round elsewhere."""
        self.start = function("start", c_int, returns=c_bool)
        """Start threads until there are so many; there are never fewer again."""
        self.pack_weight = function("pack_weight", c_void_p, c_int, c_int, c_bool, c_void_p, c_bool)
        self.pack_codes = function("pack_codes", POINTER(PackingCall))
        self.compute = function("compute", POINTER(Operation), c_int, c_bool)
        self.choose_tokens = function("choose_tokens", POINTER(SamplingCall))
        if not self.start(num_threads):
            raise KernelsUnavailableError(f"the system does not let us use {instruction_set.name}")


def _tell(line: str) -> None:
    """To whoever waits for the start, at any log level."""
    print(line, flush=True)  # noqa: T201 - as a service tells where it listens


def fastest(num_threads: int) -> Kernels:
    """The fastest kernels that run here. Raises KernelsUnavailableError when none do."""
    reasons = []
    for instruction_set in available():
        try:
            return Kernels(instruction_set, num_threads)
        except KernelsUnavailableError as reason:
            if str(reason) not in reasons:  # what all of them lack is said once
                log.warning("kernels_unavailable", instruction_set=instruction_set.name, reason=str(reason))
            reasons.append(str(reason))
    raise KernelsUnavailableError(
        reasons[-1]
        if reasons
        else "this processor has none of the instruction sets that they are written for"
    )
