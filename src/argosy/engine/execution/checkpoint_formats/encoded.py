"""Matrices that a checkpoint stores in another form than numbers of one dtype, each of several stored tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.grouped_weight import GroupedWeight, GroupFormat


class TensorSource(Protocol):
    """Tensors in the files of a checkpoint."""

    @property
    def files(self) -> Mapping[str, Path]:
        """File of each stored tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading its data.

        Raises:
            ValueError: The file is damaged. The message names it.
        """
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading its data."""
        ...

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """Read a tensor, or one entry of its first dimension. The data stays mapped from the file where possible.

        Raises:
            ValueError: The file is damaged. The message names it.
        """
        ...


class EncodedTensor(ABC):
    """Matrix [N, K], or 3-D tensor [E, N, K] of matrices, that several stored tensors encode together.

    Constructors raise a ValueError if the stored tensors do not belong together.
    """

    def __init__(
        self, name: str, source: TensorSource, shape: tuple[int, ...], stored_names: Sequence[str]
    ) -> None:
        self.name = name
        self.shape = shape
        self.stored_names = tuple(stored_names)
        """Names of the stored tensors, that of the values first."""
        self._source = source

    @property
    def file(self) -> Path:
        """File with the values."""
        return self._source.files[self.stored_names[0]]

    @abstractmethod
    def dequantize(self, entry: int | None = None) -> Tensor:
        """Read a matrix, or the whole 3-D tensor without an `entry`, as float32 of the shape in full precision.

        Raises:
            ValueError: A stored tensor is damaged. The message names it.
        """

    def error(self, stored_name: str, problem: str) -> ValueError:
        """Build the error for a stored tensor that does not fit."""
        return ValueError(
            f"{self._source.files[stored_name]}: {stored_name} {problem}; "
            "config.json and the weights belong to different models, or the checkpoint is damaged"
        )

    def check_shape(self, stored_name: str, *expected: tuple[int, ...]) -> None:
        """Check the shape of a stored tensor.

        Raises:
            ValueError: It is not among the expected ones.
        """
        shape = self._source.shape(stored_name)
        if shape not in expected:
            listed = " or ".join(str(list(each)) for each in expected)
            raise self.error(stored_name, f"has shape {list(shape)} and should have {listed}")

    def read_scales(self, stored_name: str, entry: int | None = None) -> Tensor:
        """Read scales as float32.

        Raises:
            ValueError: A scale is not finite.
        """
        scales = self._source.read(stored_name, entry).float()
        if not bool(scales.isfinite().all()):
            raise ValueError(
                f"{self._source.files[stored_name]}: {stored_name} has values that are not finite (NaN or infinity); "
                "the checkpoint is damaged, fetch it again"
            )
        return scales


class GroupedTensor(EncodedTensor):
    """Encoded tensor with whose stored values the kernels compute, if it has a `group_format`."""

    is_transposed = False
    """Whether checkpoints in full precision store each matrix as [K, N]. Then `shape` is [E, K, N]."""

    @property
    @abstractmethod
    def group_format(self) -> GroupFormat | None:
        """Format in which the kernels compute with the stored values, or None if they have to be dequantized."""

    def column_order(self) -> Tensor | None:
        """Return the input column of each column of the values of `read_grouped`, or None for the same order."""
        return None

    @abstractmethod
    def read_grouped(self, entry: int | None = None) -> GroupedWeight:
        """Read the stored values of a matrix in `group_format`.

        Raises:
            ValueError: A stored tensor is damaged, or there is no `group_format`. The message names it.
        """

    def dequantize(self, entry: int | None = None) -> Tensor:
        if entry is None and len(self.shape) == 3:
            return torch.stack([self.dequantize(index) for index in range(self.shape[0])])
        weight = self.read_grouped(entry).dequantize()
        return weight.mT.contiguous() if self.is_transposed else weight


def matrix_shape(source: TensorSource, name: str) -> tuple[int, int]:
    """Return the shape of a matrix with at least one element.

    Raises:
        ValueError: There is no such tensor, or it is not a matrix.
    """
    shape = source.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"{source.files[name]}: {name} has shape {list(shape)} and should be a matrix; "
            "the checkpoint is damaged, fetch it again"
        )
    return shape


def unpack_integers(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [R, W] to unsigned integers [R, W * (32 / bits)] uint8, lowest bits first."""
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (data.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(1)
