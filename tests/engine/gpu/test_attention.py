"""Paged attention of the GPU: right against a plain reference, and the same bits in any batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from argosy.engine.execution.gpu.attention import KV_FLOAT8, TritonAttention
from tests.engine.attention_cases import (
    World,
    assert_blocks_move,
    assert_right,
    assert_same_bits,
    type_of,
)
from tests.engine.gpu.device import DEVICE

if TYPE_CHECKING:
    from torch import Tensor

    from argosy.engine.execution.batch import AttentionParams, Batch
    from argosy.engine.execution.rope import RopeRotation
    from tests.engine.attention_cases import Chunk, PathName

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy plays the GPU here


class Staged(TritonAttention):
    """Takes host tensors and gives host tensors."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        params: AttentionParams,
        rope: RopeRotation | None,
    ) -> Tensor:
        q, k, v = (x.to(DEVICE) for x in (q, k, v))
        there: Any = {each.name: getattr(batch, each.name).to(DEVICE) for each in fields(batch)}
        if rope is not None:
            rope = rope[0].to(DEVICE), rope[1].to(DEVICE)
        return super().__call__(q, k, v, replace(batch, **there), params, rope).cpu()


@dataclass
class GpuWorld(World):
    """A world whose attention is the GPU's; `threads` is how many processors it thinks it has."""

    cache: torch.dtype | None = None
    scales: Tensor | None = None

    def attention(self, path: PathName = "native", threads: int = 2) -> Staged:
        shape = self.shape(self.cache or type_of[self.dtype])
        attention = Staged(shape, device=DEVICE, num_multiprocessors=threads, scales=self.scales)
        self.soil(attention)
        return attention

    def go(self, steps: list[list[Chunk]], processors: int = 1) -> list[Tensor]:
        return self.run("native", steps, processors)


MANY = 1000
"""Processors enough for every range to have a program of its own."""

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
    pytest.param({"lengths": [530, 30], "head_dim": 16, "kv_heads": 1}, id="two-ranges"),
]


@pytest.mark.parametrize(("block_size", "dtype"), [(16, "bfloat16"), (32, "float32")])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_dense_attention(shape: dict[str, int], block_size: int, dtype: str) -> None:
    world = GpuWorld(**shape, block_size=block_size, dtype=dtype)  # type: ignore[arg-type]
    assert_right(world, world.go(world.whole()))


def test_heads_of_256_are_done_in_bfloat16_only() -> None:
    world = GpuWorld([70], head_dim=256, heads=40, kv_heads=1, dtype="bfloat16")
    assert_right(world, world.go(world.whole()))
    with pytest.raises(ValueError, match="serve it in bfloat16"):
        replace(world, dtype="float32").attention()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 514])
def test_same_bits_however_cut(window: int | None, dtype: str) -> None:
    """Decode and prefill, alone and in company, one program for all ranges or one for each."""
    world = GpuWorld(
        [530, 33, 7],
        window=window,
        dtype=dtype,
        softcap=20.0,
        rotary_dim=16,
        heads=3,
        kv_heads=1,
    )
    whole = world.go(world.whole())
    assert_right(world, whole)
    alone = [[(i, 0, n)] for i, n in enumerate(world.lengths)]
    steps: list[list[Chunk]] = [[(0, 0, 500), (2, 0, 3)], [(1, 0, 32), (0, 500, 17)]]
    steps += [[(2, 3, 1), (0, 517, 1)], [(0, 518, 1)], [(2, 4, 3), (1, 32, 1), (0, 519, 11)]]
    for processors in (1, MANY):
        assert_same_bits(world.go(alone, processors), whole)
        assert_same_bits(world.go(steps, processors), whole)


@pytest.mark.parametrize("cache", [None, KV_FLOAT8])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_a_row_with_nan_says_so_and_stays_alone(which: int, cache: torch.dtype | None) -> None:
    world = GpuWorld([80, 30], dtype="bfloat16", cache=cache)
    clean = world.go(world.whole())
    world.qkv[0][which][40] = torch.nan
    sick = world.go(world.whole())
    assert sick[0][40].isnan().all()
    assert_same_bits([sick[1]], [clean[1]])


def test_queries_from_a_fused_projection() -> None:
    """q, k and v as views into one [T, (heads + 2 kv_heads) * head_dim] matrix."""
    world = GpuWorld([50])
    q, k, v = world.qkv[0]
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    q, k, v = (
        x.unflatten(1, (-1, world.head_dim))
        for x in fused.split([x.shape[1] * x.shape[2] for x in (q, k, v)], 1)
    )
    assert not q.is_contiguous()
    out = world.attention()(q, k, v, world.batch([(0, 0, 50)]), world.spec, None)
    assert_same_bits([out], world.go(world.whole()))


def test_a_row_that_is_not_in_use_changes_nothing() -> None:
    """As a captured graph has it: its slot is -1 and its sequence has no length."""
    world = GpuWorld([80, 30])
    expected = world.go(world.whole())
    attention = world.attention()
    q, k, v = (torch.cat([a[:-1], b[:-1]]) for a, b in zip(*world.qkv, strict=True))
    attention(q, k, v, world.batch([(0, 0, 79), (1, 0, 29)]), world.spec, None)
    batch = world.batch([(0, 79, 1), (1, 0, 1), (1, 29, 1)])
    batch.slot_mapping[1], batch.seq_lens[1] = -1, 0
    q, k, v = (
        torch.cat([a[-1:], torch.full_like(a[-1:], torch.nan), b[-1:]])
        for a, b in zip(*world.qkv, strict=True)
    )
    out = attention(q, k, v, batch, world.spec, None)
    assert_same_bits([out[0], out[2]], [expected[0][-1], expected[1][-1]])


@pytest.mark.parametrize("cache", [None, KV_FLOAT8])
def test_blocks_can_be_copied_and_taken_elsewhere(cache: torch.dtype | None) -> None:
    world = GpuWorld([40, 40], dtype="bfloat16", cache=cache)
    assert_blocks_move(world, "native")


def test_a_float8_cache_holds_what_rounds_to_it() -> None:
    """Keys and values that are float8 times their head's scale come out as if nothing had happened."""
    world = GpuWorld([150, 20], dtype="bfloat16", cache=KV_FLOAT8)
    world.scales = torch.tensor([0.25, 2.0, 0.5, 4.0]).view(1, 2, 2).repeat(2, 1, 1)
    for i, (q, k, v) in enumerate(world.qkv):
        key, value = (
            (x.float() / s[:, None]).to(KV_FLOAT8).float() * s[:, None]
            for x, s in zip((k, v), world.scales[-1], strict=True)
        )
        world.qkv[i] = (q, key.to(k.dtype), value.to(v.dtype))
    exact = replace(world, cache=None, scales=None)
    exact.qkv = world.qkv
    outputs = world.go(world.whole())
    assert_right(world, outputs)
    for ours, theirs in zip(outputs, exact.go(exact.whole()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_a_float8_cache_holds_large_numbers_as_its_largest() -> None:
    world = GpuWorld([20], dtype="float32", cache=KV_FLOAT8)
    world.qkv[0][2][:] = 1e6
    out = world.go(world.whole())[0]
    torch.testing.assert_close(out, torch.full_like(out, 448.0))
