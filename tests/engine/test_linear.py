"""Linear layers on every instruction set: accuracy, and bits of a row that depend neither on batch nor on threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GROUP_SIZES,
    GroupedSource,
    GroupedWeight,
    GroupFormat,
    choose_group_size,
)
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.cpu.linear import TorchGroupLinear
from argosy.engine.execution.kernels.pack_cache import pack_in_memory
from tests.engine.isas import ISAS
from tests.engine.pairwise import pairwise

BATCHES = (1, 2, 3, 6, 7, 13, 14, 15, 16, 17, 29, 31, 32, 33, 47, 64, 65, 128, 200, 259)


def random_linear(outs: int, cols: int, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(outs + cols)
    weight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    bias = torch.randn(outs, generator=generator)
    x = torch.randn(rows, cols, generator=generator)
    return weight.to(dtype), bias.to(dtype), x.to(dtype)


def assert_close_to_exact(
    out: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor
) -> None:
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    assert out.dtype == x.dtype


def assert_rows_are_independent(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> None:
    """Check that rows are accurate, and equal in batches of many sizes from both ends of x."""
    linear = create_cpu_device(2).create_linear(weight, bias)
    expected = linear(x)
    assert_close_to_exact(expected, weight, bias, x)
    for rows in BATCHES:
        assert torch.equal(linear(x[:rows]), expected[:rows])
        assert torch.equal(linear(x[len(x) - rows :]), expected[len(x) - rows :])


# Layers of the bundled model, of models with 0.5 and 1.7 billion parameters, and unusual sizes.
LINEARS = [
    (320, 320),
    (896, 320),
    (320, 896),
    (4096, 320),
    (1152, 896),
    (4864, 896),
    (896, 4864),
    (2048, 6144),
    (100, 70),
    (17, 33),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(
            (outs, cols),
            dtype,
            id=f"{outs}x{cols}-{name}",
            marks=pytest.mark.exhaustive if name == "float32" and outs > 1024 else (),
        )
        for outs, cols in LINEARS
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    ],
)
def test_batch_does_not_change_row_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_rows_are_independent(*random_linear(*shape, dtype, max(BATCHES)))


@pytest.mark.parametrize("shape", [(320, 896), (97, 70), (64, 1500)], ids=str)
def test_batch_does_not_change_row_bits_on_any_isa(isa: str, shape: tuple[int, int]) -> None:
    assert_rows_are_independent(*random_linear(*shape, torch.bfloat16, max(BATCHES)))


def test_bfloat16_without_avx512_and_compiler_uses_torch() -> None:
    """On such CPUs oneDNN does not support bfloat16."""
    code = f"from {__name__} import *; assert_rows_are_independent(*random_linear(97, 70, torch.bfloat16, 32))"
    cpu = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ARGOSY_CPU_ISA": "torch"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | cpu)


@pytest.mark.parametrize("shape", [(100, 600), (4096, 320)], ids=str)
def test_long_batch_and_threads_do_not_change_row_bits(shape: tuple[int, int]) -> None:
    """Threads divide the work into chunks, blocks and steps, whose boundaries must not affect results."""
    weight, bias, x = random_linear(*shape, torch.bfloat16, 800)
    linears = [create_cpu_device(threads).create_linear(weight, bias) for threads in (1, 2, 5)]
    outputs = [linear(x) for linear in linears]
    assert all(torch.equal(expected, outputs[0]) for expected in outputs)
    for row in (0, 31, 255, 256, 265, 266, 300, 511, 512, 532, 799):
        assert torch.equal(linears[0](x[row : row + 1]), outputs[0][row : row + 1])


def test_thread_count_does_not_change_bits(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias, x = random_linear(896, 896, dtype, 40)
        single, threaded = (create_cpu_device(n).create_linear(weight, bias)(x) for n in (1, 3))
        assert torch.equal(single, threaded)


def test_missing_bias_equals_zero_bias(isa: str) -> None:
    weight, bias, x = random_linear(100, 64, torch.bfloat16, 20)
    without = create_cpu_device(1).create_linear(weight, None)(x)
    assert torch.equal(
        without, create_cpu_device(1).create_linear(weight, torch.zeros_like(bias))(x)
    )


def test_empty_input_gives_empty_output(isa: str) -> None:
    weight, bias, _ = random_linear(64, 32, torch.bfloat16, 1)
    empty = create_cpu_device(1).create_linear(weight, bias)(
        torch.empty(0, 32, dtype=torch.bfloat16)
    )
    assert empty.shape == (0, 64)


def test_strided_rows_give_same_bits(isa: str) -> None:
    weight, bias, x = random_linear(64, 96, torch.bfloat16, 20)
    linear = create_cpu_device(2).create_linear(weight, bias)
    padded = torch.zeros(20, 200, dtype=torch.bfloat16)
    padded[:, 50:146] = x
    assert torch.equal(linear(padded[:, 50:146]), linear(x))


@pytest.fixture(autouse=True)
def _restore_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


GROUP_SHAPES = [(100, 96), (33, 320), (64, 256), (1, 16), (130, 500)]
GROUP_BATCHES = (1, 2, 3, 5, 9, 70)
SIGNED_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -128)


def random_weight(shape: tuple[int, int], group_format: GroupFormat) -> GroupedWeight:
    generator = torch.Generator().manual_seed(sum(shape))
    scales_shape = (shape[0], -(-shape[1] // group_format.group_size))
    if group_format.bits == 4:
        values = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    else:
        values = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    offsets = torch.randn(scales_shape, generator=generator) if group_format.has_offsets else None
    return GroupedWeight(
        group_format, values, torch.rand(scales_shape, generator=generator), offsets
    )


def create_grouped_linear(
    weight: GroupedWeight, bias: Tensor, threads: int = 1
) -> Callable[[Tensor], Tensor]:
    outs, cols = weight.values.shape
    source = GroupedSource(weight.format, (outs, cols), lambda: weight)
    return create_cpu_device(threads).create_group_linear(source, bias, pack_in_memory)


@pairwise(
    bits=[4, 8],
    group_size=GROUP_SIZES,
    has_offsets=[False, True],
    shape=GROUP_SHAPES,
    dtype=[torch.float32, torch.bfloat16],
    isa=ISAS,
    indirect=["isa"],
)
def test_every_isa_and_batch_gives_same_bits(
    bits: int,
    group_size: int,
    has_offsets: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    isa: str,
) -> None:
    group_format = GroupFormat(bits, group_size, has_offsets, SIGNED_TABLE)
    weight, bias = random_weight(shape, group_format), torch.randn(shape[0])
    x = torch.randn(max(GROUP_BATCHES), shape[1], generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    expected = TorchGroupLinear(weight, bias)(x)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    error = (expected - exact).square().mean().sqrt()
    assert error < 0.02 * exact.square().mean().sqrt()  # bfloat16, and inputs of 8 bits
    for threads in (1, 3):
        linear = create_grouped_linear(weight, bias, threads)
        for rows in GROUP_BATCHES:
            assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows on {isa}"
            assert torch.equal(linear(x[-rows:]), expected[-rows:])


def test_non_finite_and_zero_inputs_affect_own_row_only(isa: str) -> None:
    weight = random_weight((40, 320), GroupFormat(4, 64, has_offsets=True))
    bias, x = torch.randn(40), torch.randn(20, 320)
    linear = create_grouped_linear(weight, bias)
    clean = linear(x)
    x[3, 319], x[5] = float("nan"), 0.0
    out = linear(x)
    assert out[3].isnan().all(), isa
    assert torch.equal(out[5], bias)
    others = [row for row in range(20) if row not in {3, 5}]
    assert torch.equal(out[others], clean[others])
    wide = torch.zeros(20, 400)
    wide[:, 7:327] = x
    assert torch.equal(linear(wide[:, 7:327]).nan_to_num(), out.nan_to_num())
    assert linear(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("stored", "cols", "size"),
    [(32, 64, 32), (128, 256, 128), (96, 192, 32), (64, 64, 256), (512, 1024, 256), (24, 48, None)],
)
def test_group_size_of_kernels_divides_the_stored_one(
    stored: int, cols: int, size: int | None
) -> None:
    assert choose_group_size(stored, cols) == size
