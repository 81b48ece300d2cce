"""Linear layers on the CPU: packed once, and each token's result its own, whoever shares the batch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from argosy.engine.execution.native_calls import LinearCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.pack_cache import pack_in_memory
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.pack_cache import PackedWeightProvider


def create_cpu_linear(
    weight: Tensor,
    bias: Tensor | None,
    threads: int,
    get_packed: PackedWeightProvider = pack_in_memory,
) -> Callable[[Tensor], Tensor]:
    """Pack weight [N, K] and bias [N]; the result maps [T, K] to [T, N] in their dtype.

    bfloat16 takes the native kernel where it can be had, else tiles of rows; those and float32 take
    oneDNN, but for bfloat16 on a CPU without AVX-512, where it has none.
    """
    if weight.dtype == torch.bfloat16:
        try:
            return NativeLinear(load_kernels(), weight, bias, threads, get_packed)
        except NativeUnavailableError:
            pass  # the attention's log line says why
    product = (
        OnednnLinear(weight, bias) if _onednn_packs(weight.dtype) else _DenseLinear(weight, bias)
    )
    return _TiledLinear(product) if weight.dtype == torch.bfloat16 else product


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of it on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - the only entry
    return dtype == torch.float32


class NativeLinear:
    """csrc/linear.cpp: bfloat16 in and out, float32 sums in one order for every batch size."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        threads: int,
        get_packed: PackedWeightProvider = pack_in_memory,
    ) -> None:
        """`weight` may be on meta where `keep` has what it packs to."""
        outs, cols = weight.shape
        self._compute = kernels.linear

        def pack(packed: Tensor) -> None:
            dense = weight.detach().contiguous()
            kernels.linear_pack(dense.data_ptr(), outs, cols, packed.data_ptr(), threads)

        packed = get_packed(kernels.linear_packed_bytes(outs, cols), pack)
        self._matmul = NativeMatmul(packed, outs, bias, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return self._matmul(self._compute, x)


class NativeMatmul:
    """A weight that a kernel has packed for itself, and the bias."""

    OUTPUT_BLOCK = 32
    """Outputs that kernels compute together: the bias is padded to a multiple of it."""

    def __init__(self, packed: Tensor, num_outputs: int, bias: Tensor | None, threads: int) -> None:
        self._packed = packed
        self._num_outputs = num_outputs
        self._threads = threads
        padding = (0, -num_outputs % self.OUTPUT_BLOCK)
        self._bias = None if bias is None else F.pad(bias.detach().float(), padding)

    def __call__(self, compute: Callable[[int], int], x: Tensor) -> Tensor:
        """[T, K] to [T, N] in x's dtype; `compute` is that kernel, and takes the address of a LinearCall."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, cols = x.shape
        out = torch.empty(rows, self._num_outputs, dtype=x.dtype)
        call = LinearCall(
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
    """x @ weight.T + bias, with the weight in oneDNN's own blocked layout."""

    ROWS_HINT = 64
    """The batch for which oneDNN picks the layout; any batch runs."""
    MAX_STABLE_COLS = 1024
    """Above this K a single row takes another kernel than two: it is computed twice."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - the only entry
            weight.detach().contiguous(), self.ROWS_HINT
        )
        self._bias = bias
        self._duplicates_single_row = weight.shape[1] > self.MAX_STABLE_COLS

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if self._duplicates_single_row and len(x) == 1:
            return self(x.expand(2, -1).contiguous())[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - the only entry
            x, self._weight, self._bias, "none", [], ""
        )
        return out


class _TiledLinear:
    """A linear whose products all have the same number of rows.

    oneDNN chooses how it splits a long bfloat16 sum by the number of rows. A lone row costs 1.7
    times its own product, a long batch 1.9 times: between tiles of 8 and 32, the least of both.
    """

    TILE_ROWS = 16

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        self._linear = product

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        rows = len(x)
        tiles = F.pad(x, (0, 0, 0, -rows % self.TILE_ROWS)).split(self.TILE_ROWS)
        return torch.cat([self._linear(tile) for tile in tiles])[:rows]


class _DenseLinear:
    """x @ weight.T + bias, with the weight as it came."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)
