"""Attention test cases: random sequences that are computed in arbitrary steps, and their dense reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams
from argosy.engine.execution.architectures.rope import RopeParams
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch, KvCacheShape
from argosy.engine.execution.kernels.cpu.attention import create_cpu_attention
from argosy.engine.execution.kernels.rope import (
    RopeRotation,
    apply_rope,
    build_rope_table,
    gather_rope_rotation,
)
from argosy.engine.execution.kernels.torch.attention import RoundedRows

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BackendName = Literal["native", "torch"]
LAYERS = 2
Chunk = tuple[int, int, int]
"""Sequence index, first position, number of tokens."""


@dataclass
class AttentionCase:
    """Sequences with random queries, keys and values, in shuffled blocks of a cache that contains NaN."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    """Number of the last elements of a key that are its value, which then is not passed."""
    rotary_dim: int = 0
    backend: BackendName = "native"
    cache_dtype: torch.dtype | None = None
    """Dtype of the cache. None is that of queries, keys and values."""
    qkv: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.lengths) * 1000 + sum(self.lengths))
        blocks = torch.randperm(self.num_blocks, generator=generator)
        self.block_table, self.nan_block = blocks[1:].view(len(self.lengths), -1), blocks[0]

        def random_heads(length: int, heads: int) -> Tensor:
            values = torch.randn(length, heads, self.head_dim, generator=generator)
            return values.to(TORCH_DTYPES[self.dtype])

        self.qkv = [
            (
                random_heads(length, self.heads),
                random_heads(length, self.kv_heads),
                random_heads(length, self.kv_heads),
            )
            for length in self.lengths
        ]
        if self.value_dim is not None:
            self.qkv = [(q, k, k[..., -self.value_dim :]) for q, k, _ in self.qkv]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all sequences, and one that contains NaN."""
        return len(self.lengths) * -(-max(self.lengths) // self.block_size) + 1

    @property
    def params(self) -> AttentionParams:
        scale = 2.0 / math.sqrt(self.head_dim)
        sinks = torch.linspace(-3.0, 4.0, self.heads) if self.has_sinks else None
        return AttentionParams(LAYERS - 1, scale, self.window, self.softcap, sinks)

    def rope(self, positions: Tensor) -> RopeRotation | None:
        if not self.rotary_dim:
            return None
        params = RopeParams("default", 100.0, self.rotary_dim, max(self.lengths))
        return gather_rope_rotation(build_rope_table(params, max(self.lengths)), positions)

    def create_attention(self, threads: int = 2) -> Attention:
        shape = self.kv_cache_shape()
        attention = create_cpu_attention(shape, threads=threads, backend=self.backend)
        self.fill_cache_with_nan(attention)
        return attention

    def kv_cache_shape(self) -> KvCacheShape:
        return KvCacheShape(
            num_layers=LAYERS,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.cache_dtype or TORCH_DTYPES[self.dtype],
            value_dim=self.value_dim,
            query_dtype=TORCH_DTYPES[self.dtype],
        )

    def fill_cache_with_nan(self, attention: Attention) -> None:
        """Fill all blocks with NaN, because the values of earlier owners must not affect results."""
        shape = (self.num_blocks, attention.block_bytes)
        data = torch.full(shape, 0xFF, dtype=torch.uint8)
        attention.write_blocks(torch.arange(self.num_blocks), data)

    def batch(self, chunks: list[Chunk]) -> Batch:
        counts = torch.tensor([0, *(count for _, _, count in chunks)])
        table = self.block_table[[sequence for sequence, _, _ in chunks]]
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in chunks])
        row = torch.repeat_interleave(torch.arange(len(chunks)), counts[1:])
        block = table[row, positions // self.block_size]
        return Batch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor([start + count for _, start, count in chunks], dtype=torch.int32),
            block_tables=self.remove_left_blocks(table, chunks).int()[None],
            slot_mappings=(block * self.block_size + positions % self.block_size)[None],
            rows=torch.arange(len(chunks)),
            logit_index=torch.zeros(0, dtype=torch.long),
        )

    def remove_left_blocks(self, table: Tensor, chunks: list[Chunk]) -> Tensor:
        """Replace the blocks that have left the window by the block with NaN, which must not be read."""
        starts = torch.tensor([start for _, start, _ in chunks])
        if self.window is None:
            return table
        first = (starts - self.window + 1).clamp(min=0)
        has_left = torch.arange(table.shape[1]) < (first // self.block_size)[:, None]
        return torch.where(has_left, self.nan_block, table)

    def run(self, steps: list[list[Chunk]] | None = None, threads: int = 2) -> list[Tensor]:
        """Compute every sequence in the given steps, or at once. Outputs before a sequence's first chunk are NaN."""
        steps = self.one_step() if steps is None else steps
        attention = self.create_attention(threads)
        outputs = [
            torch.full((*q.shape[:2], v.shape[2]), torch.nan, dtype=q.dtype) for q, _, v in self.qkv
        ]
        prefixes = [(sequence, 0, start) for sequence, start, _ in steps[0] if start]
        if prefixes:
            self.store_prefixes(attention, prefixes)
        for chunks in steps:
            chunk_outputs = self.attend(attention, chunks, self.params)
            for (sequence, start, count), output in zip(chunks, chunk_outputs, strict=True):
                outputs[sequence][start : start + count] = output
        return outputs

    def store_prefixes(self, attention: Attention, prefixes: list[Chunk]) -> None:
        """Compute chunks of which only the keys and values matter. A small window makes the step cheap."""
        self.attend(attention, prefixes, replace(self.params, sliding_window=1))

    def attend(
        self, attention: Attention, chunks: list[Chunk], params: AttentionParams
    ) -> Sequence[Tensor]:
        """Compute one step and return the output of each chunk."""
        parts = [
            [x[start : start + count] for x in self.qkv[sequence]]
            for sequence, start, count in chunks
        ]
        q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
        batch = self.batch(chunks)
        values = v if self.value_dim is None else None
        out: Tensor = attention(q, k, values, batch, params, self.rope(batch.positions))
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        outputs: Sequence[Tensor] = out.split([count for _, _, count in chunks])
        return outputs

    def one_step(self) -> list[list[Chunk]]:
        """Return steps that compute all sequences at once."""
        return [[(sequence, 0, length) for sequence, length in enumerate(self.lengths)]]

    def dense_reference(self, sequence: int) -> Tensor:
        """Compute dense float64 attention of one sequence."""
        q, k, v = self.qkv[sequence]
        rope = self.rope(torch.arange(len(q)))
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        k, v = self.stored_rows(k, v)
        q, k, v = (x.double() for x in (q, k, v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.params.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        positions = torch.arange(len(q))
        visible = positions <= positions[:, None]
        if self.window:
            visible &= positions > positions[:, None] - self.window
        scores.masked_fill_(~visible, -torch.inf)
        if self.params.sinks is not None:
            sinks = self.params.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v)

    def stored_rows(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as an int8 cache rounds them, and those of other caches unchanged."""
        if self.cache_dtype != torch.int8:
            return k, v
        codec = RoundedRows(self.head_dim, self.kv_cache_shape().exact_dim)
        k = codec.expand(codec.round(k))
        v = codec.expand(codec.round(v)) if self.value_dim is None else k[..., -self.value_dim :]
        return k, v


def assert_matches_reference(
    case: AttentionCase, outputs: list[Tensor], tolerance: float | None = None, start: int = 0
) -> None:
    """Compare with dense attention, in the first sequence from token `start` on."""
    tolerance = tolerance or (2e-5 if case.dtype == "float32" else 2e-2)
    for sequence, out in enumerate(outputs):
        first = 0 if sequence else start
        torch.testing.assert_close(
            out[first:].double(),
            case.dense_reference(sequence)[first:],
            atol=tolerance,
            rtol=tolerance,
        )


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_blocks_can_be_moved(case: AttentionCase) -> None:
    """Check that copies of a sequence's blocks, in the same and in another cache, continue it unchanged."""
    case.qkv[1] = case.qkv[0]
    expected = case.run()[0]
    attention, other_attention = case.create_attention(), case.create_attention()
    case.attend(attention, [(0, 0, 39)], case.params)
    source, target = case.block_table[:2].to(torch.int64)

    attention.copy_blocks(list(zip(source.tolist(), target.tolist(), strict=True)))
    data = torch.empty(len(target), attention.block_bytes, dtype=torch.uint8)
    attention.read_blocks(target, data)
    other_attention.write_blocks(target, data)
    attention.write_blocks(source, torch.zeros_like(data))  # the copies do not depend on it

    for copy in (attention, other_attention):
        outputs = case.attend(copy, [(1, 39, 1)], case.params)
        assert_same_bits([*outputs], [expected[39:]])


def assert_nan_affects_own_row_only(case: AttentionCase, operand: int) -> None:
    """Check that a NaN among a token's queries, keys or values (`operand`) invalidates it, and no other sequence."""
    clean = case.run()
    case.qkv[0][operand][40] = torch.nan
    with_nan = case.run()
    assert with_nan[0][40].isnan().all()
    assert_same_bits([with_nan[1]], [clean[1]])


def assert_views_give_same_bits(case: AttentionCase) -> None:
    """Check queries, keys and values that are views into one [T, (heads + 2 kv_heads) * head_dim] matrix."""
    parts = case.qkv[0]
    fused = torch.cat([x.flatten(1) for x in parts], 1)
    sizes = [x.shape[1] * x.shape[2] for x in parts]
    q, k, v = (x.unflatten(1, (-1, case.head_dim)) for x in fused.split(sizes, 1))
    assert not q.is_contiguous()
    batch = case.batch([(0, 0, len(q))])
    assert_same_bits([case.create_attention()(q, k, v, batch, case.params, None)], case.run())
