"""Adapters of linear layers on the CPU, by a native kernel if it builds, else by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.execution.kernels.cpu.native_kernels import (
    Kernels,
    LoraCall,
    LoraWeights,
    load_kernels,
)
from argosy.engine.execution.kernels.torch.lora import (
    AdapterWeights,
    LinearUpdate,
    TorchRowAdapters,
)
from argosy.native import NativeUnavailableError

LANES = 16
"""Ranks or outputs of a panel of packed weights."""


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """Adapter in the form of the CPU."""

    weights: AdapterWeights
    """Weights that torch computes with."""
    addresses: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Address of the packed update of each linear layer, or 0."""
    num_bytes: int
    packed: tuple[object, ...]
    """Owners of the memory behind the addresses."""


def create_cpu_adapter(weights: AdapterWeights, num_linears: int, dtype: torch.dtype) -> CpuAdapter:
    """Pack the updates of linear layers for the native kernel, if it is available in this dtype."""
    addresses = np.zeros(num_linears, np.int64)
    kernels = _find_kernels(dtype)
    if kernels is None:
        return CpuAdapter(weights, addresses, weights.num_bytes, ())
    owners: list[object] = []
    num_bytes = replace(weights, linears={}).num_bytes
    for number, update in weights.linears.items():
        packed, tensors = _pack(update)
        addresses[number] = ctypes.addressof(packed)
        owners += [packed, tensors]
        num_bytes += sum(tensor.nbytes for tensor in tensors)
    return CpuAdapter(replace(weights, linears={}), addresses, num_bytes, tuple(owners))


def create_cpu_row_adapters(
    adapters: Sequence[CpuAdapter], rows: Tensor, starts: Tensor, dtype: torch.dtype, threads: int
) -> TorchRowAdapters:
    """Create the adapters of rows, see `TorchRowAdapters`."""
    kernels = _find_kernels(dtype)
    if kernels is None:
        return TorchRowAdapters([adapter.weights for adapter in adapters], rows, starts)
    return _NativeRowAdapters(kernels, adapters, rows, starts, dtype, threads)


def _find_kernels(dtype: torch.dtype) -> Kernels | None:
    try:
        kernels = load_kernels()
    except NativeUnavailableError:
        return None  # `create_cpu_attention` logs the reason
    return kernels if dtype in kernels.lora else None


class _NativeRowAdapters(TorchRowAdapters):
    """Adapters of rows, with linear layers by csrc/lora.cpp. Not thread-safe, because all calls share one structure."""

    def __init__(
        self,
        kernels: Kernels,
        adapters: Sequence[CpuAdapter],
        rows: Tensor,
        starts: Tensor,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        super().__init__([adapter.weights for adapter in adapters], rows, starts)
        self._run = kernels.lora[dtype]
        table = np.stack([adapter.addresses for adapter in adapters])
        self._is_used: list[bool] = (table != 0).any(axis=0).tolist()
        self._owners = (tuple(adapters), rows, starts, table)
        self._table_address = table.ctypes.data
        self._call = LoraCall(
            rows=rows.data_ptr(),
            starts=starts.data_ptr(),
            segments=len(adapters),
            weights_stride=table.shape[1],
            threads=threads,
        )

    def update_linear(self, number: int, x: Tensor, out: Tensor) -> None:
        if not self._is_used[number]:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        call = self._call
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.weights = self._table_address + 8 * number
        call.cols, call.outs, call.x_stride = x.shape[1], out.shape[1], x.stride(0)
        self._run(ctypes.addressof(call))


def _pack(update: LinearUpdate) -> tuple[LoraWeights, list[Tensor]]:
    """Pack an update, see csrc/lora.cpp. Ranks of a run are padded to whole words.

    Returns the structure, and the tensors that it points to.
    """
    per_word = 4 // update.a.element_size()
    a_rows, runs, b_parts, ranks = [], [], [], 0
    first_ranks: dict[int, int] = {}
    for run in update.runs:
        size = run.b.shape[1]
        padded = -(-size // per_word) * per_word
        if run.first_rank not in first_ranks:  # runs of the same ranks share them
            first_ranks[run.first_rank] = ranks
            rows = update.a[run.first_rank : run.first_rank + size]
            a_rows.append(F.pad(rows, (0, 0, 0, padded - size)))
            ranks += padded
        runs.append((run.first, len(run.b), first_ranks[run.first_rank], padded))
        b_parts.append(_pack_panels(F.pad(run.b, (0, padded - size))))
    tensors = [_pack_panels(torch.cat(a_rows)), torch.cat(b_parts), torch.tensor(runs)]
    for tensor in (update.gain, update.offset):
        tensors += [] if tensor is None else [tensor.contiguous()]
    a, b, run_table, *factors = tensors
    factor_pointers = iter(factors)
    packed = LoraWeights(
        a=a.data_ptr(),
        b=b.data_ptr(),
        gain=None if update.gain is None else next(factor_pointers).data_ptr(),
        offset=None if update.offset is None else next(factor_pointers).data_ptr(),
        runs=run_table.data_ptr(),
        ranks=ranks,
        num_runs=len(runs),
    )
    return packed, tensors


def _pack_panels(matrix: Tensor) -> Tensor:
    """Pack a matrix [N, K] to flat int32 words [ceil(N / 16)][words of K][16]."""
    per_word = 4 // matrix.element_size()
    padded = F.pad(matrix, (0, -matrix.shape[1] % per_word, 0, -len(matrix) % LANES)).contiguous()
    words = padded.view(torch.int32)
    return words.view(-1, LANES, words.shape[1]).transpose(1, 2).contiguous().flatten()
