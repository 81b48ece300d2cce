"""Refusals of models that transformers implements and Argosy cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.engine.execution.checkpoint_formats.reader import read_quantization
from argosy.engine.execution.config.checkpoint_config import MAX_LAYERS
from argosy.engine.execution.decoders.transformers_library import generating_architectures

STATE_REASON = "keeps a state between calls (such as a recurrence or linear attention)"
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LAYER_COUNT_KEYS = {"depth", "n_layer", "n_layers", "num_hidden_layers", "num_layers"}
_LAYER_TYPE_REASONS = {
    "chunked_attention": "attends within chunks (chunked attention)",
    "linear_attention": STATE_REASON,
    "conv": STATE_REASON,
    "recurrent": STATE_REASON,
}


def reject_by_config(path: Path, config: Any, text_config: Any) -> str:  # noqa: ANN401 - of transformers
    """Return the name of the architecture.

    Raises:
        ValueError: The configuration shows that the model cannot be served.
    """
    file = path / "config.json"
    names = config.architectures or []
    causal, known = generating_architectures()
    name = str(names[0]) if names else str(causal.get(config.model_type, config.model_type))
    read_quantization(path)  # raises an error if it is not supported
    remote = getattr(config, "auto_map", None) or {}
    if config.is_encoder_decoder or not (name in known or "AutoModelForCausalLM" in remote):
        raise ValueError(
            f"{file}: {name} does not generate text from left to right; use a causal language model"
        )
    _reject_huge(file, config.to_dict())
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise refusal(
            path, name, _LAYER_TYPE_REASONS.get(min(kinds), f"has layers of type {min(kinds)}")
        )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise refusal(path, name, "attends to later tokens and cannot generate")
    return name


def _reject_huge(file: Path, values: dict[str, Any]) -> None:
    """Raise ValueError for numbers of layers that would take hours to build, in any part of the configuration."""
    for key, value in values.items():
        if isinstance(value, dict):
            _reject_huge(file, value)
        elif key in _LAYER_COUNT_KEYS and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{file}: {key} is {value}; it must be at most {MAX_LAYERS}")


def refusal(path: Path, name: str, reason: str) -> ValueError:
    """Build the error for a model that cannot be served. `reason` completes `the model ...`."""
    return ValueError(
        f"{path}: {name} {reason}, which Argosy cannot serve; "
        "use a model whose layers all have full or sliding-window attention"
    )
