"""Rotary positions: the table of cosines and sines. Knows no layer, no cache, no head."""

import math

import torch
from torch import Tensor

from executor.model.config import Rope, RopeScaling


def rope_table(
    rope: Rope, head_dim: int, max_seq_len: int, frequency_divisors: Tensor | None, device: torch.device
) -> Tensor:
    """Cosines and sines of every position: float32 `[max_seq_len, 2, head_dim / 2]`.

    A table, so that a position's angle has the same bits in every batch. `frequency_divisors`
    (`[head_dim / 2]`) is how a GGUF file stores a scaling that its metadata does not name.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse_frequencies = scaled(1.0 / rope.theta**exponents, rope)
    if frequency_divisors is not None:
        inverse_frequencies = inverse_frequencies / frequency_divisors
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inverse_frequencies)
    table = torch.stack([angles.cos(), angles.sin()], dim=1)
    return (table * rope.scaling.attention_factor).to(device)


def scaled(inverse_frequencies: Tensor, rope: Rope) -> Tensor:
    """`inverse_frequencies` scaled as the kind says; the kinds are explained at `RopeScaling`."""
    scaling = rope.scaling
    if scaling.kind == "linear":
        return inverse_frequencies / scaling.factor
    if scaling.kind == "llama3":
        kept = _kept_by_llama3(inverse_frequencies, scaling)
    elif scaling.kind == "yarn":
        kept = _kept_by_yarn(len(inverse_frequencies), rope)
    else:
        return inverse_frequencies
    return kept * inverse_frequencies + (1.0 - kept) * inverse_frequencies / scaling.factor


def _kept_by_llama3(inverse_frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """How much of each frequency is kept, by how many of its waves fit into the original context."""
    wavelengths = 2 * math.pi / inverse_frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(num_frequencies: int, rope: Rope) -> Tensor:
    """How much of each frequency is kept: a ramp over the frequencies' places, not over their turns."""
    scaling, head_dim = rope.scaling, 2 * num_frequencies

    def place(turns: float) -> float:
        """Of the frequency that turns so often within the original context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # A ramp without a length is a step: the reference's guard against dividing by zero.
    length = last - first or 0.001
    return 1.0 - ((torch.arange(num_frequencies, dtype=torch.float32) - first) / length).clamp(0.0, 1.0)
