"""Paged attention: right against a plain reference, and the same bits however tokens are batched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.engine.execution.attention_cpu import create_cpu_attention
from argosy.engine.execution.batch import KvCacheShape
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.rope import apply_rope
from argosy.native import NativeUnavailableError
from tests.engine.attention_cases import (
    Chunk,
    PathName,
    World,
    assert_blocks_move,
    assert_right,
    assert_same_bits,
    type_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from argosy.engine.execution.batch import Attention


def native_or_skip() -> Kernels:
    try:
        return load_kernels()
    except NativeUnavailableError as why:
        pytest.skip(f"no native kernels here: {why}")


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest) -> PathName:
    if request.param == "torch":
        return "torch"
    native_or_skip()
    return "native"


SHAPES = [
    pytest.param({"lengths": [1]}, id="one-token"),
    pytest.param({"lengths": [150, 3, 64, 65]}, id="mixed"),
    pytest.param({"lengths": [70, 20], "head_dim": 16, "heads": 3, "kv_heads": 3}, id="mha-16"),
    pytest.param({"lengths": [70, 20], "head_dim": 24, "heads": 6, "kv_heads": 1}, id="mqa-24"),
    pytest.param({"lengths": [90], "head_dim": 64, "heads": 14, "kv_heads": 2}, id="gqa-7-64"),
    pytest.param({"lengths": [130, 40], "head_dim": 128, "heads": 8, "kv_heads": 4}, id="gqa-128"),
    pytest.param({"lengths": [70], "head_dim": 256, "heads": 40, "kv_heads": 1}, id="mqa-40-256"),
    pytest.param({"lengths": [150, 33], "window": 17}, id="window"),
    pytest.param({"lengths": [200, 10], "window": 64, "softcap": 3.0}, id="window-softcap"),
    pytest.param({"lengths": [70, 10], "window": 1}, id="window-of-one"),
    pytest.param({"lengths": [90, 10], "softcap": 30.0}, id="softcap"),
    pytest.param({"lengths": [90, 10], "rotary_dim": 32}, id="rotated"),
    pytest.param({"lengths": [70], "head_dim": 80, "rotary_dim": 20}, id="rotated-in-part"),
    pytest.param({"lengths": [70], "head_dim": 6, "rotary_dim": 6}, id="rotated-6"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_dense_attention(
    path: PathName, shape: dict[str, int], block_size: int, dtype: str
) -> None:
    world = World(**shape, block_size=block_size, dtype=dtype)  # type: ignore[arg-type]
    assert_right(world, world.run(path, world.whole()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("window", [None, 40])
def test_same_bits_however_cut(
    path: PathName, window: int | None, block_size: int, dtype: str
) -> None:
    world = World(
        [150, 33, 7], window=window, block_size=block_size, dtype=dtype, softcap=20.0, rotary_dim=32
    )
    whole = world.run(path, world.whole())
    alone = [[(i, 0, n)] for i, n in enumerate(world.lengths)]
    singly = [max(0, n - 25) for n in world.lengths]  # from here on, token by token
    token_by_token = [[(i, 0, n) for i, n in enumerate(singly) if n]]
    token_by_token += [
        [(i, n + t, 1) for i, n in enumerate(singly) if n + t < world.lengths[i]] for t in range(25)
    ]
    chunked = [[(0, 0, 61), (2, 0, 3)], [(1, 0, 33), (0, 61, 1)], [(2, 3, 4), (0, 62, 88)]]
    for steps in (alone, token_by_token, chunked):
        assert_same_bits(world.run(path, steps), whole)


def test_same_bits_for_any_number_of_threads(path: PathName) -> None:
    world = World([600, 33, 7, 190], head_dim=64, dtype="bfloat16")
    one = world.run(path, world.whole(), threads=1)
    for threads in (2, 3, 5):
        assert_same_bits(world.run(path, world.whole(), threads), one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_context_is_right(dtype: str) -> None:
    """Longer than the range of keys whose sums the native kernel makes together."""
    native_or_skip()
    world = World([2300], heads=2, kv_heads=1, dtype=dtype)
    whole = world.run("native", world.whole(), threads=1)
    assert_right(world, whole)
    for threads in (2, 5):
        assert_same_bits(world.run("native", world.whole(), threads), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 2500])
def test_threads_share_a_long_context_without_a_trace(window: int | None, dtype: str) -> None:
    native_or_skip()
    world = World([4300], heads=3, kv_heads=1, head_dim=128, window=window, dtype=dtype)
    end = world.run("native", [[(0, 4099, 201)]], threads=1)
    cut = [[(0, 4099, 190)], *([(0, at, 1)] for at in range(4289, 4300))]
    for threads in (1, 2, 5):
        assert_same_bits(world.run("native", cut, threads), end)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_worlds_in_random_steps(data: st.DataObject) -> None:
    native_or_skip()
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    world = World(
        data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4)),
        heads=kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([8, 16, 40, 64])),
        block_size=data.draw(st.sampled_from([8, 16, 24, 32, 64])),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        window=data.draw(st.none() | st.integers(1, 150)),
        softcap=data.draw(st.none() | st.floats(1.0, 50.0)),
        rotary_dim=data.draw(st.sampled_from([0, 2, 8])),
    )
    done = [0] * len(world.lengths)
    steps: list[list[Chunk]] = []
    while any(d < n for d, n in zip(done, world.lengths, strict=True)):
        open_ones = [i for i, n in enumerate(world.lengths) if done[i] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, world.lengths[i] - done[i])) for i in chosen]
        steps.append([(i, done[i], n) for i, n in zip(chosen, counts, strict=True)])
        for i, n in zip(chosen, counts, strict=True):
            done[i] += n
    whole = world.run("native", world.whole())
    assert_right(world, whole)
    assert_same_bits(world.run("native", steps), whole)


def test_large_scores_do_not_overflow(path: PathName) -> None:
    world = World([80], dtype="float32")
    world.qkv[0][0].mul_(300.0)  # float32 holds such scores to about 1e-4
    assert_right(world, world.run(path, world.whole()), tolerance=1e-3)


def test_a_row_with_nan_stays_alone(path: PathName) -> None:
    world = World([80, 30], dtype="bfloat16")
    clean = world.run(path, world.whole())
    world.qkv[0][0][40] = torch.nan
    sick = world.run(path, world.whole())
    assert sick[0][40].isnan().all()
    assert_same_bits([sick[1]], [clean[1]])


def test_queries_from_a_fused_projection(path: PathName) -> None:
    """q, k and v as views into one [T, (heads + 2 kv_heads) * head_dim] matrix."""
    world = World([50])
    q, k, v = world.qkv[0]
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    views = [
        x.unflatten(1, (-1, world.head_dim))
        for x in fused.split([x.shape[1] * x.shape[2] for x in (q, k, v)], 1)
    ]
    assert not views[0].is_contiguous()
    batch = world.batch([(0, 0, 50)])
    out = world.attention(path)(views[0], views[1], views[2], batch, world.spec, None)
    assert_same_bits([out], world.run(path, world.whole()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_rounds_once_to_the_dtype(path: PathName, dtype: str) -> None:
    """As if queries and keys had been rotated and rounded before they came."""
    turning = World([70, 20], head_dim=64, dtype=dtype, rotary_dim=48)
    before = World([70, 20], head_dim=64, dtype=dtype)
    for i, (q, k, v) in enumerate(turning.qkv):
        rope = turning.rope(torch.arange(len(q)))
        assert rope is not None
        before.qkv[i] = (apply_rope(q, rope), apply_rope(k, rope), v)
    kept = [x.clone() for row in turning.qkv for x in row]
    ours, theirs = (world.run(path, world.whole()) for world in (turning, before))
    if path == "torch" or dtype == "bfloat16":
        assert_same_bits(ours, theirs)
    else:  # a fused multiply-add may round once less than torch's operations
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_same_bits([x for row in turning.qkv for x in row], kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_can_be_copied_and_taken_elsewhere(path: PathName, dtype: str) -> None:
    world = World([40, 40], dtype=dtype)
    assert_blocks_move(world, path)


def test_a_block_carries_every_layer(path: PathName) -> None:
    world = World([10], layers=3)
    attention = world.attention(path)
    itemsize = type_of[world.dtype].itemsize
    held = world.layers * 2 * world.block_size * world.kv_heads * world.head_dim * itemsize
    assert attention.read_block(0).numel() == held
    pattern = torch.arange(held, dtype=torch.int64).to(torch.uint8)
    attention.write_block(0, pattern)
    assert torch.equal(attention.read_block(0), pattern)


def test_a_block_of_another_size_is_refused(path: PathName) -> None:
    attention = World([10]).attention(path)
    with pytest.raises(ValueError, match="uint8 bytes"):
        attention.write_block(0, torch.zeros(3, dtype=torch.uint8))


def small(
    path: Literal["auto", "native"], compiler: str, folder: Path, **changes: int
) -> Attention:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16, **changes}
    shape = KvCacheShape(num_layers=1, num_blocks=4, dtype=torch.float32, **sizes)
    return create_cpu_attention(
        shape, threads=1, backend=path, kernels=lambda: load_kernels(compiler, folder)
    )


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    assert small("auto", "no-such-compiler", tmp_path).name == "torch"
    with pytest.raises(NativeUnavailableError, match="install"):
        small("native", "no-such-compiler", tmp_path)


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo out of paper >&2; exit 1; }\n')
    broken.chmod(0o755)
    assert small("auto", str(broken), tmp_path / "cache").name == "torch"
    with pytest.raises(NativeUnavailableError, match="out of paper"):
        small("native", str(broken), tmp_path / "cache")


def test_block_sizes_the_kernel_does_not_do(tmp_path: Path) -> None:
    native_or_skip()
    shape = KvCacheShape(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_blocks=4,
        block_size=5,
        dtype=torch.float32,
    )
    assert create_cpu_attention(shape, threads=1).name == "torch"


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="divide"):
        small("auto", "no-such-compiler", tmp_path, num_heads=3)
