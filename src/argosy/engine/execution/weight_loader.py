"""Loader of a checkpoint's weights into a decoder, which maps, fuses, checks and packs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch
from torch import nn

from argosy.engine.execution.checkpoint_reader import CheckpointReader
from argosy.engine.execution.checkpoint_tensors import (
    EMBEDDING,
    HEAD,
    assign_tensors,
    find_parts,
)
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.encoded_linear import create_encoded_linear
from argosy.engine.execution.layers import LoadableModule, Projection
from argosy.engine.execution.pack_cache import PackCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from argosy.engine.engine_config import QuantizeSetting
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.model_architecture import ModelArchitecture

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def load_decoder(
    path: Path,
    architecture: ModelArchitecture,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: QuantizeSetting | None = None,
    pack_cache: PackCache | None = None,
) -> Decoder:
    """Build the decoder of `architecture` with the weights in the directory `path`.

    Weights that the pack cache has are not read. Peak memory is the packed weights plus one matrix. The embedding stays
    mapped from the file if it is stored in `dtype`.

    Args:
        path: Directory of the checkpoint.
        architecture: Architecture of the model.
        device: Compute device.
        dtype: Dtype of weights and activations.
        progress: Called with the finished fraction, 0 to 1.
        quantize: Weight format. None computes with quantized weights as they are stored, and keeps others in `dtype`.
            "none" dequantizes them to `dtype`.
        pack_cache: Cache of packed weights. None packs in memory.

    Raises:
        ValueError: A tensor is missing, damaged, not finite or of the wrong shape, or would not be read. The message
            names file and tensor. Also raised if the device does not support the format `quantize`.
    """
    pack_cache = pack_cache or PackCache()
    checkpoint = CheckpointReader(path)
    is_tied = _is_head_tied(checkpoint, architecture)
    head_differs = architecture.tied_embeddings and not is_tied
    architecture = replace(architecture, tied_embeddings=is_tied)
    decoder = Decoder(architecture, device, dtype, None if quantize == "none" else quantize)
    assignment = assign_tensors(
        path, checkpoint.files, architecture, [name for name, _ in decoder.named_parameters()]
    )
    num_total = sum(parameter.numel() for parameter in decoder.parameters())
    num_done = 0
    progress(0.0)
    formats: Counter[str] = Counter()
    for module_name, module in decoder.named_modules():
        if not isinstance(module, LoadableModule):
            continue
        is_projection = isinstance(module, Projection)
        for name, declared in list(module.named_parameters(recurse=False)):
            parameter = f"{module_name}.{name}"
            num_done += declared.numel()
            if is_projection and name == "weight" and quantize is None:
                parts = assignment.parts[parameter]
                checkpoint.check_shape(parts, tuple(declared.shape))
                if device.has_group_linear and any(map(checkpoint.find_encoded, parts)):
                    continue  # stays on `meta`
            if _pack_key(parameter, head_differs=head_differs) in pack_cache:
                tensor = declared.to(module.dtype or dtype)
            else:
                parts = assignment.parts[parameter]
                stored = checkpoint.read_tensor(parts, tuple(declared.shape))
                tensor = stored.to(
                    device=device.torch_device,
                    dtype=module.dtype or dtype,
                    copy=stored.dim() == 1,
                )
                if not pack_cache.is_stored:
                    checkpoint.check_finite(parts, tensor)
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        if isinstance(module, Projection):
            key = _pack_key(f"{module_name}.weight", head_differs=head_differs)
            linear = (
                create_encoded_linear(
                    checkpoint,
                    assignment.parts[f"{module_name}.weight"],
                    module.bias,
                    device,
                    dtype=module.dtype or dtype,
                    pack_cache=pack_cache,
                    pack_key=key,
                    row_order=module.row_order,
                )
                if quantize is None
                else None
            )
            if linear is None:
                formats[module.weight_format or str(dtype).removeprefix("torch.")] += 1
                module.process_weights_after_loading(device, partial(pack_cache.get, key))
            else:
                formats.update(linear.formats)
                module.set_linear(linear.compute)
        else:
            module.process_weights_after_loading(device)
        progress(num_done / num_total)
    head = "differs from the tied embedding" if head_differs else "tied" if is_tied else "separate"
    log.info(
        "checkpoint_loaded",
        path=str(path),
        architecture=architecture.architecture,
        parameters=architecture.num_parameters,
        head=head,
        stored_format=checkpoint.stored_format,
        matrices=dict(formats),
        unused_tensors=[*assignment.unused, *checkpoint.ignored],
        ropes=[rope.describe(architecture.max_model_len) for rope in architecture.ropes],
        eos_token_ids=list(architecture.eos_token_ids),
    )
    for rope in architecture.ropes:
        if rope.uses_long_factors(architecture.max_model_len):
            log.warning(
                "rope_long_factors_in_use",
                max_model_len=architecture.max_model_len,
                short_factors_up_to=rope.original_max_len,
                remedy=f"set --max-model-len {rope.original_max_len} if no prompt is longer",
            )
    return decoder


def _is_head_tied(checkpoint: CheckpointReader, architecture: ModelArchitecture) -> bool:
    """Return whether the output matrix is the embedding.

    A stored head that differs is used, although config.json says `tie_word_embeddings`. transformers does the same.
    """
    if not architecture.tied_embeddings:
        return False
    untied = replace(architecture, tied_embeddings=False)
    embedding, head = (find_parts(untied, name, checkpoint.files) for name in (EMBEDDING, HEAD))
    if embedding is None or head is None:
        return True
    return torch.equal(checkpoint.read_parts(embedding), checkpoint.read_parts(head))


def _pack_key(parameter: str, *, head_differs: bool) -> str:
    """Return the key of a parameter in the pack cache. Earlier versions packed the embedding as `head.weight`."""
    return "head.stored_weight" if head_differs and parameter == HEAD else parameter
