"""Weights from safetensors into a decoder: mapped from the file, fused, checked and packed."""

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
    """Build the decoder of `spec` with the weights in the directory `path`, ready to compute.

    `progress` is told the part done, 0 to 1. Weights that `packs` has are not read. Memory stays at the packed
    weights plus one matrix; the embedding stays mapped from the file when its dtype is `dtype`.
    Raises ValueError naming file and tensor when one is missing, damaged or of the wrong shape, and
    when the device has no weights in the format `quantize`.
    """
    pack_cache = pack_cache or PackCache()
    decoder = Decoder(architecture, device, dtype, quantize)
    checkpoint = CheckpointReader(path)
    total = sum(parameter.numel() for parameter in decoder.parameters())
    done = 0
    progress(0.0)
    for place, module in decoder.named_modules():
        if not isinstance(module, LoadableModule):
            continue
        for name, declared in list(module.named_parameters(recurse=False)):
            done += declared.numel()
            if f"{place}.{name}" in pack_cache:
                tensor = declared.to(dtype)
            else:
                stored = (
                    "embed.weight"
                    if architecture.tied_embeddings and place == "head"
                    else f"{place}.{name}"
                )
                tensor = checkpoint.read_tensor(
                    checkpoint_tensor_names(architecture, stored), tuple(declared.shape)
                )
                tensor = tensor.to(device=device.torch_device, dtype=dtype, copy=tensor.dim() == 1)
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        if isinstance(module, Projection):
            module.process_weights_after_loading(device, partial(pack_cache.get, f"{place}.weight"))
        else:
            module.process_weights_after_loading(device)
        progress(done / total)
    return decoder


class CheckpointReader:
    """The tensors of a directory's safetensors files, mapped, not read, until they are used."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the directory lacks files that its index names."""
        self._path = path
        self._files = tensor_files(path)
        self._open_files: dict[Path, safe_open] = {}

    def read_tensor(
        self, alternatives: tuple[tuple[str, ...], ...], shape: tuple[int, ...]
    ) -> Tensor:
        """The tensor of `shape` stored in the first of `ways` that the checkpoint has.

        The parts of a way are concatenated by rows. Raises ValueError naming the tensor at fault.
        """
        for way in alternatives:
            if all(_tensor_name(part) in self._files for part in way):
                return self._concatenate(way, shape)
        wanted = " or ".join(" + ".join(way) for way in alternatives)
        raise ValueError(
            f"{self._path} has no tensor {wanted}; "
            "the download is incomplete or config.json belongs to another model"
        )

    def _concatenate(self, way: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        parts = [self._read_part(part) for part in way]
        rows = sum(part.shape[0] for part in parts if part.dim())
        fits = all(part.dim() == len(shape) and part.shape[1:] == shape[1:] for part in parts)
        if not fits or rows != shape[0]:
            found = " + ".join(
                f"{name} {list(part.shape)}" for name, part in zip(way, parts, strict=True)
            )
            files = ", ".join(sorted({self._files[_tensor_name(part)].name for part in way}))
            raise ValueError(
                f"{self._path}: {found} in {files} should make {list(shape)}; "
                "config.json and the weights belong to different models"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
                "take a checkpoint in float16, bfloat16 or float32"
            )
        return tensor


def _tensor_name(part: str) -> str:
    """The tensor that a part lies in."""
    entry = _EXPERT_ENTRY.fullmatch(part)
    return part if entry is None else entry["name"]
