"""Paged attention on the CPU: agreement with dense attention, and equal bits for every batching."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import KvCacheShape
from argosy.engine.execution.kernels.cpu.attention import create_cpu_attention
from argosy.engine.execution.kernels.cpu.isa import TORCH_ISA_NAME
from argosy.engine.execution.kernels.cpu.native_kernels import Kernels, load_kernels
from argosy.engine.execution.kernels.rope import apply_rope
from argosy.native import NativeUnavailableError
from tests.engine.attention_cases import (
    TORCH_DTYPES,
    AttentionCase,
    BackendName,
    Chunk,
    assert_blocks_can_be_moved,
    assert_matches_reference,
    assert_same_bits,
)
from tests.engine.pairwise import pairwise


def native_or_skip() -> Kernels:
    try:
        return load_kernels()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> BackendName:
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
    pytest.param({"lengths": [90, 10], "has_sinks": True}, id="sinks"),
    pytest.param(
        {"lengths": [150], "window": 17, "head_dim": 64, "heads": 16, "has_sinks": True},
        id="window-sinks",
    ),
    pytest.param(
        {"lengths": [150, 3, 65], "head_dim": 40, "value_dim": 32, "kv_heads": 1, "rotary_dim": 8},
        id="latent-32",
    ),
    pytest.param({"lengths": [90], "head_dim": 30, "value_dim": 20}, id="latent-20"),
    pytest.param(
        {"lengths": [70], "head_dim": 576, "value_dim": 512, "heads": 40, "kv_heads": 1},
        id="latent-512",
    ),
    pytest.param({"lengths": [90, 10], "rotary_dim": 32}, id="rotated"),
    pytest.param({"lengths": [70], "head_dim": 80, "rotary_dim": 20}, id="rotated-in-part"),
    pytest.param({"lengths": [70], "head_dim": 6, "rotary_dim": 6}, id="rotated-6"),
]


@pairwise(
    backend=["native", "torch"],
    shape=SHAPES,
    block_size=[8, 16, 32],
    dtype=["float32", "bfloat16"],
    indirect=["backend"],
)
def test_attention_matches_dense_reference(
    backend: BackendName, shape: dict[str, int], block_size: int, dtype: str
) -> None:
    case = AttentionCase(**shape, block_size=block_size, dtype=dtype)  # type: ignore[arg-type]
    assert_matches_reference(case, case.run(backend, case.one_step()))


@pairwise(
    backend=["native", "torch"],
    window=[None, 40],
    value_dim=[None, 20],
    block_size=[8, 16],
    dtype=["float32", "bfloat16"],
    indirect=["backend"],
)
def test_chunking_does_not_change_bits(
    backend: BackendName, window: int | None, value_dim: int | None, block_size: int, dtype: str
) -> None:
    case = AttentionCase(
        [150, 33, 7],
        window=window,
        block_size=block_size,
        dtype=dtype,
        softcap=20.0,
        has_sinks=True,
        rotary_dim=12,
        value_dim=value_dim,
    )
    expected = case.run(backend, case.one_step())
    unbatched = [[(i, 0, n)] for i, n in enumerate(case.lengths)]
    prefixes = [max(0, n - 25) for n in case.lengths]  # later tokens follow one by one
    token_by_token = [[(i, 0, n) for i, n in enumerate(prefixes) if n]]
    token_by_token += [
        [(i, n + t, 1) for i, n in enumerate(prefixes) if n + t < case.lengths[i]]
        for t in range(25)
    ]
    chunked = [[(0, 0, 61), (2, 0, 3)], [(1, 0, 33), (0, 61, 1)], [(2, 3, 4), (0, 62, 88)]]
    for steps in (unbatched, token_by_token, chunked):
        assert_same_bits(case.run(backend, steps), expected)


def test_latent_attention_matches_dense_reference_on_every_isa(isa: str) -> None:
    """Kernels extract values from keys with different instructions."""
    backend: BackendName = "torch" if isa == TORCH_ISA_NAME else "native"
    case = AttentionCase(
        [150, 33], head_dim=72, value_dim=64, heads=6, kv_heads=1, dtype="bfloat16", rotary_dim=8
    )
    expected = case.run(backend, case.one_step())
    assert_matches_reference(case, expected)
    assert_same_bits(case.run(backend, [[(1, 0, 33), (0, 0, 61)], [(0, 61, 89)]]), expected)


def test_thread_count_does_not_change_bits(backend: BackendName) -> None:
    case = AttentionCase([600, 33, 7, 190], head_dim=64, dtype="bfloat16")
    one = case.run(backend, case.one_step(), threads=1)
    for threads in (2, 3, 5):
        assert_same_bits(case.run(backend, case.one_step(), threads), one)


@pytest.mark.parametrize("value_dim", [None, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_context_matches_dense_reference(dtype: str, value_dim: int | None) -> None:
    """The context is longer than the range of keys after which the native kernel merges sums."""
    native_or_skip()
    case = AttentionCase(
        [2300], heads=2, kv_heads=1, dtype=dtype, has_sinks=True, value_dim=value_dim
    )
    expected = case.run("native", case.one_step(), threads=1)
    assert_matches_reference(case, expected)
    for threads in (2, 5):
        assert_same_bits(case.run("native", case.one_step(), threads), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 2500])
def test_threads_sharing_long_context_do_not_change_bits(window: int | None, dtype: str) -> None:
    native_or_skip()
    case = AttentionCase([4300], heads=3, kv_heads=1, head_dim=128, window=window, dtype=dtype)
    end = case.run("native", [[(0, 4099, 201)]], threads=1)
    cut = [[(0, 4099, 190)], *([(0, at, 1)] for at in range(4289, 4300))]
    for threads in (1, 2, 5):
        assert_same_bits(case.run("native", cut, threads), end)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_cases_in_random_steps_match_reference(data: st.DataObject) -> None:
    native_or_skip()
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    case = AttentionCase(
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
    computed = [0] * len(case.lengths)
    steps: list[list[Chunk]] = []
    while any(count < length for count, length in zip(computed, case.lengths, strict=True)):
        unfinished = [i for i, n in enumerate(case.lengths) if computed[i] < n]
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, case.lengths[i] - computed[i])) for i in chosen]
        steps.append([(i, computed[i], n) for i, n in zip(chosen, counts, strict=True)])
        for i, n in zip(chosen, counts, strict=True):
            computed[i] += n
    expected = case.run("native", case.one_step())
    assert_matches_reference(case, expected)
    assert_same_bits(case.run("native", steps), expected)


def test_large_scores_do_not_overflow(backend: BackendName) -> None:
    case = AttentionCase([80], dtype="float32")
    case.qkv[0][0].mul_(300.0)  # float32 holds such scores to about 1e-4
    assert_matches_reference(case, case.run(backend, case.one_step()), tolerance=1e-3)


def test_nan_query_affects_own_row_only(backend: BackendName) -> None:
    case = AttentionCase([80, 30], dtype="bfloat16")
    clean = case.run(backend, case.one_step())
    case.qkv[0][0][40] = torch.nan
    with_nan = case.run(backend, case.one_step())
    assert with_nan[0][40].isnan().all()
    assert_same_bits([with_nan[1]], [clean[1]])


def test_strided_views_of_fused_projection_give_same_bits(backend: BackendName) -> None:
    """Queries, keys and values are views into one [T, (heads + 2 kv_heads) * head_dim] matrix."""
    case = AttentionCase([50])
    q, k, v = case.qkv[0]
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    views = [
        x.unflatten(1, (-1, case.head_dim))
        for x in fused.split([x.shape[1] * x.shape[2] for x in (q, k, v)], 1)
    ]
    assert not views[0].is_contiguous()
    batch = case.batch([(0, 0, 50)])
    out = case.create_attention(backend)(views[0], views[1], views[2], batch, case.params, None)
    assert_same_bits([out], case.run(backend, case.one_step()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_rounds_once_to_dtype(backend: BackendName, dtype: str) -> None:
    """The result equals that of queries and keys that were rotated and rounded prerotated."""
    rotated = AttentionCase([70, 20], head_dim=64, dtype=dtype, rotary_dim=48)
    prerotated = AttentionCase([70, 20], head_dim=64, dtype=dtype)
    for i, (q, k, v) in enumerate(rotated.qkv):
        rope = rotated.rope(torch.arange(len(q)))
        assert rope is not None
        prerotated.qkv[i] = (apply_rope(q, rope), apply_rope(k, rope), v)
    copies = [x.clone() for row in rotated.qkv for x in row]
    actual, expected = (case.run(backend, case.one_step()) for case in (rotated, prerotated))
    if backend == "torch" or dtype == "bfloat16":
        assert_same_bits(actual, expected)
    else:  # a fused multiply-add may round once less than torch's operations
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert_same_bits([x for row in rotated.qkv for x in row], copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value_dim", [None, 20])
def test_copied_blocks_continue_sequence(
    backend: BackendName, dtype: str, value_dim: int | None
) -> None:
    case = AttentionCase([40, 40], dtype=dtype, value_dim=value_dim)
    assert_blocks_can_be_moved(case, backend)


def test_block_data_contains_every_layer(backend: BackendName) -> None:
    case = AttentionCase([10], layers=3)
    attention = case.create_attention(backend)
    itemsize = TORCH_DTYPES[case.dtype].itemsize
    num_bytes = case.layers * 2 * case.block_size * case.kv_heads * case.head_dim * itemsize
    assert attention.read_block(0).numel() == num_bytes
    pattern = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    attention.write_block(0, pattern)
    assert torch.equal(attention.read_block(0), pattern)


def test_write_block_rejects_wrong_size(backend: BackendName) -> None:
    attention = AttentionCase([10]).create_attention(backend)
    with pytest.raises(ValueError, match="uint8 bytes"):
        attention.write_block(0, torch.zeros(3, dtype=torch.uint8))


def create_small_attention(
    backend: Literal["auto", "native"], compiler: str, folder: Path, **changes: int
) -> Attention:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16, **changes}
    shape = KvCacheShape(num_layers=1, num_blocks=4, dtype=torch.float32, **sizes)
    return create_cpu_attention(
        shape, threads=1, backend=backend, kernels=lambda: load_kernels(compiler, folder)
    )


def test_missing_compiler_falls_back_to_torch(tmp_path: Path) -> None:
    assert create_small_attention("auto", "no-such-compiler", tmp_path).name == "torch"
    with pytest.raises(NativeUnavailableError, match="install"):
        create_small_attention("native", "no-such-compiler", tmp_path)


def test_compiler_error_is_reported(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo internal compiler error >&2; exit 1; }\n'
    )
    compiler.chmod(0o755)
    assert create_small_attention("auto", str(compiler), tmp_path / "cache").name == "torch"
    with pytest.raises(NativeUnavailableError, match="internal compiler error"):
        create_small_attention("native", str(compiler), tmp_path / "cache")


def test_unsupported_block_size_falls_back_to_torch(tmp_path: Path) -> None:
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


def test_indivisible_heads_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="divide"):
        create_small_attention("auto", "no-such-compiler", tmp_path, num_heads=3)
