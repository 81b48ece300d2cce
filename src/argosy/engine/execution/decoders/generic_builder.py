"""Builder of a model of transformers on the `meta` device, where one run shows how its layers attend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from argosy.engine.execution.architectures.architecture import GenericArchitecture
from argosy.engine.execution.decoders.generic_config import (
    count_parameters,
    describe_ropes,
    read_max_model_len,
)
from argosy.engine.execution.decoders.generic_decoder import GenericModel, attend, run_model
from argosy.engine.execution.decoders.generic_modules import compute_experts
from argosy.engine.execution.decoders.generic_refusals import (
    STATE_REASON,
    refusal,
    reject_by_config,
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

    Args:
        path: Directory of the checkpoint.
        dtype: Dtype of weights and activations.
        eos_token_ids: Function of the vocabulary size that returns the end-of-sequence tokens.
        max_model_len: Limit of the context, which longrope's factors depend on.
        trust_remote_code: Whether code in the checkpoint may be run.

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
