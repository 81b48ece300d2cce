"""Sequences that attention is computed over, in steps cut at will, and what must come of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from argosy.engine.execution.attention_cpu import create_cpu_attention
from argosy.engine.execution.batch import AttentionParams, Batch, KvCacheShape
from argosy.engine.execution.model_architecture import RopeParams
from argosy.engine.execution.rope import apply_rope, build_rope_table, gather_rope_rotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from argosy.engine.execution.batch import Attention
    from argosy.engine.execution.rope import RopeRotation

type_of = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PathName = Literal["native", "torch"]
Chunk = tuple[int, int, int]  # sequence, start, count


@dataclass
class World:
    """Sequences with known queries, keys and values, on shuffled pages of a dirty cache."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    rotary_dim: int = 0
    layers: int = 2
    qkv: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.lengths) * 1000 + sum(self.lengths))
        self.pages = torch.randperm(self.num_blocks, generator=generator).view(
            len(self.lengths), -1
        )

        def draw(length: int, heads: int) -> Tensor:
            values = torch.randn(length, heads, self.head_dim, generator=generator)
            return values.to(type_of[self.dtype])

        sizes = (self.heads, self.kv_heads, self.kv_heads)
        self.qkv = [(draw(n, sizes[0]), draw(n, sizes[1]), draw(n, sizes[2])) for n in self.lengths]

    @property
    def num_blocks(self) -> int:
        return len(self.lengths) * -(-max(self.lengths) // self.block_size)

    @property
    def spec(self) -> AttentionParams:
        scale = 2.0 / math.sqrt(self.head_dim)
        return AttentionParams(self.layers - 1, scale, self.window, self.softcap)

    def rope(self, positions: Tensor) -> RopeRotation | None:
        if not self.rotary_dim:
            return None
        spec = RopeParams("default", 100.0, self.rotary_dim, max(self.lengths))
        return gather_rope_rotation(build_rope_table(spec, max(self.lengths)), positions)

    def attention(self, path: PathName, threads: int = 2) -> Attention:
        attention = create_cpu_attention(
            self.shape(type_of[self.dtype]), threads=threads, backend=path
        )
        self.soil(attention)
        return attention

    def shape(self, dtype: torch.dtype) -> KvCacheShape:
        return KvCacheShape(
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=dtype,
        )

    def soil(self, attention: Attention) -> None:
        """What earlier owners left in a block must not matter, not even if it is not finite."""
        dirt = torch.full(attention.read_block(0).shape, 0xFF, dtype=torch.uint8)
        for block in range(self.num_blocks):
            attention.write_block(block, dirt)

    def batch(self, chunks: list[Chunk]) -> Batch:
        counts = torch.tensor([0, *(count for _, _, count in chunks)])
        table = self.pages[[sequence for sequence, _, _ in chunks]]
        positions = torch.cat([torch.arange(s, s + n) for _, s, n in chunks])
        row = torch.repeat_interleave(torch.arange(len(chunks)), counts[1:])
        block = table[row, positions // self.block_size]
        return Batch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor([s + n for _, s, n in chunks], dtype=torch.int32),
            block_table=table.int(),
            slot_mapping=block * self.block_size + positions % self.block_size,
            rows=torch.arange(len(chunks)),
            logit_index=torch.zeros(0, dtype=torch.long),
        )

    def run(self, path: PathName, steps: list[list[Chunk]], threads: int = 2) -> list[Tensor]:
        """The outputs of every sequence, computed in the given steps; NaN of tokens before the first."""
        attention = self.attention(path, threads)
        outputs = [torch.full_like(q, torch.nan) for q, _, _ in self.qkv]
        before = [(i, 0, s) for i, s, _ in steps[0] if s]
        if before:
            # Their keys and values are kept whatever they see, and to see little costs little.
            self.step(attention, before, replace(self.spec, sliding_window=1))
        for chunks in steps:
            pieces = self.step(attention, chunks, self.spec)
            for (i, s, n), piece in zip(chunks, pieces, strict=True):
                outputs[i][s : s + n] = piece
        return outputs

    def step(
        self, attention: Attention, chunks: list[Chunk], spec: AttentionParams
    ) -> Sequence[Tensor]:
        """The output of each chunk."""
        parts = [[x[s : s + n] for x in self.qkv[i]] for i, s, n in chunks]
        q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
        batch = self.batch(chunks)
        out: Tensor = attention(q, k, v, batch, spec, self.rope(batch.positions))
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        pieces: Sequence[Tensor] = out.split([n for _, _, n in chunks])
        return pieces

    def whole(self) -> list[list[Chunk]]:
        return [[(i, 0, n) for i, n in enumerate(self.lengths)]]

    def reference(self, sequence: int) -> Tensor:
        """Dense float64 attention of one sequence."""
        q, k, v = self.qkv[sequence]
        rope = self.rope(torch.arange(len(q)))
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (x.double() for x in (q, k, v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.spec.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        at = torch.arange(len(q))
        seen = at <= at[:, None]
        if self.window:
            seen &= at > at[:, None] - self.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def assert_right(world: World, outputs: list[Tensor], tolerance: float | None = None) -> None:
    tolerance = tolerance or (2e-5 if world.dtype == "float32" else 2e-2)
    for sequence, out in enumerate(outputs):
        torch.testing.assert_close(
            out.double(), world.reference(sequence), atol=tolerance, rtol=tolerance
        )


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_blocks_move(world: World, path: PathName) -> None:
    """The blocks of the first sequence, copied to the second's and to another cache, go on as they were."""
    expected = world.run(path, world.whole())[0]
    attention, elsewhere = world.attention(path), world.attention(path)
    q, k, v = world.qkv[0]
    attention(q[:39], k[:39], v[:39], world.batch([(0, 0, 39)]), world.spec, None)
    mine, others = world.pages[0].tolist(), world.pages[1].tolist()

    attention.copy_blocks(list(zip(mine, others, strict=True)))
    for block in others:
        elsewhere.write_block(block, attention.read_block(block))
    zeros = torch.zeros_like(attention.read_block(0))
    for block in mine:  # the copies stand on their own
        attention.write_block(block, zeros)

    for where in (attention, elsewhere):
        out = where(q[39:], k[39:], v[39:], world.batch([(1, 39, 1)]), world.spec, None)
        assert_same_bits([out], [expected[39:]])
