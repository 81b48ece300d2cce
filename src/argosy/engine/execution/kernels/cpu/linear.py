"""Linear layers on the CPU, with weights packed once and results that do not depend on the rest of the batch.

Layers with int8, int4 or grouped weights have bit-identical native and torch implementations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.engine.engine_config import IntFormat
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GroupedSource,
    GroupedWeight,
    grouped_linear,
)
from argosy.engine.execution.checkpoint_formats.quantization import (
    NON_FINITE_WEIGHT,
    quantize_weight,
    quantized_linear,
)
from argosy.engine.execution.kernels.cpu.native_kernels import (
    Kernels,
    LinearCall,
    LinearGroupCall,
    load_kernels,
)
from argosy.engine.execution.kernels.pack_cache import PackedWeightProvider, pack_in_memory
from argosy.native import NativeUnavailableError


def create_cpu_linear(
    weight: Tensor,
    bias: Tensor | None,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Callable[[Tensor], Tensor]:
    """Pack weight [N, K] and bias [N], and return a function that maps [T, K] to [T, N] in their dtype.

    bfloat16 uses the native kernel if available, and else products of tiles with a fixed number of rows. These
    products and float32 use oneDNN. bfloat16 on a CPU without AVX-512 uses torch, because oneDNN does not support it.
    """
    if weight.dtype == torch.bfloat16:
        try:
            return NativeLinear(load_kernels(), weight, bias, threads, get_packed)
        except NativeUnavailableError:
            pass  # `create_cpu_attention` logs the reason
    linear = (
        OnednnLinear(weight, bias) if _onednn_packs(weight.dtype) else _DenseLinear(weight, bias)
    )
    return _TiledLinear(linear) if weight.dtype == torch.bfloat16 else linear


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - the only entry
    return dtype == torch.float32


class NativeLinear:
    """Linear layer by csrc/linear.cpp, in bfloat16 with float32 sums in the same order for every batch size."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        threads: int,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> None:
        """Pack the weight, which may be on `meta` if `get_packed` has its packed form."""
        outs, cols = weight.shape
        self._compute = kernels.linear

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            kernels.linear_pack(dense.data_ptr(), outs, cols, packed.data_ptr(), threads)

        packed = get_packed(kernels.linear_packed_bytes(outs, cols), pack)
        self._matmul = NativeMatmul(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return self._matmul(self._compute, x)


class NativeMatmul:
    """Matrix multiplication by a native kernel, with a packed weight and a bias."""

    OUTPUT_BLOCK = 32
    """Number of outputs that kernels compute together. The bias is padded to a multiple of it."""

    def __init__(
        self,
        packed: Tensor,
        num_outputs: int,
        bias: Tensor | None,
        threads: int,
        create_call: Callable[..., LinearCall] = LinearCall,
    ) -> None:
        """Create the product with a packed weight. `create_call` takes the values of `LinearCall`'s fields."""
        self._packed = packed
        self._num_outputs = num_outputs
        self._threads = threads
        self._create_call = create_call
        padding = (0, -num_outputs % self.OUTPUT_BLOCK)
        self._bias = None if bias is None else F.pad(bias.detach().float(), padding)

    def __call__(self, compute: Callable[[int], int], x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N] in x's dtype with the kernel `compute`, which takes the address of the call."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, cols = x.shape
        out = torch.empty(rows, self._num_outputs, dtype=x.dtype)
        call = self._create_call(
            x.data_ptr(),
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            rows,
            cols,
            self._num_outputs,
            x.stride(0),
            self._threads,
        )
        compute(ctypes.addressof(call))
        return out


class OnednnLinear:
    """Linear layer x @ weight.T + bias, with the weight in oneDNN's blocked layout."""

    ROWS_HINT = 64
    """Batch size for which oneDNN chooses the layout. Other batch sizes work too."""
    MAX_STABLE_COLS = 1024
    """Largest K for which oneDNN uses the same kernel for one row as for two. Above it, a single row is duplicated."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - the only entry
            weight.detach().contiguous(), self.ROWS_HINT
        )
        self._bias = bias
        self._duplicates_single_row = weight.shape[1] > self.MAX_STABLE_COLS

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if self._duplicates_single_row and len(x) == 1:
            return self(x.expand(2, -1).contiguous())[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - the only entry
            x, self._weight, self._bias, "none", [], ""
        )
        return out


class _TiledLinear:
    """Linear layer whose matrix products all have the same number of rows.

    oneDNN splits a long bfloat16 sum depending on the number of rows, so results would depend on the batch. With tiles
    of 16 rows, a single row costs 1.7 times a plain product, and a long batch 1.9 times. Tiles of 8 or 32 rows cost
    more in one of the two cases.
    """

    TILE_ROWS = 16

    def __init__(self, linear: Callable[[Tensor], Tensor]) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        rows = len(x)
        tiles = F.pad(x, (0, 0, 0, -rows % self.TILE_ROWS)).split(self.TILE_ROWS)
        return torch.cat([self._linear(tile) for tile in tiles])[:rows]


class _DenseLinear:
    """Linear layer x @ weight.T + bias, with the weight unpacked."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


def create_int_linear(
    weight: Tensor,
    bias: Tensor | None,
    weight_format: IntFormat,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Callable[[Tensor], Tensor]:
    """Quantize and pack weight [N, K], and return a function that maps [T, K] to [T, N] in its dtype."""
    try:
        return NativeIntLinear(load_kernels(), weight, bias, weight_format, threads, get_packed)
    except NativeUnavailableError:
        return TorchIntLinear(weight, bias, weight_format)  # `create_cpu_attention` logs the reason


class NativeIntLinear:
    """Linear layer by csrc/linear_int.cpp, with integer products on the fastest unit of this CPU."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        weight_format: IntFormat,
        threads: int,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> None:
        """Quantize and pack the weight, which may be on `meta` if `get_packed` has its packed form."""
        outs, cols = weight.shape
        int_kernels = kernels.linear_int[weight_format]
        self._compute = int_kernels.linear_by_dtype

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            if dense.dtype not in int_kernels.pack_by_dtype:
                dense = dense.float()
            is_finite = int_kernels.pack_by_dtype[dense.dtype](
                dense.data_ptr(), outs, cols, packed.data_ptr(), threads
            )
            if not is_finite:
                raise ValueError(NON_FINITE_WEIGHT)

        packed = get_packed(int_kernels.packed_bytes(outs, cols), pack)
        self._matmul = NativeMatmul(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._matmul(self._compute[x.dtype], x)


class TorchIntLinear:
    """Linear layer in plain torch, with the weight as 8-bit integers in both formats."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: IntFormat) -> None:
        self._integers = torch.empty(weight.shape, dtype=torch.int8)
        scales: list[Tensor] = []
        row = 0
        for part in quantize_weight(weight, weight_format):
            self._integers[row : row + len(part.values)] = part.to_int8()
            scales.append(part.scales)
            row += len(part.values)
        self._scales = torch.cat(scales)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return quantized_linear(x, self._integers, self._scales, self._bias)


def create_group_linear(
    source: GroupedSource, bias: Tensor | None, threads: int, get_packed: PackedWeightProvider
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps [T, K] to [T, N]. The weight is read unless `get_packed` has its packed form."""
    try:
        kernels = load_kernels()
    except NativeUnavailableError:
        return TorchGroupLinear(source.read(), bias)  # `create_cpu_attention` logs the reason
    return NativeGroupLinear(kernels, source, bias, threads, get_packed)


class NativeGroupLinear:
    """Linear layer by csrc/linear_group.cpp."""

    def __init__(
        self,
        kernels: Kernels,
        source: GroupedSource,
        bias: Tensor | None,
        threads: int,
        get_packed: PackedWeightProvider,
    ) -> None:
        """Pack the weight."""
        group_kernels = kernels.linear_group[source.format.bits]
        self._compute = group_kernels.linear_by_dtype
        size, has_offsets = source.format.group_size, int(source.format.has_offsets)

        def pack(packed: Tensor) -> None:
            weight = source.read()
            values, scales = weight.values.contiguous(), weight.scales.contiguous()
            offsets = None if weight.offsets is None else weight.offsets.contiguous()
            group_kernels.pack(
                values.data_ptr(),
                scales.data_ptr(),
                None if offsets is None else offsets.data_ptr(),
                *source.shape,
                size,
                packed.data_ptr(),
                threads,
            )

        packed = get_packed(group_kernels.packed_bytes(*source.shape, size, has_offsets), pack)
        self._table = torch.tensor(source.format.table, dtype=torch.int8).view(torch.uint8) ^ 128
        create_call = partial(
            LinearGroupCall, table=self._table.data_ptr(), group=size, has_offsets=has_offsets
        )
        self._matmul = NativeMatmul(packed, source.shape[0], bias, threads, create_call)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        if x.dtype not in self._compute:
            return self(x.float()).to(x.dtype)
        return self._matmul(self._compute[x.dtype], x)


class TorchGroupLinear:
    """Linear layer in plain torch, with the values as 8-bit integers."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._weight = replace(weight, values=weight.to_int8())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return grouped_linear(x, self._weight, self._bias)
