"""Linear layers over a checkpoint's own integers, whose parts may be stored in different forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedSource,
    GroupedWeight,
    concatenate,
    select_rows,
)
from argosy.engine.execution.checkpoint_formats.reader import (
    CheckpointReader,
    EncodedMatrix,
    StoredPart,
)
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.pack_cache import PackCache


@dataclass(frozen=True, slots=True)
class EncodedLinear:
    """Linear layer, and how its matrices are computed with."""

    compute: Callable[[Tensor], Tensor]
    """Function that maps x [T, K] to [T, N]."""
    formats: tuple[str, ...]
    """Format of each run of rows, such as `int4 per 128`."""


def create_encoded_linear(
    checkpoint: CheckpointReader,
    parts: Sequence[StoredPart],
    bias: Tensor | None,
    device: Device,
    *,
    dtype: torch.dtype,
    pack_cache: PackCache,
    pack_key: str,
    row_order: Sequence[int] | None = None,
) -> EncodedLinear:
    """Create a linear layer whose rows are those of the parts, with the integers that the checkpoint stores.

    Neighbouring parts of the same format are one matrix. Parts that the kernels cannot use as stored are dequantized.

    Args:
        checkpoint: The checkpoint.
        parts: Parts whose rows are the outputs.
        bias: Bias of all rows, in the order of the checkpoint.
        device: Compute device, which computes with grouped weights.
        dtype: Dtype of matrices that are not quantized.
        pack_cache: Cache of packed weights.
        pack_key: Key of the layer in the cache.
        row_order: Row in the checkpoint of each output. None is the same order.

    Raises:
        ValueError: A part is damaged.
    """
    matrices = [checkpoint.find_encoded(part) for part in parts]
    runs = _find_runs(matrices)
    order = None if row_order is None else torch.tensor(row_order)
    packed_order = order if len(runs) == 1 else None
    if bias is not None and packed_order is not None:
        bias = bias[packed_order]
    computes: list[Callable[[Tensor], Tensor]] = []
    formats: list[str] = []
    start = 0
    for number, (first, last) in enumerate(runs):
        rows = sum(checkpoint.part_shape(part)[0] for part in parts[first:last])
        run_bias = None if bias is None else bias[start : start + rows]
        start += rows
        get_packed = partial(pack_cache.get, f"{pack_key}#{number}" if len(runs) > 1 else pack_key)
        matrix = matrices[first]
        if matrix is None:
            stored = checkpoint.read_parts(parts[first:last])
            weight = stored.to(device=device.torch_device, dtype=dtype)
            checkpoint.check_finite(parts[first:last], weight)
            computes.append(device.create_linear(weight, run_bias, None, get_packed))
            formats.append(str(dtype).removeprefix("torch."))
            continue
        run = [each for each in matrices[first:last] if each is not None]
        source = GroupedSource(
            matrix.format, (rows, matrix.shape[1]), partial(_read_run, run, packed_order)
        )
        compute = device.create_group_linear(source, run_bias, get_packed)
        columns = matrix.column_order()
        computes.append(compute if columns is None else _ReorderedInput(compute, columns))
        formats.append(matrix.format.describe())
    compute = computes[0] if len(computes) == 1 else _ConcatenatedOutputs(computes, order)
    return EncodedLinear(compute, tuple(formats))


def _find_runs(matrices: Sequence[EncodedMatrix | None]) -> list[tuple[int, int]]:
    """Return first and last index + 1 of neighbours that can be one matrix."""
    keys: list[int] = []
    for index, matrix in enumerate(matrices):
        joins = index > 0 and _can_join(matrices[index - 1], matrix)
        keys.append(keys[-1] if joins else index)
    return [(key, key + len(list(group))) for key, group in groupby(keys)]


def _can_join(a: EncodedMatrix | None, b: EncodedMatrix | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.format != b.format or a.shape[1] != b.shape[1]:
        return False
    first, second = a.column_order(), b.column_order()
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _read_run(matrices: Sequence[EncodedMatrix], order: Tensor | None) -> GroupedWeight:
    weight = concatenate([matrix.read() for matrix in matrices])
    return weight if order is None else select_rows(weight, order)


class _ReorderedInput:
    """Linear layer whose columns are in another order than its input."""

    def __init__(self, compute: Callable[[Tensor], Tensor], columns: Tensor) -> None:
        self._compute = compute
        self._columns = columns

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x.index_select(1, self._columns))


class _ConcatenatedOutputs:
    """Linear layers with the same input, whose outputs are concatenated, and then ordered."""

    def __init__(
        self, computes: Sequence[Callable[[Tensor], Tensor]], order: Tensor | None
    ) -> None:
        self._computes = computes
        self._order = order

    def __call__(self, x: Tensor) -> Tensor:
        outputs = torch.cat([compute(x) for compute in self._computes], 1)
        return outputs if self._order is None else outputs.index_select(1, self._order)
