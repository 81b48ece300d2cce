"""Paged attention on the CPU: the native kernel where it builds, plain torch elsewhere."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal

import structlog
import torch

from argosy.engine.execution.attention_torch import TorchAttention
from argosy.engine.execution.huge_pages import huge_zeros
from argosy.engine.execution.kv_cache_tensor import KvCacheTensor
from argosy.engine.execution.native_calls import AttentionCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.batch import Attention, AttentionParams, Batch, KvCacheShape
    from argosy.engine.execution.rope import RopeRotation

AttentionBackend = Literal["auto", "native", "torch"]

log = structlog.get_logger(__name__)


def create_cpu_attention(
    shape: KvCacheShape,
    *,
    threads: int,
    backend: AttentionBackend = "auto",
    kernels: Callable[[], Kernels] = load_kernels,
) -> Attention:
    """Allocate a paged KV cache and choose the attention over it; the log says which.

    path: "auto" takes the native kernel if it can, "native" insists on it (NativeUnavailable).
    """
    if backend != "torch":
        try:
            native = NativeAttention(shape, threads, kernels())
        except NativeUnavailableError as unavailable:
            if backend == "native":
                raise
            log.warning("attention_backend_selected", path="torch", reason=str(unavailable))
        else:
            log.info("attention_backend_selected", path="native", threads=threads)
            return native
    return TorchAttention(shape)


class NativeAttention(KvCacheTensor):
    """Paged attention by csrc/attention.cpp, which also fixes the layout inside a block.

    Its call is kept and refilled, so it serves one thread at a time.
    """

    ROW_ALIGNMENT_BYTES = 64
    """A head's keys are padded to a multiple of it, as the kernel's vectors want."""

    def __init__(self, shape: KvCacheShape, threads: int, kernels: Kernels) -> None:
        block_size, dtype = shape.block_size, shape.dtype
        if block_size % 8:
            raise NativeUnavailableError(
                f"block_size {block_size} is no multiple of 8; choose 16 or 32"
            )
        if dtype == torch.bfloat16:
            self._run = kernels.attention_bfloat16
        elif dtype == torch.float32:
            self._run = kernels.attention_float32
        else:
            raise NativeUnavailableError(f"no kernel for {dtype}; choose bfloat16 or float32")
        lanes = self.ROW_ALIGNMENT_BYTES // dtype.itemsize
        width = -(-shape.head_dim // lanes) * lanes
        sizes = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, block_size, width)
        super().__init__(huge_zeros(sizes, dtype), huge_zeros(sizes, dtype))
        self._layer_pointers = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        self._dtype = dtype
        self._call = AttentionCall(
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            threads=threads,
        )
        self._batch: Batch | None = None
        self._block_table: Tensor

    @property
    def name(self) -> str:
        """What is in use, for the log."""
        return "native"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        """See `Attention`."""
        call, dtype = self._call, self._dtype
        if batch is not self._batch:
            self._bind_batch(batch)
        queries, keys, values = (
            _contiguous_heads(q, dtype),
            _contiguous_heads(k, dtype),
            _contiguous_heads(v, dtype),
        )
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        call.q, call.q_stride = queries.data_ptr(), queries.stride(0)
        call.k, call.k_stride = keys.data_ptr(), keys.stride(0)
        call.v, call.v_stride = values.data_ptr(), values.stride(0)
        call.out, call.heads = out.data_ptr(), q.shape[1]
        call.keys, call.values = self._layer_pointers[params.layer]
        call.scale, call.softcap, call.window = (
            params.scale,
            params.softcap or 0.0,
            params.sliding_window or 0,
        )
        if rope is None:
            call.turning = 0
        else:
            cos, sin = rope
            call.cos, call.sin, call.turning = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._run(ctypes.addressof(call))
        return out if q.dtype == dtype else out.to(q.dtype)

    def _bind_batch(self, batch: Batch) -> None:
        """Note what all layers have in common."""
        self._batch = batch
        pages = batch.block_table
        self._block_table = pages if pages.stride(1) == 1 else pages.contiguous()
        call = self._call
        call.positions, call.slots = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        call.cu_q, call.seq_lens = batch.query_start_loc.data_ptr(), batch.seq_lens.data_ptr()
        call.pages, call.page_stride = self._block_table.data_ptr(), self._block_table.stride(0)
        call.tokens, call.sequences = len(batch.positions), len(pages)


def _contiguous_heads(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, D] in `dtype` with each token's heads side by side; tokens may lie apart."""
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    _, between, within = rows.stride()
    return rows if within == 1 and between == rows.shape[2] else rows.contiguous()
