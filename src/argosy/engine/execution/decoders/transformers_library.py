"""All that Argosy uses of transformers, which is an optional dependency that no other module imports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from argosy.engine.execution.decoders.generic_decoder import GenericModel
from argosy.engine.execution.decoders.generic_trace import (
    OWN_ATTENTION,
    AttentionTracer,
    UnsupportedModelError,
    first_line,
)

IMPLEMENTATION = "argosy"
"""Name of Argosy's attention and experts in transformers' registries."""
TRACE_IMPLEMENTATION = "argosy-trace"
"""Name under which the run on `meta` registers what it records with."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Parameter of the model, and the stored tensors that it is made of."""

    target: str
    """Name of the parameter, or of the first one if `converter` makes several."""
    converter: Any | None
    """Conversion of transformers. None if the stored tensor is the parameter."""
    sources: dict[str, list[str]]
    """Source pattern of the conversion -> names of the stored tensors that match it, in natural order."""


@contextmanager
def quiet() -> Iterator[None]:
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


# --- models ---------------------------------------------------------------------------------------


def register_functions(
    attend: Callable[..., object], compute_experts: Callable[..., Tensor], tracer: AttentionTracer
) -> None:
    """Register the functions that serve, which need no masks, and those of a run on `meta`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    ExpertsInterface.register(IMPLEMENTATION, compute_experts)
    AttentionInterface.register(TRACE_IMPLEMENTATION, tracer.attend)
    AttentionMaskInterface.register(TRACE_IMPLEMENTATION, tracer.build_mask)
    ExpertsInterface.register(TRACE_IMPLEMENTATION, tracer.compute_experts)


def read_model_config(path: Path, *, trust_remote_code: bool) -> Any:  # noqa: ANN401 - of transformers
    """Read the configuration of the model in the directory `path`.

    Raises:
        ValueError: transformers does not know the model, or the model has its own code and may not run it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(_unknown_model_message(path, error)) from error


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


def generating_architectures() -> tuple[Mapping[str, str], set[str]]:
    """Return the causal model of each `model_type`, and all models that generate text from left to right."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    mappings = (
        causal,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return causal, {str(name) for mapping in mappings for name in mapping.values()}


def build_module(path: Path, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:  # noqa: ANN401 - of transformers
    """Build a model on `meta`, whose attention, masks and experts are those of the registered tracer.

    Raises:
        UnsupportedModelError: Its attention cannot be replaced.
        ValueError: The configuration does not describe a model.
    """
    import transformers

    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    options = {
        "dtype": dtype,
        "attn_implementation": TRACE_IMPLEMENTATION,
        "experts_implementation": TRACE_IMPLEMENTATION,
    }
    try:
        with torch.device("meta"):
            if model_class is None:
                module = transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=trust_remote_code, **options
                )
            else:
                module = model_class._from_config(config, **options)  # noqa: SLF001 - what the Auto classes call
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (TRACE_IMPLEMENTATION,):
            raise UnsupportedModelError(OWN_ATTENTION) from error
        raise ValueError(
            f"{path / 'config.json'}: transformers cannot build the model ({first_line(error)}); correct config.json"
        ) from error
    return module.eval()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, which will be packed. Subclasses may compute something else."""
    return type(module) is nn.Linear or is_transposed_linear(module)


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, which stores its weight as [K, N]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


# --- weights --------------------------------------------------------------------------------------


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
    with quiet():
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
