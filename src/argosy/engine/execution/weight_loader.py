"""Loader of safetensors weights into a decoder, which maps, fuses, checks and packs them."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from argosy.engine.execution.checkpoint import tensor_files
from argosy.engine.execution.decoder import Decoder
from argosy.engine.execution.layers import LoadableModule, Projection
from argosy.engine.execution.model_families import checkpoint_tensor_names
from argosy.engine.execution.pack_cache import PackCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from argosy.engine.engine_config import WeightFormat
    from argosy.engine.execution.device import Device
    from argosy.engine.execution.model_architecture import ModelArchitecture

_FLOAT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_EXPERT_ENTRY = re.compile(r"(?P<name>.+)\[(?P<index>\d+)\]")


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
        ValueError: A tensor is missing, damaged or of the wrong shape. The message names file and tensor. Also raised
            if the device does not support the format `quantize`.
    """
    pack_cache = pack_cache or PackCache()
    decoder = Decoder(architecture, device, dtype, quantize)
    checkpoint = CheckpointReader(path)
    num_total = sum(parameter.numel() for parameter in decoder.parameters())
    num_done = 0
    progress(0.0)
    for module_name, module in decoder.named_modules():
        if not isinstance(module, LoadableModule):
            continue
        for name, declared in list(module.named_parameters(recurse=False)):
            num_done += declared.numel()
            if f"{module_name}.{name}" in pack_cache:
                tensor = declared.to(dtype)
            else:
                stored_name = (
                    "embed.weight"
                    if architecture.tied_embeddings and module_name == "head"
                    else f"{module_name}.{name}"
                )
                tensor = checkpoint.read_tensor(
                    checkpoint_tensor_names(architecture, stored_name), tuple(declared.shape)
                )
                tensor = tensor.to(device=device.torch_device, dtype=dtype, copy=tensor.dim() == 1)
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        if isinstance(module, Projection):
            module.process_weights_after_loading(
                device, partial(pack_cache.get, f"{module_name}.weight")
            )
        else:
            module.process_weights_after_loading(device)
        progress(num_done / num_total)
    return decoder


class CheckpointReader:
    """Reader of a directory's safetensors files, which are memory-mapped and read on use."""

    def __init__(self, path: Path) -> None:
        """Find the tensor files.

        Raises:
            ValueError: The directory has no safetensors files, or lacks files that its index names.
        """
        self._path = path
        self._files = tensor_files(path)
        self._open_files: dict[Path, safe_open] = {}

    def read_tensor(
        self, alternatives: tuple[tuple[str, ...], ...], shape: tuple[int, ...]
    ) -> Tensor:
        """Read a tensor of `shape`, stored as the first alternative that the checkpoint has.

        The parts of an alternative are concatenated by rows.

        Raises:
            ValueError: The tensor is missing, damaged or of the wrong shape. The message names it.
        """
        for parts in alternatives:
            if all(_tensor_name(part) in self._files for part in parts):
                return self._concatenate(parts, shape)
        expected = " or ".join(" + ".join(parts) for parts in alternatives)
        raise ValueError(
            f"{self._path} has no tensor {expected}; "
            "the download is incomplete or config.json belongs to another model"
        )

    def _concatenate(self, part_names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        tensors = [self._read_part(name) for name in part_names]
        rows = sum(tensor.shape[0] for tensor in tensors if tensor.dim())
        fits = all(
            tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] for tensor in tensors
        )
        if not fits or rows != shape[0]:
            stored = " + ".join(
                f"{name} {list(tensor.shape)}"
                for name, tensor in zip(part_names, tensors, strict=True)
            )
            files = ", ".join(sorted({self._files[_tensor_name(name)].name for name in part_names}))
            raise ValueError(
                f"{self._path}: {stored} in {files} should have shape {list(shape)}; "
                "config.json and the weights belong to different models"
            )
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _read_part(self, part: str) -> Tensor:
        name = _tensor_name(part)
        file = self._files[name]
        entry = _EXPERT_ENTRY.fullmatch(part)
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            handle = self._open_files[file]
            tensor: Tensor
            if entry:  # noqa: SIM108 - two short lines read better than one long one
                tensor = handle.get_slice(name)[int(entry["index"])]  # type: ignore[no-untyped-call]
            else:
                tensor = handle.get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, IndexError) as error:
            raise ValueError(
                f"cannot read {name} from {file}: {error}; the file is damaged, fetch it again"
            ) from error
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ValueError(
                f"{file}: {name} is stored as {tensor.dtype}; "
                "use a checkpoint in float16, bfloat16 or float32"
            )
        return tensor


def _tensor_name(part: str) -> str:
    """Return the name of the tensor that contains a part."""
    entry = _EXPERT_ENTRY.fullmatch(part)
    return part if entry is None else entry["name"]
