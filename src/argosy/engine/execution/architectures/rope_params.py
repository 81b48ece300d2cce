"""Parameters of a rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
