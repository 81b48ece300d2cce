"""Latent attention on the GPU: agreement with dense attention, and equal bits for every batching."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.gpu import latent_attention
from argosy.engine.execution.kernels.gpu.attention import KV_FLOAT8
from argosy.engine.execution.kernels.gpu.latent_attention import TritonLatentAttention
from tests.engine.attention_cases import (
    Chunk,
    assert_blocks_can_be_moved,
    assert_matches_reference,
    assert_nan_affects_own_row_only,
    assert_same_bits,
)
from tests.engine.gpu.device import DEVICE
from tests.engine.gpu.test_attention import (
    MANY_MULTIPROCESSORS,
    GpuAttentionCase,
    HostTensorAttention,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
SIZES: dict[str, Any] = {"head_dim": 28, "value_dim": 20, "heads": 3, "kv_heads": 1}


class HostTensorLatentAttention(HostTensorAttention, TritonLatentAttention):
    """Latent attention that takes and returns host tensors."""


@dataclass
class LatentCase(GpuAttentionCase):
    """Case of latent attention."""

    def create_attention(self, threads: int = 1) -> HostTensorLatentAttention:
        shape = self.kv_cache_shape()
        attention = HostTensorLatentAttention(shape, device=DEVICE, num_multiprocessors=threads)
        self.fill_cache_with_nan(attention)
        return attention

    def store_prefixes(self, attention: Attention, prefixes: list[Chunk]) -> None:
        """Store keys, and attend to none, because the sequences have length 0."""
        q, k = (
            torch.cat([self.qkv[i][part][start : start + count] for i, start, count in prefixes])
            for part in (0, 1)
        )
        batch = self.batch(prefixes)
        batch.seq_lens.zero_()
        attention(q, k, None, batch, self.params, self.rope(batch.positions))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"lengths": [50, 1, 33], "rotary_dim": 8} | SIZES, "float32"),
        (
            {"lengths": [40], "head_dim": 40, "value_dim": 32, "heads": 70, "kv_heads": 1},
            "bfloat16",
        ),
        ({"lengths": [20, 3], "head_dim": 310, "value_dim": 300, "kv_heads": 1}, "bfloat16"),
        pytest.param(
            {"lengths": [40], "head_dim": 576, "value_dim": 512, "heads": 40, "kv_heads": 1}
            | {"rotary_dim": 64},
            "bfloat16",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_latent_attention_matches_dense_reference(options: dict[str, Any], dtype: str) -> None:
    case = LatentCase(**options, dtype=dtype)
    assert_matches_reference(case, case.run(threads=1))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_chunking_and_parts_do_not_change_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps mix decode and prefill, with one program or several for the ranges and for the value.

    Keys of the first tokens are in the cache already, because all pairs of tokens take the interpreter seconds.
    """
    case = LatentCase([520, 9, 5], dtype=dtype, rotary_dim=8, **SIZES)
    one_step: list[list[Chunk]] = [[(0, 500, 20), (1, 0, 9), (2, 0, 5)]]
    expected = case.run(one_step, threads=1)
    assert_matches_reference(case, expected, start=500)
    steps: list[list[Chunk]] = [[(0, 500, 8), (2, 0, 3)], [(1, 0, 8), (0, 508, 9)]]
    steps += [[(2, 3, 1), (0, 517, 1)], [(2, 4, 1), (1, 8, 1), (0, 518, 2)]]
    for run, part_width in ((one_step, 256), (steps, 16)):
        monkeypatch.setattr(latent_attention, "PART_WIDTH", part_width)
        first, *others = case.run(run, MANY_MULTIPROCESSORS)
        assert_same_bits([first[500:], *others], [expected[0][500:], *expected[1:]])


def test_nan_affects_own_row_only() -> None:
    case = LatentCase([50, 20], dtype="bfloat16", **SIZES)
    for operand in (0, 1):
        assert_nan_affects_own_row_only(case, operand)


def test_views_and_moved_blocks_give_same_bits() -> None:
    case = LatentCase([30], **SIZES)
    ((q, k, _),) = case.qkv
    q, k = (F.pad(x.flatten(1), (0, 9))[:, :-9].unflatten(1, (-1, 28)) for x in (q, k))
    assert not q.is_contiguous()
    out = case.create_attention()(q, k, None, case.batch([(0, 0, 30)]), case.params, None)
    assert_same_bits([out], case.run())
    assert_blocks_can_be_moved(LatentCase([40, 40], dtype="bfloat16", **SIZES))


def test_unused_row_changes_no_other_row() -> None:
    """Unused rows of captured graphs have slot -1 and a sequence of length 0."""
    case = LatentCase([40], **SIZES)
    (expected,) = case.run(threads=1)
    attention = case.create_attention()
    ((q, k, _),) = case.qkv
    attention(q[:-1], k[:-1], None, case.batch([(0, 0, 39)]), case.params, None)
    batch = case.batch([(0, 39, 1), (0, 0, 1)])
    batch.slot_mappings[0, 1], batch.seq_lens[1] = -1, 0
    q, k = (torch.cat([x[-1:], torch.full_like(x[-1:], torch.nan)]) for x in (q, k))
    out = attention(q, k, None, batch, case.params, None)
    assert_same_bits([out[0]], [expected[-1]])


def test_unsupported_dtypes_of_the_cache_are_refused_with_remedy() -> None:
    case = LatentCase([1], head_dim=576, value_dim=512, kv_heads=1, dtype="bfloat16")
    case.create_attention()
    with pytest.raises(ValueError, match="serve it in bfloat16"):
        replace(case, dtype="float32").create_attention()
    with pytest.raises(ValueError, match="set kv_dtype to auto"):
        replace(case, cache_dtype=KV_FLOAT8).create_attention()
