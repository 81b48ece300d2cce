"""Rotary position embedding, with precomputed tables of the frequencies of each kind."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from argosy.engine.execution.architectures.rope import RopeParams

RopeRotation = tuple["Tensor", "Tensor"]
"""Rotation of a batch's tokens, as (cos, cos) and (-sin, sin), each float32 [T, 1, rotary_dim]."""


def build_rope_table(params: RopeParams, max_len: int) -> Tensor:
    """Compute the cosines and sines of positions 0 .. max_len, float32 [max_len, 2, rotary_dim / 2]."""
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = positions[:, None] * rope_frequencies(params, max_len)
    return torch.stack((angles.cos(), angles.sin()), 1).mul_(params.attention_factor)


def gather_rope_rotation(table: Tensor, positions: Tensor) -> RopeRotation:
    """Return the rotation of tokens at positions [T]."""
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, rotation: RopeRotation) -> Tensor:
    """Rotate the first rotary_dim elements of x [T, heads, head_dim], and copy the others.

    The rotation is x * first + swap(x) * second, where swap exchanges the halves of x. The result is computed in
    float32 and rounded once.
    """
    first, second = rotation
    leading, rest = x.tensor_split((first.shape[-1],), -1)
    values = leading.float()
    swapped = values.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.cat(((values * first).add_(swapped.mul_(second)).to(x.dtype), rest), -1)


def rope_frequencies(params: RopeParams, max_len: int) -> Tensor:
    """Return the radians per position, float32 [rotary_dim / 2].

    `dynamic` scales only beyond the stated context, which is never served, so it equals `default`. If `max_len` exceeds
    original_max_len, longrope uses its long factors for every position. A choice by each sequence's length would
    change keys that are already cached.
    """
    exponents = torch.arange(0, params.rotary_dim, 2, dtype=torch.float32) / params.rotary_dim
    periods = params.theta**exponents
    if params.kind == "longrope":
        is_long = params.uses_long_factors(max_len)
        return 1.0 / (
            torch.tensor(params.long_factors if is_long else params.short_factors) * periods
        )
    unscaled = 1.0 / periods
    if params.kind == "linear":
        return unscaled / params.factor
    if params.kind == "llama3":
        return _scale_llama3(params, unscaled)
    if params.kind == "yarn":
        return _scale_yarn(params, unscaled)
    return unscaled


def _scale_llama3(params: RopeParams, unscaled: Tensor) -> Tensor:
    """Apply Llama 3.1's scaling, which divides low frequencies by the factor and blends up to high ones."""
    wavelengths = 2 * math.pi / unscaled
    low, high = params.low_freq_factor, params.high_freq_factor
    blend = ((params.original_max_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * unscaled / params.factor + blend * unscaled


def _scale_yarn(params: RopeParams, unscaled: Tensor) -> Tensor:
    """Apply YaRN (Peng et al. 2023, section 3.2), a ramp from unchanged to interpolated frequencies."""

    def dimension(rotations: float) -> float:
        turns = params.original_max_len / (rotations * 2 * math.pi)
        return params.rotary_dim * math.log(turns) / (2 * math.log(params.theta))

    low, high = dimension(params.beta_fast), dimension(params.beta_slow)
    if params.round_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(unscaled), dtype=torch.float32) - low) / width).clamp(0, 1)
    return unscaled / params.factor * ramp + unscaled * (1 - ramp)
