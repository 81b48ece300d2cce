"""Architecture of a model that transformers implements, as far as the engine needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine.execution.architectures.architecture import Architecture
from argosy.engine.execution.architectures.attention_params import AttentionParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericArchitecture(Architecture):
    """Architecture of a model that transformers implements, and the attention of its layers."""

    rope: str
    """Kinds of the rotary embedding, with the choice between longrope's factors."""
    num_parameters: int
    """Number of weights that generate text. A tied output matrix counts once."""
    num_active_parameters: int
    """Number of weights that compute one token, which is less than `num_parameters` with experts."""
    attention: tuple[AttentionParams, ...]
    """Attention of each layer that has one, in the order of computation."""

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        return tuple(params.sliding_window for params in self.attention)
