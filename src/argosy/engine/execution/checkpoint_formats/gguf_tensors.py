"""Tensors of GGUF files under the names of safetensors checkpoints, and the block formats of their matrices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.encoded import GroupedTensor
from argosy.engine.execution.checkpoint_formats.float_formats import FP4_DOUBLED, power_of_two
from argosy.engine.execution.checkpoint_formats.gguf_config import checkpoint_name, find_gguf_family
from argosy.engine.execution.checkpoint_formats.gguf_file import GgufFile, GgufTensor, read_gguf
from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedWeight, GroupFormat

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SIGNED_NIBBLES = tuple(range(-8, 8))
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class GgufSource:
    """Tensors of a GGUF file that are plain numbers, and in `encoded` the matrices in blocks."""

    def __init__(self, path: Path) -> None:
        """Read the structure of the file.

        Raises:
            ValueError: The file is damaged, or its architecture is not supported.
        """
        file = read_gguf(path)
        self._family = find_gguf_family(file)
        self._head_counts = _head_counts(file)
        self._plain: dict[str, tuple[GgufTensor, int | None]] = {}
        self.encoded: dict[str, GroupedTensor] = {}
        for tensor in file.tensors.values():
            template = checkpoint_name(self._family, tensor.name)
            if template is not None:
                self._add(tensor, template)
        self.files = {name: tensor.file for name, (tensor, _) in self._plain.items()}
        self.types = sorted({tensor.type.name for tensor in file.tensors.values()})

    def shape(self, name: str) -> tuple[int, ...]:
        tensor, expert = self._plain[name]
        return tensor.shape if expert is None else tensor.shape[1:]

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN_DTYPES[self._plain[name][0].type.name]

    def read(self, name: str, entry: int | None = None) -> Tensor:
        tensor, expert = self._plain[name]
        values = _map_bytes(tensor).view(self.dtype(name)).view(tensor.shape)
        if expert is not None:
            values = values[expert]
        order = self._row_order(name, values.shape[0])
        if order is not None:
            values = values[order]
        if self._family.norm_offset and name.endswith("norm.weight"):
            values = values.float() - self._family.norm_offset
        return values if entry is None else values[entry]

    def _add(self, tensor: GgufTensor, template: str) -> None:
        experts: list[int | None] = [None]
        if "{e}" in template:
            experts = list(range(tensor.shape[0]))
            if len(tensor.shape) != 3:
                raise ValueError(
                    f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)} and should have three dimensions; "
                    "the file is damaged, fetch it again"
                )
        for expert in experts:
            name = template.replace("{e}", str(expert))
            if tensor.type.name in _PLAIN_DTYPES:
                self._plain[name] = (tensor, expert)
            else:
                rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
                self.encoded[name] = BlockTensor(name, tensor, expert, self._row_order(name, rows))

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """Return the stored row of each row of q or k, or None for the same order."""
        heads = next(
            (count for part, count in self._head_counts.items() if f".{part}." in name), None
        )
        if not self._family.has_permuted_heads or heads is None:
            return None
        if rows % (2 * heads):
            raise ValueError(f"{name} has {rows} rows for {heads} heads; the file is damaged")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _head_counts(file: GgufFile) -> dict[str, int]:
    architecture = file.metadata["general.architecture"]
    counts: dict[str, int] = {}
    for part, key in (("q_proj", "head_count"), ("k_proj", "head_count_kv")):
        value = file.metadata.get(f"{architecture}.attention.{key}")
        if value is None and part == "k_proj":
            value = counts["q_proj"]
        if not isinstance(value, int) or value <= 0:
            raise ValueError(
                f"{file.path}: {architecture}.attention.{key} is {str(value)[:80]!r}; it must be a number above 0"
            )
        counts[part] = value
    return counts


class BlockTensor(GroupedTensor):
    """Matrix in blocks of llama.cpp, or one expert's part of a tensor of such matrices."""

    def __init__(
        self, name: str, tensor: GgufTensor, expert: int | None, row_order: Tensor | None
    ) -> None:
        shape = tensor.shape if expert is None else tensor.shape[1:]
        self.name, self.shape, self.stored_names = name, shape, ()
        self._tensor = tensor
        self._expert = expert
        self._row_order = row_order
        self._decoding = _DECODINGS[tensor.type.name]

    @property
    def file(self) -> Path:
        return self._tensor.file

    @property
    def group_format(self) -> GroupFormat:
        return self._decoding.format

    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        del entry
        rows = self.shape[0] if len(self.shape) > 1 else 1
        row_bytes = self.shape[-1] // self._tensor.type.block_size * self._tensor.type.block_bytes
        data = _map_bytes(self._tensor).view(-1, row_bytes)
        if self._expert is not None:
            data = data[self._expert * rows : (self._expert + 1) * rows]
        if self._row_order is not None:
            data = data[self._row_order]
        blocks = data.unflatten(1, (-1, self._tensor.type.block_bytes))
        decoded = self._decoding.decode(blocks)
        scales = decoded.scales.flatten(1)
        offsets = None if decoded.offsets is None else decoded.offsets.flatten(1)
        for numbers in (scales, offsets):
            if numbers is not None and not bool(numbers.isfinite().all()):
                raise ValueError(
                    f"{self.file}: {self._tensor.name} has scales that are not finite (NaN or infinity); "
                    "the file is damaged, fetch it again"
                )
        return GroupedWeight(self.group_format, decoded.values.flatten(1), scales, offsets)

    def dequantize(self, entry: int | None = None) -> Tensor:
        return self.read_grouped(entry).dequantize().view(self.shape)


def _map_bytes(tensor: GgufTensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mapping is read-only
        return torch.from_numpy(tensor.read_bytes())


class _Decoded(NamedTuple):
    """Values [N, blocks, ..., group], and scales and offsets [N, blocks, ...] of their groups."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None


class _Decoding(NamedTuple):
    """How blocks [N, blocks, bytes] become integers with scales."""

    format: GroupFormat
    decode: Callable[[Tensor], _Decoded]


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of each block as float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the low halves of some bytes, and then the high halves."""
    return torch.cat([data & 15, data >> 4], -1)


def _decode_q8_0(blocks: Tensor) -> _Decoded:
    return _Decoded(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None)


def _decode_nibbles(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[..., 2:]), _half(blocks, 0), None)


def _decode_q4_1(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _decode_mxfp4(blocks: Tensor) -> _Decoded:
    scales = power_of_two(blocks[..., :1].int() - 128)
    return _Decoded(_nibbles(blocks[..., 1:]), scales, None)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return the highest bit of each of 32 values, in a 32-bit word, as 0 or 16."""
    bits = blocks[..., start : start + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _decode_q5_0(blocks: Tensor) -> _Decoded:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return _Decoded(values.view(torch.int8) - 16, _half(blocks, 0), None)


def _decode_q5_1(blocks: Tensor) -> _Decoded:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return _Decoded(values.view(torch.int8), _half(blocks, 0), _half(blocks, 2))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [N, blocks, 8] of Q4_K and Q5_K, which have six bits and two factors."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], -1)
    minimums = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], -1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _decode_q4_k(blocks: Tensor) -> _Decoded:
    scales, offsets = _k_scales(blocks)
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return _Decoded(values.unflatten(-1, (2, 32)).flatten(-3, -2), scales, offsets)


def _decode_q5_k(blocks: Tensor) -> _Decoded:
    scales, offsets = _k_scales(blocks)
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[..., 16:48].unsqueeze(-2) >> shifts & 1) << 4
    return _Decoded((low | high).view(torch.int8), scales, offsets)


def _decode_q6_k(blocks: Tensor) -> _Decoded:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [2, 128]: 4 x 32
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3  # [2, 4, 32]
    values = (low.unflatten(-1, (4, 32)) | high << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return _Decoded(values.flatten(-3), scales, None)


_DECODINGS = {
    "Q4_0": _Decoding(
        GroupFormat(4, 32, has_offsets=False, table=_SIGNED_NIBBLES), _decode_nibbles
    ),
    "Q4_1": _Decoding(GroupFormat(4, 32, has_offsets=True), _decode_q4_1),
    "Q5_0": _Decoding(GroupFormat(8, 32, has_offsets=False), _decode_q5_0),
    "Q5_1": _Decoding(GroupFormat(8, 32, has_offsets=True), _decode_q5_1),
    "Q8_0": _Decoding(GroupFormat(8, 32, has_offsets=False), _decode_q8_0),
    "Q4_K": _Decoding(GroupFormat(4, 32, has_offsets=True), _decode_q4_k),
    "Q5_K": _Decoding(GroupFormat(8, 32, has_offsets=True), _decode_q5_k),
    "Q6_K": _Decoding(GroupFormat(8, 16, has_offsets=False), _decode_q6_k),
    "IQ4_NL": _Decoding(GroupFormat(4, 32, has_offsets=False, table=_IQ4_VALUES), _decode_nibbles),
    "MXFP4": _Decoding(GroupFormat(4, 32, has_offsets=False, table=FP4_DOUBLED), _decode_mxfp4),
}
