"""Linear layers on the CPU, with weights packed once and results that do not depend on the rest of the batch.

Layers with int8, int4 or grouped weights have bit-identical native and torch implementations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
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

Linear = Callable[[Tensor], Tensor]
"""Function that maps x [T, K] to [T, N] in x's dtype."""
OUTPUT_BLOCK = 32
"""Number of outputs that native kernels compute together. The bias is padded to a multiple of it."""
TILE_ROWS = 16
"""Rows of a tile. A single row costs 1.7 times a plain product, and a long batch 1.9 times. Tiles of 8 or 32 rows cost
more in one of the two cases."""
ONEDNN_ROWS_HINT = 64
"""Batch size for which oneDNN chooses the layout. Other batch sizes work too."""
MAX_STABLE_COLS = 1024
"""Largest K for which oneDNN uses the same kernel for one row as for two. Above it, a single row is duplicated."""


def create_cpu_linear(
    weight: Tensor, bias: Tensor | None, threads: int, get_packed: PackedWeightProvider
) -> Linear:
    """Pack a weight [N, K], which may be on `meta` if `get_packed` has its packed form, with a bias [N].

    bfloat16 uses the native kernel if available, and else products of tiles with a fixed number of rows. These
    products and float32 use oneDNN. bfloat16 on a CPU without AVX-512 uses torch, because oneDNN does not support it.
    """
    if weight.dtype == torch.bfloat16:
        try:
            return native_linear(load_kernels(), weight, bias, threads, get_packed)
        except NativeUnavailableError:
            pass  # `create_cpu_attention` logs the reason
    packs = _onednn_packs(weight.dtype)
    linear = onednn_linear(weight, bias) if packs else partial(F.linear, weight=weight, bias=bias)
    return _tile_rows(linear) if weight.dtype == torch.bfloat16 else linear


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - the only entry
    return dtype == torch.float32


def native_linear(
    kernels: Kernels,
    weight: Tensor,
    bias: Tensor | None,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Linear:
    """Use csrc/linear.cpp, in bfloat16 with float32 sums in the same order for every batch size."""
    outs, cols = weight.shape

    def pack(packed: Tensor) -> None:
        dense = weight.detach().contiguous()
        kernels.linear_pack(dense.data_ptr(), outs, cols, packed.data_ptr(), threads)

    packed = get_packed(kernels.linear_packed_bytes(outs, cols), pack)
    return _native_matmul({torch.bfloat16: kernels.linear}, packed, outs, bias, threads)


def _native_matmul(
    kernel_by_dtype: Mapping[torch.dtype, Callable[[int], int]],
    packed: Tensor,
    num_outputs: int,
    bias: Tensor | None,
    threads: int,
    create_call: Callable[..., LinearCall] = LinearCall,
) -> Linear:
    """Multiply by a packed weight. `create_call` gets the values of `LinearCall`'s fields.

    A kernel gets the address of the call. Inputs in a dtype without kernel are computed in float32.
    """
    padding = (0, -num_outputs % OUTPUT_BLOCK)
    padded_bias = None if bias is None else F.pad(bias.detach().float(), padding)

    def multiply(x: Tensor) -> Tensor:
        if x.dtype not in kernel_by_dtype:
            return multiply(x.float()).to(x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, cols = x.shape
        out = torch.empty(rows, num_outputs, dtype=x.dtype)
        call = create_call(
            x.data_ptr(),
            packed.data_ptr(),
            None if padded_bias is None else padded_bias.data_ptr(),
            out.data_ptr(),
            rows,
            cols,
            num_outputs,
            x.stride(0),
            threads,
        )
        kernel_by_dtype[x.dtype](ctypes.addressof(call))
        return out

    return multiply


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Use oneDNN, with the weight in its blocked layout."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - the only entry
        weight.detach().contiguous(), ONEDNN_ROWS_HINT
    )
    duplicates_single_row = weight.shape[1] > MAX_STABLE_COLS

    def multiply(x: Tensor) -> Tensor:
        if duplicates_single_row and len(x) == 1:
            return multiply(x.expand(2, -1).contiguous())[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")  # noqa: SLF001 - the only entry
        return out

    return multiply


def _tile_rows(linear: Linear) -> Linear:
    """Compute products that all have the same number of rows.

    oneDNN splits a long bfloat16 sum depending on the number of rows, so results would depend on the batch.
    """

    def multiply(x: Tensor) -> Tensor:
        rows = len(x)
        tiles = F.pad(x, (0, 0, 0, -rows % TILE_ROWS)).split(TILE_ROWS)
        return torch.cat([linear(tile) for tile in tiles])[:rows]

    return multiply


def create_int_linear(
    weight: Tensor,
    bias: Tensor | None,
    weight_format: IntFormat,
    threads: int,
    get_packed: PackedWeightProvider,
) -> Linear:
    """Quantize and pack a weight [N, K] with a bias [N]."""
    try:
        return native_int_linear(load_kernels(), weight, bias, weight_format, threads, get_packed)
    except NativeUnavailableError:
        return torch_int_linear(
            weight, bias, weight_format
        )  # `create_cpu_attention` logs the reason


def native_int_linear(
    kernels: Kernels,
    weight: Tensor,
    bias: Tensor | None,
    weight_format: IntFormat,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Linear:
    """Use csrc/linear_int.cpp, with integer products on the fastest unit of this CPU."""
    outs, cols = weight.shape
    int_kernels = kernels.linear_int[weight_format]

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
    return _native_matmul(int_kernels.linear_by_dtype, packed, outs, bias, threads)


def torch_int_linear(weight: Tensor, bias: Tensor | None, weight_format: IntFormat) -> Linear:
    """Use plain torch, with the weight as 8-bit integers in both formats."""
    parts = list(quantize_weight(weight, weight_format))
    integers = torch.cat([part.to_int8() for part in parts])
    scales = torch.cat([part.scales for part in parts])
    return partial(quantized_linear, integers=integers, scales=scales, bias=bias)


def create_group_linear(
    source: GroupedSource, bias: Tensor | None, threads: int, get_packed: PackedWeightProvider
) -> Linear:
    """Use csrc/linear_group.cpp or torch. The weight is read unless `get_packed` has its packed form."""
    try:
        kernels = load_kernels().linear_group[source.format.bits]
    except NativeUnavailableError:
        return torch_group_linear(source.read(), bias)  # `create_cpu_attention` logs the reason
    size, has_offsets = source.format.group_size, int(source.format.has_offsets)

    def pack(packed: Tensor) -> None:
        weight = source.read()
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        kernels.pack(
            values.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            *source.shape,
            size,
            packed.data_ptr(),
            threads,
        )

    packed = get_packed(kernels.packed_bytes(*source.shape, size, has_offsets), pack)
    table = torch.tensor(source.format.table, dtype=torch.int8).view(torch.uint8) ^ 128

    def create_call(*fields: object) -> LinearCall:
        return LinearGroupCall(*fields, table=table.data_ptr(), group=size, has_offsets=has_offsets)

    matmul = kernels.linear_by_dtype
    return _native_matmul(matmul, packed, source.shape[0], bias, threads, create_call)


def torch_group_linear(weight: GroupedWeight, bias: Tensor | None) -> Linear:
    """Use plain torch, with the values as 8-bit integers."""
    as_int8 = replace(weight, values=weight.to_int8())
    return partial(grouped_linear, weight=as_int8, bias=bias)
