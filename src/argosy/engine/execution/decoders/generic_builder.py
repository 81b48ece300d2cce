"""Builder of a model of transformers on the `meta` device, where one run shows how its layers attend.

The builder refuses models that Argosy cannot serve, and reads the sizes that their configuration states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.checkpoint_formats.reader import read_quantization
from argosy.engine.execution.config.checkpoint_config import MAX_LAYERS
from argosy.engine.execution.decoders.generic_decoder import (
    GenericModel,
    attend,
    compute_experts,
    run_model,
)
from argosy.engine.execution.decoders.generic_trace import (
    AttentionTracer,
    ModelTrace,
    UnsupportedModelError,
    trace_model,
)
from argosy.engine.execution.decoders.transformers_library import (
    IMPLEMENTATION,
    build_module,
    generating_architectures,
    is_linear,
    quiet,
    read_model_config,
    register_functions,
)


def build_generic_model(
    path: Path,
    dtype: torch.dtype,
    *,
    eos_token_ids: Callable[[int], tuple[int, ...]],
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
) -> GenericModel:
    """Build the model in the directory `path` on `meta`, and find out how it attends.

    `eos_token_ids` maps the vocabulary size to the end-of-sequence tokens. The limit of the context decides which of
    longrope's factors are used. `trust_remote_code` allows to run code of the checkpoint.

    Raises:
        ValueError: Argosy cannot serve the model. The message gives the reason.
        ModuleNotFoundError: transformers is not installed.
    """
    tracer = AttentionTracer()
    register_functions(attend, compute_experts, tracer)
    with quiet():
        config = read_model_config(path, trust_remote_code=trust_remote_code)
        text_config = config.get_text_config(decoder=True)
        name = reject_by_config(path, config, text_config)
        context = read_max_model_len(path, text_config, max_model_len)
        try:
            module = build_module(path, config, dtype, trust_remote_code=trust_remote_code)
            trace = _trace(module, tracer)
        except UnsupportedModelError as error:
            raise refusal(path, name, str(error)) from error
    layer = trace.layers[0]
    num_parameters, num_active_parameters = count_parameters(text_config, trace)
    architecture = GenericArchitecture(
        family=name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"),
        architecture=name,
        num_layers=len(trace.layers),
        hidden_size=text_config.hidden_size,
        intermediate_size=getattr(text_config, "intermediate_size", None)
        or 4 * text_config.hidden_size,
        tied_embeddings=_is_head_tied(module),
        rope=describe_ropes(text_config, context),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=trace.vocab_size,
        max_model_len=context,
        eos_token_ids=eos_token_ids(trace.vocab_size),
        num_parameters=num_parameters,
        num_active_parameters=num_active_parameters,
        attention=tuple(layer.params for layer in trace.layers),
    )
    return GenericModel(path, module, architecture, trace)


def _trace(module: Any, tracer: AttentionTracer) -> ModelTrace:  # noqa: ANN401 - of transformers
    """Trace the model, and let it use the functions that serve.

    Raises:
        UnsupportedModelError: The model cannot be served.
    """
    if any(getattr(part, "_is_stateful", False) for part in module.modules()):
        raise UnsupportedModelError(STATE_REASON)
    _freeze_ropes(module)
    trace = trace_model(module, tracer, run_model, is_linear)
    module.set_attn_implementation(IMPLEMENTATION)
    module.set_experts_implementation(IMPLEMENTATION)
    return trace


def _freeze_ropes(module: nn.Module) -> None:
    """Remove the updates of frequencies by the positions in a batch, which would couple its sequences."""
    for part in module.modules():
        forward = inspect.unwrap(type(part).forward)
        if hasattr(part, "rope_type") and forward is not type(part).forward:
            part.forward = MethodType(forward, part)


def _is_head_tied(module: Any) -> bool:  # noqa: ANN401 - of transformers
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    return head is not None and head.weight is getattr(embedding, "weight", None)


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
