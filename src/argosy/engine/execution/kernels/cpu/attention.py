"""Paged attention on the CPU, by the native kernel if it builds and else in plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal

import structlog
import torch
from torch import Tensor

from argosy.engine.execution.architectures.architecture import SCALE_BYTES, AttentionParams
from argosy.engine.execution.kernels.attention import Attention, contiguous_heads
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.cpu.native_kernels import AttentionCall, Kernels, load_kernels
from argosy.engine.execution.kernels.huge_pages import huge_zeros
from argosy.engine.execution.kernels.rope import RopeRotation
from argosy.engine.execution.kernels.torch.attention import TorchAttention
from argosy.native import NativeUnavailableError

AttentionBackend = Literal["auto", "native", "torch"]

log = structlog.get_logger(__name__)


def create_cpu_attention(
    shape: KvCacheShape,
    *,
    threads: int,
    backend: AttentionBackend = "auto",
    kernels: Callable[[], Kernels] = load_kernels,
) -> Attention:
    """Allocate a paged KV cache and select, create and log the attention over it.

    The backend "auto" falls back to torch if the native kernel cannot be used.

    Raises:
        NativeUnavailableError: `backend` is "native" and the native kernel cannot be used.
    """
    if backend != "torch":
        try:
            native = NativeAttention(shape, threads, kernels())
        except NativeUnavailableError as error:
            if backend == "native":
                raise
            log.warning("attention_backend_selected", backend="torch", reason=str(error))
        else:
            log.info("attention_backend_selected", backend="native", threads=threads)
            return native
    return TorchAttention(shape)


class NativeAttention(Attention):
    """Paged attention by csrc/attention_kernel.h, which also defines the layout inside a block.

    Not thread-safe, because all calls share one argument structure.
    """

    name = "native"
    ROW_ALIGNMENT_BYTES = 64
    """Alignment of a head's keys, which are padded for the kernel's vector loads."""

    def __init__(self, shape: KvCacheShape, threads: int, kernels: Kernels) -> None:
        block_size, dtype = shape.block_size, shape.dtype
        is_rounded = dtype == torch.int8
        if is_rounded:
            dtype = torch.bfloat16 if shape.query_dtype == torch.bfloat16 else torch.float32
        if block_size % 8:
            raise NativeUnavailableError(
                f"block_size {block_size} is not a multiple of 8; choose 16 or 32"
            )
        if dtype not in kernels.attention:
            raise NativeUnavailableError(f"no kernel for {dtype}; choose bfloat16 or float32")
        if block_size % 16:
            self.name = "native, 8 keys"
        self._run = (kernels.attention_int8 if is_rounded else kernels.attention)[dtype]
        value_dim = shape.value_dim or shape.head_dim
        if (shape.head_dim - value_dim) % 2:
            raise NativeUnavailableError("the values start in the middle of a pair of elements")
        if is_rounded and shape.exact_dim % 4:
            raise NativeUnavailableError("the values start in the middle of a word of bytes")
        lanes = self.ROW_ALIGNMENT_BYTES // dtype.itemsize
        width = -(-shape.head_dim // lanes) * lanes
        if is_rounded:
            width += shape.exact_dim + SCALE_BYTES
        sizes = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, block_size, width)
        keys = huge_zeros(sizes, shape.dtype)
        values = huge_zeros(sizes, keys.dtype) if shape.value_dim is None else None
        super().__init__(keys, values)
        self._layer_pointers = [
            (keys[layer].data_ptr(), None if values is None else values[layer].data_ptr())
            for layer in range(shape.num_layers)
        ]
        self._dtype = dtype
        self._call = AttentionCall(
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=value_dim,
            block_size=block_size,
            threads=threads,
        )
        self._bound: tuple[Tensor, ...] = ()
        """Tensors of the batch at hand, slots first. Adapters are not among them, so that their memory can be freed."""
        self._block_tables: Tensor
        self._group_pointers: list[tuple[int, int]]
        """Addresses of each KV cache group's slots and block table."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        call, dtype = self._call, self._dtype
        if not self._bound or batch.slot_mappings is not self._bound[0]:
            self._bind_batch(batch)
        queries, keys = contiguous_heads(q, dtype), contiguous_heads(k, dtype)
        out = torch.empty(*q.shape[:2], call.value_dim, dtype=dtype)
        call.q, call.q_stride = queries.data_ptr(), queries.stride(0)
        call.k, call.k_stride = keys.data_ptr(), keys.stride(0)
        if v is not None:
            values = contiguous_heads(v, dtype)
            call.v, call.v_stride = values.data_ptr(), values.stride(0)
        call.out, call.heads = out.data_ptr(), q.shape[1]
        call.keys, call.values = self._layer_pointers[params.layer]
        call.slot_mapping, call.block_table = self._group_pointers[params.group]
        call.scale, call.softcap, call.window = (
            params.scale,
            params.softcap or 0.0,
            params.sliding_window or 0,
        )
        call.sinks = None if params.sinks is None else params.sinks.data_ptr()
        if rope is None:
            call.rotary_dim = 0
        else:
            cos, sin = rope
            call.cos, call.sin, call.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._run(ctypes.addressof(call))
        return out if q.dtype == dtype else out.to(q.dtype)

    def _bind_batch(self, batch: Batch) -> None:
        """Fill in the arguments that all layers share."""
        self._bound = (
            batch.slot_mappings,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
        )
        self._block_tables = batch.block_tables.contiguous()
        self._group_pointers = [
            (slots.data_ptr(), table.data_ptr())
            for slots, table in zip(batch.slot_mappings, self._block_tables, strict=True)
        ]
        call = self._call
        call.positions = batch.positions.data_ptr()
        call.query_start_loc = batch.query_start_loc.data_ptr()
        call.seq_lens = batch.seq_lens.data_ptr()
        call.block_table_stride = self._block_tables.stride(1)
        call.tokens, call.sequences = len(batch.positions), len(batch.seq_lens)
