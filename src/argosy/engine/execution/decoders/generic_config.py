"""Sizes of a model that its configuration in transformers states: context, parameters and ropes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.engine.execution.decoders.generic_trace import ModelTrace

_ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k")


def read_max_model_len(path: Path, text_config: Any, limit: int | None) -> int:  # noqa: ANN401 - of transformers
    """Return the context length, which is limited to `limit`. yarn extends the stated length."""
    stated = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        if limit is None:
            raise ValueError(
                f"{path / 'config.json'}: max_position_embeddings is missing; set --max-model-len"
            )
        return limit
    extended = [
        int(section.get("original_max_position_embeddings", stated) * section.get("factor", 1.0))
        for section in _rope_sections(text_config)
        if section.get("rope_type") == "yarn"
    ]
    longest = max([stated, *extended])
    return longest if limit is None else min(longest, limit)


def count_parameters(text_config: Any, trace: ModelTrace) -> tuple[int, int]:  # noqa: ANN401 - of transformers
    """Return the number of weights that generate text, and of those that compute one token."""
    counts = {
        id(parameter): parameter.numel()
        for part in trace.used_modules.values()
        for parameter in part.parameters(recurse=False)
    }
    total = sum(counts.values())
    if not trace.experts:
        return total, total
    in_experts = sum(
        parameter.numel() for part in trace.experts for parameter in part.parameters(recurse=False)
    )
    num_active = next(
        (
            getattr(text_config, key)
            for key in _ACTIVE_EXPERTS_KEYS
            if getattr(text_config, key, None)
        ),
        1,
    )
    num_experts = trace.experts[0].get_parameter("down_proj").shape[0]
    return total, total - in_experts + round(in_experts * num_active / num_experts)


def describe_ropes(text_config: Any, max_model_len: int) -> str:  # noqa: ANN401 - of transformers
    """Return the kinds of the ropes, with the choice between longrope's factors."""
    kinds = []
    for section in _rope_sections(text_config):
        kind = section.get("rope_type")
        if kind == "longrope":
            kind += f" {'long' if max_model_len > section['original_max_position_embeddings'] else 'short'}"
        kinds += [kind] if kind else []
    return "+".join(kinds) or "none"


def _rope_sections(text_config: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - of transformers
    """Return the settings of each rope, of which some models have one for each type of layers."""
    ropes = getattr(text_config, "rope_parameters", None) or {}
    return [ropes, *(section for section in ropes.values() if isinstance(section, dict))]
