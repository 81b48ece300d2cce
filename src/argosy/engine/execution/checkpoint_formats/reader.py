"""Reader of a checkpoint's tensors, stored in any form, under the names that they have in full precision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats import QuantizationConfig, parse_quantization
from argosy.engine.execution.checkpoint_formats.bitsandbytes import (
    QUANT_STATE_PREFIX,
    Bnb4Tensor,
    Bnb8Tensor,
)
from argosy.engine.execution.checkpoint_formats.checkpoint import read_config_values
from argosy.engine.execution.checkpoint_formats.compressed import create_compressed_tensor
from argosy.engine.execution.checkpoint_formats.encoded import (
    EncodedTensor,
    GroupedTensor,
    TensorSource,
)
from argosy.engine.execution.checkpoint_formats.float_formats import Fp8Tensor, Mxfp4Tensor
from argosy.engine.execution.checkpoint_formats.gguf_tensors import GgufSource
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedWeight, GroupFormat
from argosy.engine.execution.checkpoint_formats.integer_formats import AwqTensor, GptqTensor
from argosy.engine.execution.checkpoint_formats.tensor_sources import open_tensor_source
from argosy.engine.execution.config.checkpoint_config import CheckpointConfig

HEAD_NAME = "lm_head.weight"
EMBEDDING_SUFFIX = "embed_tokens.weight"
_EXPERT_ENTRY = re.compile(r"(?P<name>.+)\[(?P<index>\d+)\](?P<transposed>\.T)?")
_FLOAT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Stored tensor, or one entry of a stored tensor that holds all experts."""

    name: str
    entry: int | None = None
    is_transposed: bool = False

    @classmethod
    def parse(cls, text: str) -> StoredPart:
        """Parse `name`, `name[entry]` or `name[entry].T`."""
        match = _EXPERT_ENTRY.fullmatch(text)
        if match is None:
            return cls(text)
        return cls(match["name"], int(match["index"]), match["transposed"] is not None)


@dataclass(frozen=True, slots=True)
class EncodedMatrix:
    """Matrix [N, K] whose stored integers the kernels compute with."""

    tensor: GroupedTensor
    entry: int | None
    format: GroupFormat
    shape: tuple[int, int]

    def column_order(self) -> Tensor | None:
        """Return the input column of each column of the values, or None for the same order."""
        return self.tensor.column_order()

    def read(self) -> GroupedWeight:
        """Read the values and scales.

        Raises:
            ValueError: A stored tensor is damaged.
        """
        return self.tensor.read_grouped(self.entry)


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """Matrices of a checkpoint whose stored integers the kernels compute with."""

    description: str
    """Form in which the checkpoint is stored, such as `gptq, 4 bits`."""
    num_weights: int
    num_bytes: int
    """Bytes of these weights with their scales."""


class CheckpointReader:
    """Reader of a checkpoint, whose files are memory-mapped and read on use.

    Quantized matrices have the names that they have in full precision. `read_tensor` and `read_parts` dequantize them,
    and `find_encoded` gives access to their stored integers.
    """

    def __init__(self, path: Path, *, computes_float8: bool = False) -> None:
        """Find the tensors.

        Args:
            path: Directory, or GGUF file.
            computes_float8: Whether the kernels compute with stored e4m3, which is dequantized otherwise.

        Raises:
            ValueError: There are no weights, files are missing or damaged, or config.json does not describe them.
        """
        self.path = path
        self._computes_float8 = computes_float8
        self._encoded: Mapping[str, EncodedTensor] = {}
        self.ignored: tuple[str, ...] = ()
        """Stored tensors that are not needed, such as scales of the KV cache."""
        self.stored_format = "plain"
        """Form in which the matrices are stored, for the log and the identity of the arithmetic."""
        self._source = self._open(path)
        consumed = {name for tensor in self._encoded.values() for name in tensor.stored_names}
        self.files: dict[str, Path] = {
            name: file
            for name, file in self._source.files.items()
            if name not in consumed.union(self.ignored)
        } | {name: tensor.file for name, tensor in self._encoded.items()}
        """File of each tensor."""

    def _open(self, path: Path) -> TensorSource:
        if path.is_file():
            source = GgufSource(path)
            self._encoded = source.encoded
            self.stored_format = f"gguf, {' and '.join(source.types)}"
            return source
        plain = open_tensor_source(path)
        quantization = read_quantization(path)
        if quantization is not None:
            self._encoded = find_encoded_tensors(plain, quantization)
            self.ignored = tuple(sorted(filter(_ACTIVATION_SCALES.fullmatch, plain.files)))
            self.stored_format = quantization.describe()
        return plain

    def find_encoded(self, part: StoredPart) -> EncodedMatrix | None:
        """Return the stored integers of a matrix, or None if it is not stored so or the kernels cannot use them."""
        tensor = self._encoded.get(part.name)
        if not isinstance(tensor, GroupedTensor):
            return None
        group_format = self._native_format(tensor)
        if group_format is None:
            return None
        if len(tensor.shape) != (2 if part.entry is None else 3):
            return None
        if tensor.is_transposed != part.is_transposed:
            return None
        outs, cols = tensor.shape[-2:] if not tensor.is_transposed else tensor.shape[:-3:-1]
        return EncodedMatrix(tensor, part.entry, group_format, (outs, cols))

    def _native_format(self, tensor: GroupedTensor) -> GroupFormat | None:
        """Return the format in which the kernels compute with a tensor, or None if it is dequantized."""
        found = tensor.group_format
        return None if found is None or found.is_float8 > self._computes_float8 else found

    def find_stored_integers(self) -> StoredIntegers | None:
        """Return the stored integers that the kernels compute with, or None if there are none.

        The embedding counts if it is the head.
        """
        has_head = HEAD_NAME in self.files
        num_weights, num_bytes = 0, 0.0
        for name, tensor in self._encoded.items():
            stored = self._native_format(tensor) if isinstance(tensor, GroupedTensor) else None
            if stored is None or (has_head and name.endswith(EMBEDDING_SUFFIX)):
                continue
            count = math.prod(tensor.shape)
            scale_bytes = 8 if stored.has_offsets else 4
            num_weights += count
            num_bytes += count * (stored.bits / 8 + scale_bytes / stored.group_size)
        return (
            StoredIntegers(self.stored_format, num_weights, int(num_bytes)) if num_weights else None
        )

    def part_shape(self, part: StoredPart) -> tuple[int, ...]:
        """Return the shape of a part, without reading its data.

        Raises:
            ValueError: The part is damaged. The message names it.
        """
        tensor = self._encoded.get(part.name)
        shape = self._source.shape(part.name) if tensor is None else tensor.shape
        shape = shape if part.entry is None else shape[1:]
        return shape[::-1] if part.is_transposed else shape

    def read_tensor(self, parts: Sequence[StoredPart], shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of `shape`, whose rows are those of the parts.

        Raises:
            ValueError: A part is damaged or of the wrong shape. The message names it.
        """
        self.check_shape(parts, shape)
        return self.read_parts(parts)

    def check_shape(self, parts: Sequence[StoredPart], shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor whose rows are those of the parts.

        Raises:
            ValueError: A part is damaged or of the wrong shape. The message names it.
        """
        shapes = [self.part_shape(part) for part in parts]
        rows = sum(stored[0] for stored in shapes if stored)
        fits = all(len(stored) == len(shape) and stored[1:] == shape[1:] for stored in shapes)
        if not fits or rows != shape[0]:
            listed = " + ".join(
                f"{part.name} {list(stored)}" for part, stored in zip(parts, shapes, strict=True)
            )
            raise ValueError(
                f"{self.path}: {listed} in {self._file_names(parts)} should have shape {list(shape)}; "
                "config.json and the weights belong to different models"
            )

    def read_parts(self, parts: Sequence[StoredPart]) -> Tensor:
        """Read a tensor of any shape.

        Raises:
            ValueError: A part is damaged. The message names it.
        """
        tensors = [self._read_part(part) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def read_integers(self, name: str) -> Tensor:
        """Read a tensor of integers as int64.

        Raises:
            ValueError: It is damaged or has another dtype. The message names it.
        """
        tensor = self._source.read(name)
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{self.files[name]}: {name} is stored as {tensor.dtype}; it must have integers"
            )
        return tensor.to(torch.int64)

    def check_finite(self, parts: Sequence[StoredPart], converted: Tensor) -> None:
        """Check that a tensor, converted to the model's dtype, has neither NaN nor infinity.

        Raises:
            ValueError: A value is not finite. The message names the tensor.
        """
        if _is_finite(converted):
            return
        damaged = [part for part in parts if not _is_finite(self._read_part(part))]
        names = " + ".join(part.name for part in damaged or parts)
        location = f"{self.path / self._file_names(tuple(damaged) or parts)}: {names}"
        if damaged:
            raise ValueError(
                f"{location} has values that are not finite (NaN or infinity); "
                "the checkpoint is damaged, fetch it again"
            )
        raise ValueError(
            f"{location} has values beyond the range of {str(converted.dtype).removeprefix('torch.')}; "
            "use --dtype bfloat16"
        )

    def _file_names(self, parts: Sequence[StoredPart]) -> str:
        return ", ".join(sorted({self.files[part.name].name for part in parts}))

    def _read_part(self, part: StoredPart) -> Tensor:
        encoded = self._encoded.get(part.name)
        if encoded is not None:
            tensor = encoded.dequantize(part.entry)
        else:
            dtype = self._source.dtype(part.name)
            if dtype not in _FLOAT_DTYPES:
                raise ValueError(
                    f"{self.files[part.name]}: {part.name} is stored as {dtype}; "
                    "use a checkpoint in float16, bfloat16 or float32"
                )
            tensor = self._source.read(part.name, part.entry)
        return tensor.mT if part.is_transposed else tensor


def read_quantization(path: Path) -> QuantizationConfig | None:
    """Read the quantization of a model, which wrappers of several models state next to its config or in it."""
    file, values = read_config_values(path)
    text = values.get("text_config")
    sections = (values, text if isinstance(text, dict) else {})
    found = (parse_quantization(CheckpointConfig(file, section, {})) for section in sections)
    return next((each for each in found if each is not None), None)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, at the speed of memory. NaN propagates to both extremes."""
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())


_ACTIVATION_SCALES = re.compile(
    r".+\.(input_scale|output_scale|activation_scale|input_zero_point|input_global_scale|input_scale_ub"
    r"|[kqv]_scale|[kv]_zero_point|kv_scale|[kv]_proj\.(output_scale|[kv]_scale))$"
)
"""Scales of inputs and of the KV cache, which are computed instead."""


def find_encoded_tensors(
    source: TensorSource, config: QuantizationConfig
) -> dict[str, EncodedTensor]:
    """Find the matrices that are stored as `config` says, by the names that they have in full precision.

    Raises:
        ValueError: There are none, or stored tensors do not belong together. The message names file and tensor.
    """
    found = {tensor.name: tensor for tensor in _find(source, config)}
    if not found:
        raise ValueError(
            f"config.json says that the weights are quantized ({config.describe()}), but no stored tensor is; "
            "remove quantization_config from config.json, or fetch the weights that belong to it"
        )
    return found


def _find(source: TensorSource, config: QuantizationConfig) -> Iterable[EncodedTensor]:
    match config.method:
        case "gptq":
            return (GptqTensor(prefix, source, config) for prefix in _prefixes(source, ".qweight"))
        case "awq":
            return (AwqTensor(prefix, source, config) for prefix in _prefixes(source, ".qweight"))
        case "compressed-tensors":
            prefixes = _prefixes(source, ".weight_scale")
            return (create_compressed_tensor(prefix, source, config) for prefix in prefixes)
        case "fp8":
            return [
                Fp8Tensor(scale.removesuffix(suffix), scale, source, config.block_size)
                for suffix in ("_scale_inv", "_scale")
                for scale in source.files
                if scale.endswith(suffix) and scale.removesuffix(suffix) in source.files
            ]
        case "mxfp4":
            return (Mxfp4Tensor(prefix, source) for prefix in _prefixes(source, "_blocks"))
        case _:
            return _find_bitsandbytes(source)


def _find_bitsandbytes(source: TensorSource) -> Iterable[EncodedTensor]:
    marker = f".weight.{QUANT_STATE_PREFIX}"
    for name in source.files:
        if marker in name:
            yield Bnb4Tensor(name.partition(marker)[0], source)
        elif name.endswith(".SCB"):
            yield Bnb8Tensor(name.removesuffix(".SCB"), source)


def _prefixes(source: TensorSource, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in source.files if name.endswith(suffix)]
