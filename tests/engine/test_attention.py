"""Paged attention on the CPU: agreement with dense attention, and equal bits for every batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

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
    LAYERS,
    AttentionCase,
    BackendName,
    Chunk,
    assert_blocks_can_be_moved,
    assert_matches_reference,
    assert_nan_affects_own_row_only,
    assert_same_bits,
    assert_views_give_same_bits,
)
from tests.engine.pairwise import pairwise


def native_or_skip() -> Kernels:
    try:
        return load_kernels()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels here: {error}")


DTYPES = ["float32", "bfloat16"]
CACHE_DTYPES = [None, torch.int8]


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
    dtype=DTYPES,
    cache_dtype=CACHE_DTYPES,
    indirect=["backend"],
)
def test_attention_matches_dense_reference(
    backend: BackendName,
    shape: dict[str, int],
    block_size: int,
    dtype: str,
    cache_dtype: torch.dtype | None,
) -> None:
    options = {"dtype": dtype, "cache_dtype": cache_dtype, "backend": backend}
    case = AttentionCase(**shape, block_size=block_size, **options)  # type: ignore[arg-type]
    assert_matches_reference(case, case.run())


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_latent_attention_matches_dense_reference_on_every_isa(
    isa: str, cache_dtype: torch.dtype | None
) -> None:
    """Kernels extract values from keys, and expand bytes, with different instructions."""
    backend: BackendName = "torch" if isa == TORCH_ISA_NAME else "native"
    sizes = {"head_dim": 72, "value_dim": 64, "heads": 6, "kv_heads": 1, "rotary_dim": 8}
    options = {"dtype": "bfloat16", "cache_dtype": cache_dtype, "backend": backend}
    case = AttentionCase([150, 33], **sizes, **options)  # type: ignore[arg-type]
    expected = case.run()
    assert_matches_reference(case, expected)
    assert_same_bits(case.run([[(1, 0, 33), (0, 0, 61)], [(0, 61, 89)]]), expected)


@pairwise(value_dim=[None, 20], dtype=DTYPES, cache_dtype=CACHE_DTYPES)
def test_long_context_matches_dense_reference(
    value_dim: int | None, dtype: str, cache_dtype: torch.dtype | None
) -> None:
    """The context is longer than the range of keys after which the native kernel merges sums."""
    native_or_skip()
    sizes = {"heads": 2, "kv_heads": 1, "value_dim": value_dim, "cache_dtype": cache_dtype}
    case = AttentionCase([2300, 33, 190], **sizes, dtype=dtype, has_sinks=True)  # type: ignore[arg-type]
    expected = case.run(threads=1)
    assert_matches_reference(case, expected)
    for threads in (2, 5):
        assert_same_bits(case.run(threads=threads), expected)


@pairwise(window=[None, pytest.param(2500, marks=pytest.mark.exhaustive)], dtype=DTYPES)
def test_threads_sharing_long_context_do_not_change_bits(window: int | None, dtype: str) -> None:
    native_or_skip()
    case = AttentionCase([4300], heads=3, kv_heads=1, head_dim=128, window=window, dtype=dtype)
    end = case.run([[(0, 4099, 201)]], threads=1)
    cut = [[(0, 4099, 190)], *([(0, at, 1)] for at in range(4289, 4300))]
    for threads in (1, 2, 5):
        assert_same_bits(case.run(cut, threads), end)


@pytest.mark.parametrize("backend", ["native", "torch"], indirect=True)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_chunks_and_batches_do_not_change_bits(backend: BackendName, data: st.DataObject) -> None:
    """Random cases match the reference, and give the same bits in random steps."""
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    head_dim = data.draw(st.sampled_from([8, 16, 40, 64]))
    case = AttentionCase(
        data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4)),
        heads=kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=data.draw(st.sampled_from([8, 16, 24, 32, 64])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        window=data.draw(st.none() | st.integers(1, 150)),
        softcap=data.draw(st.none() | st.floats(1.0, 50.0)),
        has_sinks=data.draw(st.booleans()),
        value_dim=data.draw(st.sampled_from([None, head_dim // 2])),
        rotary_dim=data.draw(st.sampled_from([0, 2, 4])),  # no value of a latent key is rotated
        cache_dtype=data.draw(st.sampled_from(CACHE_DTYPES)),
        backend=backend,
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
    expected = case.run()
    assert_matches_reference(case, expected)
    assert_same_bits(case.run(steps), expected)


def test_large_scores_do_not_overflow(backend: BackendName) -> None:
    case = AttentionCase([80], backend=backend)
    case.qkv[0][0].mul_(300.0)  # float32 holds such scores to about 1e-4
    assert_matches_reference(case, case.run(), tolerance=1e-3)


@pytest.mark.parametrize(("operand", "cache_dtype"), [(0, None), (1, torch.int8), (2, torch.int8)])
def test_nan_affects_own_row_only(
    backend: BackendName, operand: int, cache_dtype: torch.dtype | None
) -> None:
    """A row with NaN has the scale NaN."""
    options = {"dtype": "bfloat16", "backend": backend, "cache_dtype": cache_dtype}
    assert_nan_affects_own_row_only(AttentionCase([80, 30], **options), operand)  # type: ignore[arg-type]


def test_strided_views_of_fused_projection_give_same_bits(backend: BackendName) -> None:
    assert_views_give_same_bits(AttentionCase([50], backend=backend))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_rounds_once_to_dtype(backend: BackendName, dtype: str) -> None:
    """The result equals that of queries and keys that were rotated and rounded prerotated."""
    rotated, prerotated = (
        AttentionCase([70, 20], head_dim=64, dtype=dtype, rotary_dim=size, backend=backend)
        for size in (48, 0)
    )
    for i, (q, k, v) in enumerate(rotated.qkv):
        rope = rotated.rope(torch.arange(len(q)))
        assert rope is not None
        prerotated.qkv[i] = (apply_rope(q, rope), apply_rope(k, rope), v)
    copies = [x.clone() for row in rotated.qkv for x in row]
    actual, expected = rotated.run(), prerotated.run()
    if backend == "torch" or dtype == "bfloat16":
        assert_same_bits(actual, expected)
    else:  # a fused multiply-add may round once less than torch's operations
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert_same_bits([x for row in rotated.qkv for x in row], copies)


@pairwise(
    dtype=DTYPES,
    value_dim=[None, 20],
    cache_dtype=CACHE_DTYPES,
    backend=["native", "torch"],
    indirect=["backend"],
)
def test_copied_blocks_continue_sequence(
    backend: BackendName, dtype: str, value_dim: int | None, cache_dtype: torch.dtype | None
) -> None:
    options = {"value_dim": value_dim, "cache_dtype": cache_dtype, "backend": backend}
    case = AttentionCase([40, 40], dtype=dtype, **options)  # type: ignore[arg-type]
    assert_blocks_can_be_moved(case)


def test_block_data_contains_every_layer_and_nothing_else(backend: BackendName) -> None:
    case = AttentionCase([10], backend=backend)
    attention = case.create_attention()
    num_bytes = LAYERS * 2 * case.block_size * case.kv_heads * case.head_dim * 4
    pattern = torch.arange(2 * num_bytes, dtype=torch.int64).to(torch.uint8).view(2, num_bytes)
    blocks, data = torch.tensor([1, 0]), torch.empty_like(pattern)
    attention.write_blocks(blocks, pattern)
    attention.read_blocks(blocks, data)
    assert torch.equal(data, pattern)
    with pytest.raises(ValueError, match="uint8 bytes"):
        attention.write_blocks(blocks, pattern[:, 1:])


def create_small_attention(
    backend: Literal["auto", "native"], compiler: str, folder: Path, **changes: int
) -> Attention:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
    sizes |= changes
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


def test_shape_without_native_kernel_uses_torch_or_is_rejected(tmp_path: Path) -> None:
    kernels = native_or_skip().path.parents[1]
    assert create_small_attention("auto", "c++", kernels, block_size=5).name == "torch, 125 keys"
    with pytest.raises(ValueError, match="divide"):
        create_small_attention("auto", "no-such-compiler", tmp_path, num_heads=3)
