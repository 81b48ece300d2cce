"""Paged attention on the GPU: agreement with dense attention, and equal bits for every batching."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from argosy.engine.execution.architectures.architecture import AttentionParams, HeadNorm
from argosy.engine.execution.architectures.decoder import NormKind
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.gpu import attention as gpu_attention
from argosy.engine.execution.kernels.gpu.attention import KV_FLOAT8, TritonAttention
from argosy.engine.execution.kernels.gpu.attention_kernels import (
    RANGE_SIZE,
    WORK_FIELDS,
    list_work,
)
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.kernels.rope import RopeRotation
from tests.engine.attention_cases import (
    TORCH_DTYPES,
    AttentionCase,
    Chunk,
    assert_blocks_can_be_moved,
    assert_matches_reference,
    assert_nan_affects_own_row_only,
    assert_same_bits,
    assert_views_give_same_bits,
)
from tests.engine.gpu.device import DEVICE, INTERPRETED
from tests.engine.pairwise import pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here


class HostTensorAttention(TritonAttention):
    """GPU attention that takes and returns host tensors."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        q, k, v = q.to(DEVICE), k.to(DEVICE), None if v is None else v.to(DEVICE)
        values = {each.name: getattr(batch, each.name) for each in fields(batch)}
        on_device: Any = {
            name: None if value is None else value.to(DEVICE) for name, value in values.items()
        }
        if rope is not None:
            rope = rope[0].to(DEVICE), rope[1].to(DEVICE)
        if params.sinks is not None:
            params = replace(params, sinks=params.sinks.to(DEVICE))
        if (norm := params.head_norm) is not None:
            weights = norm.q_weight.to(DEVICE), norm.k_weight.to(DEVICE)
            params = replace(params, head_norm=HeadNorm(*weights, *norm[2:]))
        return super().__call__(q, k, v, replace(batch, **on_device), params, rope).cpu()

    def read_blocks(self, blocks: Tensor, out: Tensor) -> None:
        staged = out.to(DEVICE)
        super().read_blocks(blocks.to(DEVICE), staged)
        out.copy_(staged)

    def write_blocks(self, blocks: Tensor, data: Tensor) -> None:
        super().write_blocks(blocks.to(DEVICE), data.to(DEVICE))


@dataclass
class GpuAttentionCase(AttentionCase):
    """Attention case for the GPU. Parameter `threads` is the number of multiprocessors."""

    scales: Tensor | None = None
    head_norm: HeadNorm | None = None

    @property
    def params(self) -> AttentionParams:
        return replace(super().params, head_norm=self.head_norm)

    def create_attention(self, threads: int = 1) -> HostTensorAttention:
        shape = self.kv_cache_shape()
        attention = HostTensorAttention(
            shape, device=DEVICE, num_multiprocessors=threads, scales=self.scales
        )
        self.fill_cache_with_nan(attention)
        return attention


MANY_MULTIPROCESSORS = 1000
"""Number of multiprocessors with which every range has its own program."""

SHAPES = [
    pytest.param({"lengths": [1]}, id="one-token"),
    pytest.param({"lengths": [130, 3, 64, 65]}, id="mixed"),
    pytest.param({"lengths": [70, 20], "head_dim": 16, "heads": 3, "kv_heads": 3}, id="mha-16"),
    pytest.param({"lengths": [70, 20], "head_dim": 24, "heads": 6, "kv_heads": 1}, id="mqa-24"),
    pytest.param({"lengths": [90], "head_dim": 64, "heads": 14, "kv_heads": 2}, id="gqa-7-64"),
    pytest.param({"lengths": [70], "head_dim": 80, "rotary_dim": 20}, id="rotated-in-part"),
    pytest.param({"lengths": [90, 10], "head_dim": 96, "rotary_dim": 96}, id="rotated-96"),
    pytest.param({"lengths": [70, 20], "head_dim": 128, "heads": 8, "kv_heads": 1}, id="gqa-8"),
    pytest.param({"lengths": [40], "head_dim": 16, "heads": 71, "kv_heads": 1}, id="mqa-71"),
    pytest.param({"lengths": [110, 33], "window": 17}, id="window"),
    pytest.param({"lengths": [140, 10], "window": 64, "softcap": 3.0}, id="window-softcap"),
    pytest.param({"lengths": [70, 10], "window": 1}, id="window-of-one"),
    pytest.param({"lengths": [90, 10], "softcap": 30.0}, id="softcap"),
    pytest.param({"lengths": [90, 10], "window": 17, "has_sinks": True}, id="window-sinks"),
    pytest.param({"lengths": [530, 30], "head_dim": 16, "kv_heads": 1}, id="two-ranges"),
]


FORMATS: tuple[tuple[int, str, torch.dtype | None], ...] = (
    (16, "bfloat16", None),
    (32, "float32", None),
    (16, "float32", torch.int8),
    (32, "bfloat16", torch.int8),
)
"""Block sizes, types, and types of the cache. The default tier runs each shape with one of them, alternating."""


@pytest.mark.parametrize(
    ("shape", "block_size", "dtype", "cache_dtype"),
    [
        pytest.param(
            shape.values[0],
            *block_format,
            id=f"{shape.id}-{block_format[1]}-{block_format[2] or 'plain'}",
            marks=() if number % len(FORMATS) == index else pytest.mark.exhaustive,
        )
        for number, shape in enumerate(SHAPES)
        for index, block_format in enumerate(FORMATS)
    ],
)
def test_attention_matches_dense_reference(
    shape: dict[str, int], block_size: int, dtype: str, cache_dtype: torch.dtype | None
) -> None:
    options = {"block_size": block_size, "dtype": dtype, "cache_dtype": cache_dtype}
    case = GpuAttentionCase(**shape, **options)  # type: ignore[arg-type]
    assert_matches_reference(case, case.run(threads=1))


def test_head_dim_256_requires_bfloat16() -> None:
    case = GpuAttentionCase([70], head_dim=256, heads=40, kv_heads=1, dtype="bfloat16")
    assert_matches_reference(case, case.run(threads=1))
    with pytest.raises(ValueError, match="serve it in bfloat16"):
        replace(case, dtype="float32").create_attention()


@pytest.mark.parametrize(
    ("window", "dtype", "start"),
    [
        (None, "bfloat16", 480),
        pytest.param(514, "float32", 0, marks=pytest.mark.exhaustive),
        pytest.param(None, "float32", 0, marks=pytest.mark.exhaustive),
        pytest.param(514, "bfloat16", 0, marks=pytest.mark.exhaustive),
        pytest.param(None, "bfloat16", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_chunking_does_not_change_bits(window: int | None, dtype: str, start: int) -> None:
    """Steps mix decode and prefill, alone and in batches, with one program for all ranges or one for each.

    Keys of the first `start` tokens are in the cache already, because all pairs of tokens take the interpreter seconds.
    """
    case = GpuAttentionCase(
        [530, 33, 7],
        window=window,
        dtype=dtype,
        softcap=20.0,
        has_sinks=True,
        rotary_dim=16,
        heads=3,
        kv_heads=1,
    )
    one_step: list[list[Chunk]] = [[(0, start, 530 - start), (1, 0, 33), (2, 0, 7)]]
    expected = case.run(one_step, threads=1)
    assert_matches_reference(case, expected, start=start)
    unbatched = [[chunk] for chunk in one_step[0]]
    steps: list[list[Chunk]] = [[(0, 480, 20), (2, 0, 3)], [(1, 0, 32), (0, 500, 17)]]
    steps += [[(2, 3, 1), (0, 517, 1)], [(0, 518, 1)], [(2, 4, 3), (1, 32, 1), (0, 519, 11)]]
    runs = [(unbatched, MANY_MULTIPROCESSORS, 60), (steps, 1, 60), (steps, MANY_MULTIPROCESSORS, 9)]
    for run, num_multiprocessors, scratch_rows in runs:
        max_bytes = scratch_rows * 4 * case.heads * (case.head_dim + 2)
        with mock.patch.object(gpu_attention, "MAX_SCRATCH_BYTES", max_bytes):
            first, *others = case.run(run, num_multiprocessors)
        assert_same_bits([first[480:], *others], [expected[0][480:], *expected[1:]])


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"window": 6, "softcap": 3.0},
    "sinks": {"window": 514, "has_sinks": True},
}


@pairwise(
    group=(
        1,
        7,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 3, 4, 5, 6, 8)),
    ),
    head_dim=(
        64,
        128,
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (96, 256)),
    ),
    start=(20, 508),
    scores=tuple(SCORES),
)
def test_chunks_of_drafts_have_the_bits_of_decode(
    group: int, head_dim: int, start: int, scores: str
) -> None:
    """Few tokens of a sequence are computed together as the CPU computes them, and as each alone bit for bit."""
    options: dict[str, Any] = {
        "lengths": [start + 9, 21],
        "heads": group,
        "kv_heads": 1,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **SCORES[scores],
    }
    case = GpuAttentionCase(**options)
    chunks = [(0, start, 9), (1, 19, 2)]
    outputs = case.run([chunks], MANY_MULTIPROCESSORS)
    rows = [out[first:] for out, (_, first, _) in zip(outputs, chunks, strict=True)]
    on_cpu = AttentionCase(**options).run([chunks])
    for row, expected, (_, first, _) in zip(rows, on_cpu, chunks, strict=True):
        torch.testing.assert_close(row, expected[first:], atol=2e-2, rtol=2e-2)
    steps: list[list[Chunk]] = [[(0, start, 1), (1, 19, 1)], [(1, 20, 1)]]
    steps += [[(0, start + i, 1)] for i in range(1, 9)]
    alone = case.run(steps, threads=1)
    assert_same_bits(rows, [out[first:] for out, (_, first, _) in zip(alone, chunks, strict=True)])


TILE_TOKENS = 4


@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6000)), min_size=1, max_size=6),
    window=st.sampled_from([0, 1, 700]),
    target=st.integers(1, 40),
    scratch_rows=st.integers(0, 100),
)
@settings(max_examples=25)
def test_work_list_has_each_range_once_in_items_of_similar_size(
    chunks: list[tuple[int, int]], window: int, target: int, scratch_rows: int
) -> None:
    """Chunks are given as tokens, and tokens before them. One of length 0 is the padding of a captured graph."""
    ends = torch.tensor([0, *(count for count, _ in chunks)]).cumsum(0).int()
    tokens, sequences = int(ends[-1]), len(chunks)
    padding = chunks[-1][1] == 0
    lengths = [start + count for count, start in chunks]
    if padding:
        lengths[-1] = 0
    tiles: dict[tuple[int, int], tuple[int, range]] = {}
    for sequence, (count, start) in enumerate(chunks):
        for offset in range(0, count, TILE_TOKENS):
            size = min(TILE_TOKENS, count - offset)
            first = start + offset
            is_padding = padding and sequence == sequences - 1
            newest = first + size - 1 - (count if is_padding else 0)
            oldest = max(first - window + 1, 0) if window and not is_padding else 0
            ranges = range(
                oldest // RANGE_SIZE, max(newest // RANGE_SIZE, oldest // RANGE_SIZE) + 1
            )
            tiles[sequence, int(ends[sequence]) + offset] = (size, ranges)
    total = sum(len(ranges) for _, ranges in tiles.values())
    max_items = len(tiles) + target
    records = torch.full((1 + 2 * max_items, WORK_FIELDS), -9, dtype=torch.int32, device=DEVICE)
    list_work[(1,)](
        records,
        ends.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        tokens // TILE_TOKENS + sequences,
        sequences,
        window,
        target,
        scratch_rows,
        1 + max_items,
        TOKENS=TILE_TOKENS,
        WINDOWED=window > 0,
        LANES=4,
    )
    num_items, num_merges = records[0, :2].tolist()
    assert num_items <= max_items
    assert num_merges <= min(len(tiles), target)
    listed: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, begin, *part in records[1 : 1 + num_items].tolist():
        listed[sequence, begin].append((part[0], part[1], part[2]))
    merges = {(a, b): part for a, b, *part in records[1 + max_items :][:num_merges].tolist()}
    used: list[int] = []
    fits = sum(len(ranges) * size for size, ranges in tiles.values()) <= scratch_rows
    for tile, (size, ranges) in tiles.items():
        parts = listed.pop(tile)
        assert [each for first, stop, _ in parts for each in range(first, stop)] == [*ranges]
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert tile not in merges
        else:
            rows = {first: row for first, _, row in parts}
            assert merges.pop(tile) == [ranges.start, ranges.stop, rows[ranges.start]]
            assert all(
                row == rows[ranges.start] + (first - ranges.start) * size
                for first, row in rows.items()
            )
            used += range(rows[ranges.start], rows[ranges.start] + len(ranges) * size)
        if fits:
            assert max(stop - first for first, stop, _ in parts) <= -(-total // target)
    assert not listed
    assert not merges
    assert sorted(used) == [*range(len(used))]
    assert len(used) <= scratch_rows


@pytest.mark.parametrize("cache_dtype", [None, KV_FLOAT8, torch.int8])
@pytest.mark.parametrize("operand", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_affects_own_row_only(operand: int, cache_dtype: torch.dtype | None) -> None:
    case = GpuAttentionCase([80, 30], dtype="bfloat16", cache_dtype=cache_dtype)
    assert_nan_affects_own_row_only(case, operand)


@pairwise(
    kind=get_args(NormKind),
    head_dim=(24, 64),
    rotary=(0, 8, "all"),
    dtype=("bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)),
)
def test_attention_normalizes_heads_as_the_norm_does(
    kind: NormKind, head_dim: int, rotary: int | str, dtype: str
) -> None:
    rotary_dim = head_dim if isinstance(rotary, str) else rotary
    case = GpuAttentionCase([17, 3], head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, head_dim, generator=generator).to(TORCH_DTYPES[dtype])
    norms = [TritonElementwiseOps().create_norm(kind, each.to(DEVICE), 1e-5) for each in weights]
    head_norm = HeadNorm(norms[0].scale, norms[1].scale, 1e-5, kind == "narrow")
    actual = replace(case, head_norm=head_norm)
    actual.qkv = case.qkv
    outputs = actual.run()
    case.qkv = [
        (norms[0](q.to(DEVICE)).cpu(), norms[1](k.to(DEVICE)).cpu(), v) for q, k, v in case.qkv
    ]
    expected = case.run()
    if INTERPRETED:  # elsewhere the elements of a row may be added in another order
        assert_same_bits(outputs, expected)
    for output, each in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, each, atol=2e-2, rtol=2e-2)


def test_strided_views_of_fused_projection_give_same_bits() -> None:
    assert_views_give_same_bits(GpuAttentionCase([50]))


def test_unused_row_changes_no_other_row() -> None:
    """Unused rows of captured graphs have slot -1 and a sequence of length 0."""
    case = GpuAttentionCase([530, 30], heads=1, kv_heads=1)
    expected = case.run([[(0, 529, 1), (1, 29, 1)]], threads=1)
    attention = case.create_attention(MANY_MULTIPROCESSORS)
    case.store_prefixes(attention, [(0, 0, 529), (1, 0, 29)])
    batch = case.batch([(0, 529, 1), (1, 0, 1), (1, 29, 1)])
    batch.slot_mappings[0, 1], batch.seq_lens[1] = -1, 0
    q, k, v = (
        torch.cat([a[-1:], torch.full_like(a[-1:], torch.nan), b[-1:]])
        for a, b in zip(*case.qkv, strict=True)
    )
    out = attention(q, k, v, batch, case.params, None)
    assert_same_bits([out[0], out[2]], [expected[0][-1], expected[1][-1]])


@pytest.mark.parametrize("cache_dtype", [None, KV_FLOAT8])
def test_copied_blocks_continue_sequence(cache_dtype: torch.dtype | None) -> None:
    case = GpuAttentionCase([40, 40], dtype="bfloat16", cache_dtype=cache_dtype)
    assert_blocks_can_be_moved(case)


def test_float8_cache_preserves_representable_values() -> None:
    """Keys and values that are float8 times their head's scale give the results of an exact cache."""
    case = GpuAttentionCase([150, 20], dtype="bfloat16", cache_dtype=KV_FLOAT8)
    case.scales = torch.tensor([0.25, 2.0, 0.5, 4.0]).view(1, 2, 2).repeat(2, 1, 1)
    for i, (q, k, v) in enumerate(case.qkv):
        key, value = (
            (x.float() / s[:, None]).to(KV_FLOAT8).float() * s[:, None]
            for x, s in zip((k, v), case.scales[-1], strict=True)
        )
        case.qkv[i] = (q, key.to(k.dtype), value.to(v.dtype))
    exact = replace(case, cache_dtype=None, scales=None)
    exact.qkv = case.qkv
    outputs = case.run(threads=1)
    assert_matches_reference(case, outputs)
    for actual, exact_output in zip(outputs, exact.run(threads=1), strict=True):
        torch.testing.assert_close(actual, exact_output, atol=1e-2, rtol=1e-2)


def test_float8_cache_clamps_large_values() -> None:
    case = GpuAttentionCase([20], dtype="float32", cache_dtype=KV_FLOAT8)
    case.qkv[0][2][:] = 1e6
    out = case.run(threads=1)[0]
    torch.testing.assert_close(out, torch.full_like(out, 448.0))
