"""Linear layers on every instruction set: accuracy, and bits of a row that depend neither on batch nor on threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from argosy.engine.engine_config import IntFormat
from argosy.engine.execution.checkpoint_formats.grouped_weight import (
    GROUP_SIZES,
    GroupedSource,
    GroupedWeight,
    GroupFormat,
    choose_group_size,
)
from argosy.engine.execution.kernels.cpu.device import create_cpu_device
from argosy.engine.execution.kernels.cpu.linear import torch_group_linear, torch_int_linear
from argosy.engine.execution.kernels.pack_cache import pack_in_memory
from tests.engine.isas import ISAS
from tests.engine.pairwise import pairwise

Linear = Callable[[Tensor], Tensor]
Format = IntFormat | GroupFormat | None
"""Quantization of the weight. None keeps its dtype."""
BATCHES = (1, 2, 3, 6, 7, 13, 14, 15, 16, 17, 29, 31, 32, 33, 47, 64, 65, 128, 200, 259)
INT_BATCHES = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 129, 259)
GROUP_BATCHES = (1, 2, 3, 5, 9, 70)
SIGNED_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -128)
NOISE = {"int8": 0.009, "int4": 0.09}
"""Maximum error of a product of normal random numbers, relative to its size."""
DTYPES = [torch.float32, torch.bfloat16]
QUANTIZED: list[IntFormat | GroupFormat] = ["int8", "int4", GroupFormat(4, 64, has_offsets=True)]
FORMATS = [
    *(
        pytest.param(each, torch.float32, id=each if isinstance(each, str) else "grouped")
        for each in QUANTIZED
    ),
    pytest.param(None, torch.bfloat16, id="bfloat16"),
]


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_linear(
    outs: int, cols: int, dtype: torch.dtype, rows: int, weight_format: Format = None
) -> tuple[Tensor | GroupedWeight, Tensor, Tensor]:
    """Return a weight, a bias [N] and inputs [T, K]. Grouped weights have random codes and scales."""
    generator = torch.Generator().manual_seed(outs + cols)
    weight: Tensor | GroupedWeight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    if isinstance(weight_format, GroupFormat):
        low, high = (0, 16) if weight_format.bits == 4 else (-128, 128)
        values = torch.randint(low, high, (outs, cols), generator=generator, dtype=torch.int16)
        scales = torch.rand(outs, -(-cols // weight_format.group_size), generator=generator)
        offsets = torch.randn(scales.shape, generator=generator)
        weight = GroupedWeight(
            weight_format,
            values.to(torch.uint8 if weight_format.bits == 4 else torch.int8),
            scales,
            offsets if weight_format.has_offsets else None,
        )
    bias, x = torch.randn(outs, generator=generator), torch.randn(rows, cols, generator=generator)
    return (
        weight if isinstance(weight, GroupedWeight) else weight.to(dtype),
        bias.to(dtype),
        x.to(dtype),
    )


def create_linear(
    weight: Tensor | GroupedWeight, bias: Tensor | None, weight_format: Format, threads: int = 2
) -> Linear:
    device = create_cpu_device(threads)
    if not isinstance(weight, GroupedWeight):
        assert not isinstance(weight_format, GroupFormat)
        return device.create_linear(weight, bias, weight_format)
    outs, cols = weight.values.shape
    source = GroupedSource(weight.format, (outs, cols), lambda: weight)
    return device.create_group_linear(source, bias, pack_in_memory)


def exact_product(weight: Tensor | GroupedWeight, bias: Tensor, x: Tensor) -> Tensor:
    dense = weight.dequantize() if isinstance(weight, GroupedWeight) else weight
    return x.double() @ dense.double().T + bias.double()


def relative_error(out: Tensor, exact: Tensor) -> float:
    return float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def assert_batches_give(
    linears: Sequence[Linear], x: Tensor, expected: Tensor, batches: Sequence[int]
) -> None:
    """Check that rows have the expected bits in batches of many sizes from both ends of x."""
    for linear in linears:
        for rows in batches:
            assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows"
            assert torch.equal(linear(x[len(x) - rows :]), expected[len(x) - rows :])


def assert_rows_are_independent(shape: tuple[int, int], dtype: torch.dtype, rows: int) -> None:
    """Check that rows are accurate, and equal in every batch and with any number of threads."""
    weight, bias, x = random_linear(*shape, dtype, rows)
    linears = [create_linear(weight, bias, None, threads) for threads in (1, 3)]
    expected = linears[0](x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    exact = exact_product(weight, bias, x)
    torch.testing.assert_close(expected.double(), exact, atol=tolerance, rtol=tolerance)
    assert expected.dtype == dtype
    assert_batches_give(linears, x, expected, [each for each in BATCHES if each <= rows])


# Unusual sizes, long sums, and layers of the bundled model and of models with 0.5 and 1.7 billion parameters.
LARGE = [(4096, 320), (1152, 896), (4864, 896), (896, 4864), (2048, 6144)]


@pairwise(
    shape=[
        *((320, 896), (97, 70), (17, 33), (64, 1500)),
        *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in LARGE),
    ],
    dtype=DTYPES,
    isa=ISAS,
    indirect=["isa"],
)
def test_batch_and_threads_do_not_change_row_bits(
    shape: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    assert_rows_are_independent(shape, dtype, max(BATCHES))


def test_bfloat16_without_avx512_and_compiler_uses_torch() -> None:
    """On such CPUs oneDNN does not support bfloat16."""
    code = f"from {__name__} import *; assert_rows_are_independent((97, 70), torch.bfloat16, 17)"
    cpu = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ARGOSY_CPU_ISA": "torch"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | cpu)


@pytest.mark.parametrize("shape", [(100, 600), (4096, 320)], ids=str)
def test_long_batch_and_threads_do_not_change_row_bits(shape: tuple[int, int]) -> None:
    """Threads divide the work into chunks, blocks and steps, whose boundaries must not affect results."""
    weight, bias, x = random_linear(*shape, torch.bfloat16, 800)
    linears = [create_linear(weight, bias, None, threads) for threads in (1, 2, 5)]
    outputs = [linear(x) for linear in linears]
    assert all(torch.equal(expected, outputs[0]) for expected in outputs)
    for row in (0, 31, 255, 256, 265, 266, 300, 511, 512, 532, 799):
        assert torch.equal(linears[0](x[row : row + 1]), outputs[0][row : row + 1])


@cache
def int_reference(shape: tuple[int, int], dtype: torch.dtype, weight_format: IntFormat) -> Tensor:
    """Compute the result that torch's operations define."""
    weight, bias, x = random_linear(*shape, dtype, max(INT_BATCHES))
    assert isinstance(weight, Tensor)
    out = torch_int_linear(weight, bias, weight_format)(x)
    rounding = 0.0 if dtype == torch.float32 else 0.01
    assert relative_error(out, exact_product(weight, bias, x)) < NOISE[weight_format] + rounding
    assert out.dtype == dtype
    return out


@pairwise(
    weight_format=["int8", "int4"],
    shape=[(896, 896), (100, 70), (17, 33), (33, 320), (64, 256), (1, 1), (130, 1000)],
    dtype=DTYPES,
    isa=ISAS,
    indirect=["isa"],
)
def test_int_weights_give_same_bits_on_every_isa_and_in_every_batch(
    weight_format: IntFormat, shape: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    weight, bias, x = random_linear(*shape, dtype, max(INT_BATCHES))
    linears = [create_linear(weight, bias, weight_format, threads) for threads in (1, 3)]
    assert_batches_give(linears, x, int_reference(shape, dtype, weight_format), INT_BATCHES)


@pairwise(
    bits=[4, 8],
    group_size=GROUP_SIZES,
    has_offsets=[False, True],
    shape=[(100, 96), (33, 320), (64, 256), (1, 16), (130, 500)],
    dtype=DTYPES,
    isa=ISAS,
    indirect=["isa"],
)
def test_grouped_weights_give_same_bits_on_every_isa_and_in_every_batch(
    bits: int,
    group_size: int,
    has_offsets: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    isa: str,
) -> None:
    group_format = GroupFormat(bits, group_size, has_offsets, SIGNED_TABLE)
    weight, bias, x = random_linear(*shape, dtype, max(GROUP_BATCHES), group_format)
    assert isinstance(weight, GroupedWeight)
    expected = torch_group_linear(weight, bias)(x)
    assert relative_error(expected, exact_product(weight, bias, x)) < 0.02  # inputs of 8 bits
    linears = [create_linear(weight, bias, group_format, threads) for threads in (1, 3)]
    assert_batches_give(linears, x, expected, GROUP_BATCHES)


@pytest.mark.parametrize(("weight_format", "dtype"), FORMATS)
def test_inputs_may_be_strided_or_empty_and_the_bias_absent(
    weight_format: Format, dtype: torch.dtype, isa: str
) -> None:
    weight, bias, x = random_linear(64, 96, dtype, 20, weight_format)
    linear = create_linear(weight, bias, weight_format)
    wide = torch.zeros(20, 200, dtype=dtype)
    wide[:, 50:146] = x
    assert torch.equal(linear(wide[:, 50:146]), linear(x))
    assert linear(x.T.contiguous().T).equal(linear(x))
    assert linear(x[:0]).shape == (0, 64)
    without, zero = (
        create_linear(weight, each, weight_format) for each in (None, torch.zeros_like(bias))
    )
    assert torch.equal(without(x), zero(x))


@pytest.mark.parametrize("weight_format", QUANTIZED, ids=str)
def test_non_finite_and_zero_inputs_affect_own_row_only(weight_format: Format, isa: str) -> None:
    weight, bias, x = random_linear(100, 600, torch.float32, 40, weight_format)
    linear = create_linear(weight, bias, weight_format)
    clean = linear(x)
    non_finite = {7: float("nan"), 8: float("inf"), 9: float("-inf")}
    for row, value in non_finite.items():
        x[row, 599] = value
    x[0], x[1] = 0.0, 1e-38
    out = linear(x)
    assert out[[*non_finite]].isnan().all()
    assert torch.equal(out[:2], bias.expand(2, -1))
    others = [row for row in range(2, 40) if row not in non_finite]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("weight_format", QUANTIZED, ids=str)
def test_float16_is_accepted(weight_format: Format) -> None:
    weight, bias, x = random_linear(64, 96, torch.float16, 5, weight_format)
    out = create_linear(weight, bias, weight_format)(x)
    assert out.dtype == torch.float16
    assert relative_error(out, exact_product(weight, bias, x)) < NOISE["int4"]


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_outlier_affects_accuracy_of_its_chunk_only(weight_format: IntFormat) -> None:
    """Real models have single inputs that are a thousand times larger than the others."""
    weight, bias, x = random_linear(256, 1024, torch.float32, 8)
    assert isinstance(weight, Tensor)
    x[:, 300], weight[:, 300] = 1000.0, 0.0
    exact = exact_product(weight, bias, x)
    out = create_linear(weight, bias, weight_format)(x)
    assert (out - exact).square().mean().sqrt() < 0.6 * exact.std()


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_zero_weights_give_zero_and_non_finite_ones_are_rejected(
    weight_format: IntFormat, isa: str
) -> None:
    bias, x = torch.randn(64), torch.randn(3, 300)
    weight = torch.zeros(64, 300)
    assert torch.equal(create_linear(weight, bias, weight_format)(x), bias.expand(3, -1))
    weight[33, 2] = float("inf")
    with pytest.raises(ValueError, match="damaged, fetch it again"):
        create_linear(weight, None, weight_format)


@pytest.mark.parametrize(
    ("stored", "cols", "size"),
    [(32, 64, 32), (128, 256, 128), (96, 192, 32), (64, 64, 256), (512, 1024, 256), (24, 48, None)],
)
def test_group_size_of_kernels_divides_the_stored_one(
    stored: int, cols: int, size: int | None
) -> None:
    assert choose_group_size(stored, cols) == size
