"""Rotary positions: the table of cosines and sines. Knows no layer, no cache, no head."""

import math

import torch
from torch import Tensor

from executor.model.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, frequency_divisors: Tensor | None, device: torch.device) -> Tensor:
    """Cosines and sines of every position: float32 `[max_seq_len, 2, head_dim / 2]`.

    A table, so that a position's angle has the same bits in every batch. `frequency_divisors`
    (`[head_dim / 2]`) is how a GGUF file stores a scaling that its metadata does not name.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse_frequencies = scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    if frequency_divisors is not None:
        inverse_frequencies = inverse_frequencies / frequency_divisors
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), inverse_frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(device)


def scaled(inverse_frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """`inverse_frequencies` scaled as the kind says; the kinds are explained in `executor.model.config`."""
    if scaling.kind == "linear":
        return inverse_frequencies / scaling.factor
    if scaling.kind == "llama3":
        # How many wavelengths fit into the original context decides: few are stretched, many are kept.
        wavelengths = 2 * math.pi / inverse_frequencies
        turns = scaling.original_max_position_embeddings / wavelengths
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * inverse_frequencies + (1.0 - kept) * inverse_frequencies / scaling.factor
    return inverse_frequencies
