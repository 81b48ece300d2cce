"""Loader of safetensors weights into a decoder, which maps, fuses, checks and packs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from argosy.engine.execution.checkpoint import tensor_files
from argosy.engine.execution.checkpoint_tensors import (
    EMBEDDING,
    HEAD,
    StoredPart,
    assign_tensors,
    find_parts,
)
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.layers import LoadableModule, Projection
from argosy.engine.execution.pack_cache import PackCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.model_architecture import ModelArchitecture

_FLOAT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


def load_decoder(
    path: Path,
    architecture: ModelArchitecture,
    device: Device,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    quantize: WeightFormat | None = None,
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
        quantize: Weight format. None keeps `dtype`.
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
    decoder = Decoder(architecture, device, dtype, quantize)
    assignment = assign_tensors(
        path, checkpoint.files, architecture, [name for name, _ in decoder.named_parameters()]
    )
    num_total = sum(parameter.numel() for parameter in decoder.parameters())
    num_done = 0
    progress(0.0)
    for module_name, module in decoder.named_modules():
        if not isinstance(module, LoadableModule):
            continue
        for name, declared in list(module.named_parameters(recurse=False)):
            parameter = f"{module_name}.{name}"
            num_done += declared.numel()
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
            module.process_weights_after_loading(device, partial(pack_cache.get, key))
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
        unused_tensors=list(assignment.unused),
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


class CheckpointReader:
    """Reader of a directory's safetensors files, which are memory-mapped and read on use."""

    def __init__(self, path: Path) -> None:
        """Find the tensor files.

        Raises:
            ValueError: The directory has no safetensors files, or lacks files that its index names.
        """
        self._path = path
        self.files = tensor_files(path)
        """File of each stored tensor."""
        self._open_files: dict[Path, safe_open] = {}

    def read_tensor(self, parts: tuple[StoredPart, ...], shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of `shape`, whose rows are those of the parts.

        Raises:
            ValueError: A part is damaged or of the wrong shape. The message names it.
        """
        tensors = [self._read_part(part) for part in parts]
        rows = sum(tensor.shape[0] for tensor in tensors if tensor.dim())
        fits = all(
            tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] for tensor in tensors
        )
        if not fits or rows != shape[0]:
            stored = " + ".join(
                f"{part.name} {list(tensor.shape)}"
                for part, tensor in zip(parts, tensors, strict=True)
            )
            raise ValueError(
                f"{self._path}: {stored} in {self._file_names(parts)} should have shape {list(shape)}; "
                "config.json and the weights belong to different models"
            )
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read_parts(self, parts: tuple[StoredPart, ...]) -> Tensor:
        """Read a tensor of any shape.

        Raises:
            ValueError: A part is damaged. The message names it.
        """
        tensors = [self._read_part(part) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def check_finite(self, parts: tuple[StoredPart, ...], converted: Tensor) -> None:
        """Check that a tensor, converted to the model's dtype, has neither NaN nor infinity.

        Raises:
            ValueError: A value is not finite. The message names the tensor.
        """
        if _is_finite(converted):
            return
        damaged = [part for part in parts if not _is_finite(self._read_part(part))]
        names = " + ".join(part.name for part in damaged or parts)
        location = f"{self._path / self._file_names(tuple(damaged) or parts)}: {names}"
        if damaged:
            raise ValueError(
                f"{location} has values that are not finite (NaN or infinity); "
                "the checkpoint is damaged, fetch it again"
            )
        raise ValueError(
            f"{location} has values beyond the range of {str(converted.dtype).removeprefix('torch.')}; "
            "use --dtype bfloat16"
        )

    def _file_names(self, parts: tuple[StoredPart, ...]) -> str:
        return ", ".join(sorted({self.files[part.name].name for part in parts}))

    def _read_part(self, part: StoredPart) -> Tensor:
        name, file = part.name, self.files[part.name]
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            handle = self._open_files[file]
            tensor: Tensor = (
                handle.get_tensor(name)  # type: ignore[no-untyped-call]
                if part.entry is None
                else handle.get_slice(name)[part.entry]  # type: ignore[no-untyped-call]
            )
        except (SafetensorError, OSError, IndexError) as error:
            raise ValueError(
                f"cannot read {name} from {file}: {error}; the file is damaged, fetch it again"
            ) from error
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ValueError(
                f"{file}: {name} is stored as {tensor.dtype}; "
                "use a checkpoint in float16, bfloat16 or float32"
            )
        return tensor.T if part.is_transposed and tensor.dim() == 2 else tensor


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, at the speed of memory. NaN propagates to both extremes."""
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())
