"""Parameters of a rotary position embedding, read from config.json with the keys of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from argosy.engine.execution.config.checkpoint_config import CheckpointConfig

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Parameters of a rotary position embedding (Su et al. 2021) and its scaling."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    """Number of a head's leading elements that are rotated."""
    original_max_len: int
    """Context length of the model's first training, in tokens."""
    factor: float = 1.0
    attention_factor: float = 1.0
    """Factor of cosines and sines."""
    score_factor: float = 1.0
    """yarn: factor of the scores of latent attention."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """llama3: wavelengths from original_max_len / high_freq_factor to / low_freq_factor are blended."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_bounds: bool = True
    """yarn (Peng et al. 2023): rotations that bound the blend, and whether the bounds are rounded to integers."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope (Ding et al. 2024): a divisor per frequency, for contexts up to and beyond original_max_len."""

    def uses_long_factors(self, max_model_len: int) -> bool:
        """Return whether longrope's long factors apply, for every position of a model with this context."""
        return self.kind == "longrope" and max_model_len > self.original_max_len

    def describe(self, max_model_len: int) -> str:
        """Return kind and base for the log, with the choice of longrope's factors."""
        name = f"{self.kind}, theta {self.theta:g}"
        if self.kind != "longrope":
            return name
        return f"{name}, {'long' if self.uses_long_factors(max_model_len) else 'short'} factors"


MAX_POSITIONS = 1 << 24
"""Largest accepted context, for which the tables of rotations are built."""
MAX_TABLE_ELEMENTS = 1 << 32
"""Largest accepted number of elements of such a table."""
_KINDS: dict[str, RopeKind] = {kind: kind for kind in get_args(RopeKind)}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_ropes(config: CheckpointConfig, head_dim: int) -> tuple[RopeParams, ...]:
    """Return the rope of full-attention layers, followed by that of sliding-window layers if it differs.

    transformers 5 writes `rope_parameters`, per layer type in Gemma 3. Older checkpoints have `rope_theta`,
    `rope_scaling`, `partial_rotary_factor` and `rope_local_base_freq`.

    Raises:
        ValueError: The rope is unsupported or inconsistent.
    """
    rope_parameters = config.section("rope_parameters")
    local_theta = config.optional_number("rope_local_base_freq", 1.0)
    if any(name in rope_parameters for name in _LAYER_TYPES):
        full, sliding = (config.with_values(rope_parameters).section(name) for name in _LAYER_TYPES)
        sections = [full, {"rope_theta": local_theta} | sliding]
    else:
        sections = [rope_parameters | config.section("rope_scaling")]
        if local_theta is not None:
            sections.append({"rope_theta": local_theta})
    return tuple(_parse_rope(config, section, head_dim) for section in sections)


def max_supported_len(config: CheckpointConfig, ropes: tuple[RopeParams, ...]) -> int:
    """Return the maximum context length in tokens. yarn extends the stated length."""
    stated = config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    extended = [int(rope.original_max_len * rope.factor) for rope in ropes if rope.kind == "yarn"]
    longest = max([stated, *extended])
    limit = min(MAX_POSITIONS, MAX_TABLE_ELEMENTS // max(rope.rotary_dim for rope in ropes))
    if longest > limit:
        raise ValueError(
            f"{config.path}: the context has {longest} tokens; it must be at most {limit} for its heads"
        )
    return longest


def _parse_rope(config: CheckpointConfig, section: dict[str, object], head_dim: int) -> RopeParams:
    rope = config.with_values(section)
    kind = _rope_kind(config, rope)
    theta = rope.optional_number("rope_theta", 1.0) or config.number("rope_theta", 1.0)
    stated_max_len = config.integer("max_position_embeddings")
    original_max_len = (
        config.optional_integer("original_max_position_embeddings")
        or rope.optional_integer("original_max_position_embeddings")
        or stated_max_len
    )
    factor = rope.optional_number("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise rope.error("factor", f"a number, for rope type {kind}")
        factor = stated_max_len / original_max_len if kind in ("yarn", "longrope") else 1.0
    rotary_dim = _rotary_dim(config, rope, head_dim)
    low_freq_factor = rope.optional_number("low_freq_factor") or 1.0
    params = RopeParams(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        original_max_len=original_max_len,
        factor=factor,
        attention_factor=_attention_factor(rope, kind, factor, original_max_len),
        score_factor=_score_factor(rope, kind, factor),
        low_freq_factor=low_freq_factor,
        high_freq_factor=rope.optional_number("high_freq_factor", low_freq_factor) or 4.0,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        round_bounds=rope.get("truncate") is not False,
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
    if kind == "longrope":
        for key, factors in (("short", params.short_factors), ("long", params.long_factors)):
            if len(factors) != rotary_dim // 2 or min(factors) <= 0:
                raise rope.error(f"{key}_factor", f"a list of {rotary_dim // 2} numbers above 0")
    return params


def _rope_kind(config: CheckpointConfig, rope: CheckpointConfig) -> RopeKind:
    name = rope.string("rope_type") or rope.string("type") or "default"
    if name == "su" or (name == "yarn" and rope.get("short_factor") is not None):
        name = "longrope"  # the name in the first Phi-3 checkpoints
    # Interleaved axes rotate text, whose tokens have one position on all axes, as a single axis does.
    has_axes = rope.get("mrope_section") is not None and not rope.flag("mrope_interleaved")
    if name not in _KINDS or has_axes:
        raise ValueError(
            f"{config.path}: rope type {name!r} is unknown or has several axes; "
            f"Argosy supports {', '.join(_KINDS)}"
        )
    return _KINDS[name]


def _rotary_dim(config: CheckpointConfig, rope: CheckpointConfig, head_dim: int) -> int:
    stated_by = rope if rope.get("partial_rotary_factor") is not None else config
    fraction = stated_by.optional_number("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if fraction is None else fraction))
    if rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim:
        return rotary_dim
    if fraction is None:
        raise ValueError(
            f"{config.path}: head_dim is {head_dim}; it must be even, because pairs of elements are rotated"
        )
    raise stated_by.error(
        "partial_rotary_factor", f"at most 1, and an even part of the head_dim {head_dim}"
    )


def _attention_factor(
    rope: CheckpointConfig, kind: RopeKind, factor: float, original_max_len: int
) -> float:
    """Return the factor of cosines and sines, which differs from 1 only for yarn and longrope."""
    stated_factor = rope.optional_number("attention_factor")
    if kind not in ("yarn", "longrope") or stated_factor is not None:
        return 1.0 if stated_factor is None else stated_factor
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original_max_len))
    mscale = rope.optional_number("mscale", exclusive=False)
    mscale_all = rope.optional_number("mscale_all_dim", exclusive=False)
    if mscale and mscale_all:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return _yarn_scale(factor, 1.0)


def _score_factor(rope: CheckpointConfig, kind: RopeKind, factor: float) -> float:
    """Return the factor of latent attention's scores, as in DeepSeek's code."""
    mscale_all = rope.optional_number("mscale_all_dim", exclusive=False)
    return _yarn_scale(factor, mscale_all) ** 2 if mscale_all and kind != "default" else 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1.0 else 1.0
