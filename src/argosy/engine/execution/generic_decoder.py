"""Decoder of the models that transformers implements, over Argosy's paged attention and packed weights.

This is the only module that imports transformers, which is an optional dependency. A model is built without weights
and run once on the `meta` device. That run records the attention of each layer, and shows whether paged attention can
compute it. `generic_loader` then replaces the matrix products by packed ones while it reads the weights.
"""

from __future__ import annotations

import inspect
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from argosy.engine.execution.batch import KvCacheShape
from argosy.engine.execution.checkpoint_config import MAX_LAYERS
from argosy.engine.execution.checkpoint_reader import read_quantization
from argosy.engine.execution.generic_architecture import GenericArchitecture
from argosy.engine.execution.generic_modules import compute_experts
from argosy.engine.execution.generic_trace import (
    OWN_ATTENTION,
    AttentionTracer,
    ModelTrace,
    UnsupportedModelError,
    first_line,
    trace_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from argosy.engine.execution.batch import Attention, AttentionParams, Batch
    from argosy.engine.execution.device import Device

IMPLEMENTATION = "argosy"
"""Name of Argosy's attention and experts in transformers' registries."""
TRACE_IMPLEMENTATION = "argosy-trace"
"""Name under which the run on `meta` registers what it records with."""
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k")
_LAYER_COUNT_KEYS = {"depth", "n_layer", "n_layers", "num_hidden_layers", "num_layers"}
_STATE_REASON = "keeps a state between calls (such as a recurrence or linear attention)"
_LAYER_TYPE_REASONS = {
    "chunked_attention": "attends within chunks (chunked attention)",
    "linear_attention": _STATE_REASON,
    "conv": _STATE_REASON,
    "recurrent": _STATE_REASON,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Parameter of the model, and the stored tensors that it is made of."""

    target: str
    """Name of the parameter, or of the first one if `converter` makes several."""
    converter: Any | None
    """Conversion of transformers. None if the stored tensor is the parameter."""
    sources: dict[str, list[str]]
    """Source pattern of the conversion -> names of the stored tensors that match it, in natural order."""


@dataclass(frozen=True, slots=True)
class GenericModel:
    """Model of transformers with its parameters on `meta`."""

    path: Path
    module: Any
    architecture: GenericArchitecture
    trace: ModelTrace


class _LayerAttention:
    """Attention of one layer, bound to the batch that its decoder computes."""

    def __init__(self, decoder: GenericDecoder, params: AttentionParams) -> None:
        self._decoder = decoder
        self._params = params

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with tensors [1, heads, T, head_dim], and return [1, T, heads, head_dim]."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        batch, attention = self._decoder.current_step
        return attention(q, k, v, batch, self._params, None)[None]


class GenericDecoder:
    """Decoder that runs a model of transformers. It has the interface of `decoder.Decoder`."""

    def __init__(self, model: GenericModel, device: Device, dtype: torch.dtype) -> None:
        self.architecture = model.architecture
        self.current_step: tuple[Batch, Attention]
        """Batch and attention of the step that is being computed."""
        self._model = model
        self._device = device
        self._dtype = dtype
        for layer in model.trace.layers:
            layer.module.argosy_attention = _LayerAttention(self, layer.params)

    def create_attention(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> Attention:
        """Create an attention with its own KV cache of the given size, in `dtype` or else the model's."""
        architecture = self.architecture
        shape = KvCacheShape(
            num_layers=architecture.num_layers,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype or self._dtype,
        )
        return self._device.create_attention(shape)

    @torch.inference_mode()
    def __call__(self, batch: Batch, attention: Attention) -> Tensor:
        """Return the logits of the flat tokens `batch.logit_index`, [L, vocab_size] float32. L may be 0.

        `attention` writes the keys and values of every token of the batch.
        """
        self.current_step = batch, attention
        logits = _run(self._model.module, batch.token_ids, batch.positions, batch.logit_index)
        if not self._model.trace.selects_logits:
            logits = logits.index_select(0, batch.logit_index)
        return logits.float()

    forward = __call__


def _run(
    module: Any,  # noqa: ANN401 - of transformers
    token_ids: Tensor,
    positions: Tensor,
    logit_index: Tensor,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Run the model on flat tokens, and return logits [L, vocab_size], or of all tokens if it cannot select them."""
    logits: Tensor = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=logit_index,
    ).logits
    return logits[0]


# --- registration ---------------------------------------------------------------------------------


def _attend(
    module: Any,  # noqa: ANN401 - of transformers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' `AttentionInterface`."""
    del attention_mask, kwargs
    return module.argosy_attention(query, key, value), None


def _compute_experts(
    experts: nn.Module, x: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """Compute experts for transformers' `ExpertsInterface`."""
    return compute_experts(experts, x, expert_ids, expert_weights)


def _register(tracer: AttentionTracer) -> None:
    """Register the functions that serve, which need no masks, and those of a run on `meta`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    ExpertsInterface.register(IMPLEMENTATION, _compute_experts)
    AttentionInterface.register(TRACE_IMPLEMENTATION, tracer.attend)
    AttentionMaskInterface.register(TRACE_IMPLEMENTATION, tracer.build_mask)
    ExpertsInterface.register(TRACE_IMPLEMENTATION, tracer.compute_experts)


# --- construction ---------------------------------------------------------------------------------


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
    from transformers import AutoConfig

    tracer = AttentionTracer()
    _register(tracer)
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ValueError(_unknown_model_message(path, error)) from error
        text_config = config.get_text_config(decoder=True)
        name = _reject_by_config(path, config, text_config)
        context = _max_model_len(path, text_config, max_model_len)
        module = _build_module(path, config, dtype, trust_remote_code=trust_remote_code)
        try:
            trace = _trace(module, tracer)
        except UnsupportedModelError as error:
            raise _refusal(path, name, str(error)) from error
    layer = trace.layers[0]
    num_parameters, num_active_parameters = _count_parameters(text_config, trace)
    architecture = GenericArchitecture(
        family=name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"),
        architecture=name,
        hidden_size=text_config.hidden_size,
        intermediate_size=getattr(text_config, "intermediate_size", None)
        or 4 * text_config.hidden_size,
        tied_embeddings=_is_head_tied(module),
        rope=_describe_ropes(text_config, context),
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
        raise UnsupportedModelError(_STATE_REASON)
    _freeze_ropes(module)
    trace = trace_model(module, tracer, _run, is_linear)
    module.set_attn_implementation(IMPLEMENTATION)
    module.set_experts_implementation(IMPLEMENTATION)
    return trace


def map_stored_tensors(module: Any, stored_names: list[str]) -> tuple[list[TensorEntry], list[str]]:  # noqa: ANN401 - of transformers
    """Apply transformers' map of checkpoint names to the model's names.

    Returns:
        The entries in the order of layers, and the stored tensors that have no place in the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    declared = module.state_dict()
    entries: dict[str, TensorEntry] = {}
    unexpected = []
    for name in sorted(stored_names, key=dot_natural_key):
        prefix = module.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, declared)
        if target not in declared and name in declared:
            target, pattern = rename_source_key(name, [], [], prefix, declared)
        if target not in declared:
            unexpected.append(name)
            continue
        converter = None if pattern is None else converter_of[pattern]
        entry = entries.setdefault(target, TensorEntry(target, converter, {}))
        entry.sources.setdefault(pattern or name, []).append(name)
    ignored = module._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 - part of each model's class
    return list(entries.values()), [
        name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)
    ]


def merges_experts(converter: Any) -> bool:  # noqa: ANN401 - of transformers
    """Return whether a conversion stacks the matrices of experts, so that it can convert those of one expert alone."""
    from transformers.core_model_loading import MergeModulelist

    first = converter.operations[0]
    return isinstance(first, MergeModulelist) and first.dim == 0


def fp32_patterns(module: Any, dtype: torch.dtype) -> list[str]:  # noqa: ANN401 - of transformers
    """Return patterns of the parameters that the model keeps in float32 although it computes in `dtype`."""
    patterns = set(module._keep_in_fp32_modules_strict or ())  # noqa: SLF001 - part of each model's class
    if dtype == torch.float16:
        patterns |= set(module._keep_in_fp32_modules or ())  # noqa: SLF001
    return [] if dtype == torch.float32 else sorted(patterns)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, which will be packed. Subclasses may compute something else."""
    return type(module) is nn.Linear or is_transposed_linear(module)


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, which stores its weight as [K, N]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


@torch.no_grad()
def materialize_buffers(
    model: GenericModel, modules: Mapping[str, nn.Module], device: torch.device
) -> None:
    """Compute the buffers of the named modules, such as the frequencies of rotary embeddings."""
    from transformers import PreTrainedModel

    owners = {
        name: module
        for name, module in model.module.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    with _quiet():
        for name, module in modules.items():
            pending = dict(module.named_buffers(recurse=False))
            if not pending:
                continue
            for key, buffer in pending.items():
                module._buffers[key] = torch.zeros_like(buffer, device=device)  # noqa: SLF001
            owner = max(
                (prefix for prefix in owners if not prefix or f"{name}.".startswith(f"{prefix}.")),
                key=len,
            )
            owners[owner]._init_weights(module)  # noqa: SLF001 - how transformers fills them too
            _select_rope_factors(module, model.architecture.max_model_len, device)


def _select_rope_factors(module: Any, max_model_len: int, device: torch.device) -> None:  # noqa: ANN401 - of transformers
    """Select longrope's factors by the maximum length, since a choice by length would change cached keys."""
    rope_type = getattr(module, "rope_type", None)
    types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, kind in types.items():
        if kind == "longrope":
            last_position = torch.tensor([[max_model_len - 1]], device=device)
            arguments = {} if layer_type is None else {"layer_type": layer_type}
            type(module).forward(module, torch.zeros(1, device=device), last_position, **arguments)


def _freeze_ropes(module: nn.Module) -> None:
    """Remove the updates of frequencies by the positions in a batch, which would couple its sequences."""
    for part in module.modules():
        forward = inspect.unwrap(type(part).forward)
        if hasattr(part, "rope_type") and forward is not type(part).forward:
            part.forward = MethodType(forward, part)


def _build_module(path: Path, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:  # noqa: ANN401 - of transformers
    import transformers

    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    try:
        with torch.device("meta"):
            if model_class is None:
                module = transformers.AutoModelForCausalLM.from_config(
                    config,
                    dtype=dtype,
                    attn_implementation=TRACE_IMPLEMENTATION,
                    experts_implementation=TRACE_IMPLEMENTATION,
                    trust_remote_code=trust_remote_code,
                )
            else:
                module = model_class._from_config(  # noqa: SLF001 - what the Auto classes call
                    config,
                    dtype=dtype,
                    attn_implementation=TRACE_IMPLEMENTATION,
                    experts_implementation=TRACE_IMPLEMENTATION,
                )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (TRACE_IMPLEMENTATION,):
            raise _refusal(path, str(names[0]), OWN_ATTENTION) from error
        raise ValueError(
            f"{path / 'config.json'}: transformers cannot build the model ({first_line(error)}); correct config.json"
        ) from error
    return module.eval()


# --- what cannot be served --------------------------------------------------------------------------


def _unknown_model_message(path: Path, error: Exception) -> str:
    import transformers

    if "trust_remote_code" in str(error):
        return (
            f"{path}: the model needs its own code, which may do anything on this machine; "
            "if you trust it, allow it with --trust-remote-code"
        )
    return (
        f"{path / 'config.json'}: transformers {transformers.__version__} does not know this model "
        f"({first_line(error)}); update transformers, or use a model of a family that it knows"
    )


def _reject_by_config(path: Path, config: Any, text_config: Any) -> str:  # noqa: ANN401 - of transformers
    """Return the name of the architecture, or raise ValueError if the config shows that it cannot be served."""
    from transformers.models.auto import modeling_auto

    file = path / "config.json"
    names = config.architectures or []
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    name = str(names[0]) if names else str(mappings[0].get(config.model_type, config.model_type))
    read_quantization(path)  # raises an error if it is not supported
    known = {str(value) for mapping in mappings for value in mapping.values()}
    remote = getattr(config, "auto_map", None) or {}
    if config.is_encoder_decoder or not (name in known or "AutoModelForCausalLM" in remote):
        raise ValueError(
            f"{file}: {name} does not generate text from left to right; use a causal language model"
        )
    _reject_huge(file, config.to_dict())
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if kinds:
        raise _refusal(
            path, name, _LAYER_TYPE_REASONS.get(min(kinds), f"has layers of type {min(kinds)}")
        )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise _refusal(path, name, "attends to later tokens and cannot generate")
    return name


def _reject_huge(file: Path, values: dict[str, Any]) -> None:
    """Raise ValueError for numbers of layers that would take hours to build, in any part of the configuration."""
    for key, value in values.items():
        if isinstance(value, dict):
            _reject_huge(file, value)
        elif key in _LAYER_COUNT_KEYS and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{file}: {key} is {value}; it must be at most {MAX_LAYERS}")


def _refusal(path: Path, name: str, reason: str) -> ValueError:
    return ValueError(
        f"{path}: {name} {reason}, which Argosy cannot serve; "
        "use a model whose layers all have full or sliding-window attention"
    )


def _max_model_len(path: Path, text_config: Any, limit: int | None) -> int:  # noqa: ANN401 - of transformers
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


def _count_parameters(text_config: Any, trace: ModelTrace) -> tuple[int, int]:  # noqa: ANN401 - of transformers
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


def _is_head_tied(module: Any) -> bool:  # noqa: ANN401 - of transformers
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    return head is not None and head.weight is getattr(embedding, "weight", None)


def _describe_ropes(text_config: Any, max_model_len: int) -> str:  # noqa: ANN401 - of transformers
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of transformers, which are written for its own users."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
