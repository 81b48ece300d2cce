"""Rotary position embedding: frequencies by kind, tables made once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.model_architecture import RopeParams

RopeRotation = tuple["Tensor", "Tensor"]
"""How the tokens of a batch are rotated: (cos, cos) and (-sin, sin), float32 [T, 1, rotary_dim]."""


def build_rope_table(params: RopeParams, max_len: int) -> Tensor:
    """Cosines and sines of positions 0 .. max_len: float32 [max_len, 2, rotary_dim / 2]."""
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = positions[:, None] * _frequencies(params, max_len)
    return torch.stack((angles.cos(), angles.sin()), 1).mul_(params.attention_factor)


def gather_rope_rotation(table: Tensor, positions: Tensor) -> RopeRotation:
    """The rotation of tokens at positions [T]."""
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, rotation: RopeRotation) -> Tensor:
    """Rotate the first rotary_dim elements of x [T, heads, head_dim]; the others stay as they are.

    A rotation is x * first + swap(x) * second, with swap exchanging the halves of x, computed in
    float32 and rounded once.
    """
    first, second = rotation
    turning, rest = x.tensor_split((first.shape[-1],), -1)
    wide = turning.float()
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.cat(((wide * first).add_(swapped.mul_(second)).to(x.dtype), rest), -1)


def _frequencies(spec: RopeParams, max_len: int) -> Tensor:
    """Radians per position, float32 [rotary_dim / 2].

    `dynamic` scales only beyond the stated context, which we never serve, so it is the default.
    longrope takes its long factors for every position once sequences beyond original_max_len may
    come: a choice by each sequence's length would change keys that are cached already.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    periods = spec.theta**exponents
    if spec.kind == "longrope":
        short = max_len <= spec.original_max_len
        return 1.0 / (torch.tensor(spec.short_factors if short else spec.long_factors) * periods)
    plain = 1.0 / periods
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _scale_llama3(spec, plain)
    if spec.kind == "yarn":
        return _scale_yarn(spec, plain)
    return plain


def _scale_llama3(spec: RopeParams, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths slowed by the factor, short ones kept, a blend between."""
    wavelengths = 2 * math.pi / plain
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend = ((spec.original_max_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _scale_yarn(spec: RopeParams, plain: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2: a ramp from kept to interpolated frequencies."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_len / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.round_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)
