"""Linear layers with grouped weights: equal bits on every instruction set and in every batch, and accuracy."""

from __future__ import annotations

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

SHAPES = [(100, 96), (33, 320), (64, 256), (1, 16), (130, 500)]
BATCHES = (1, 2, 3, 5, 9, 70)
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


def create_linear(
    weight: GroupedWeight, bias: Tensor, threads: int = 1
) -> Callable[[Tensor], Tensor]:
    before = torch.get_num_threads()
    outs, cols = weight.values.shape
    source = GroupedSource(weight.format, (outs, cols), lambda: weight)
    linear = create_cpu_device(threads).create_group_linear(source, bias, pack_in_memory)
    torch.set_num_threads(before)
    return linear


@pairwise(
    bits=[4, 8],
    group_size=GROUP_SIZES,
    has_offsets=[False, True],
    shape=SHAPES,
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
    x = torch.randn(max(BATCHES), shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = TorchGroupLinear(weight, bias)(x)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    error = (expected - exact).square().mean().sqrt()
    assert error < 0.02 * exact.square().mean().sqrt()  # bfloat16, and inputs of 8 bits
    for threads in (1, 3):
        linear = create_linear(weight, bias, threads)
        for rows in BATCHES:
            assert torch.equal(linear(x[:rows]), expected[:rows]), f"{rows} rows on {isa}"
            assert torch.equal(linear(x[-rows:]), expected[-rows:])


def test_non_finite_and_zero_inputs_affect_own_row_only(isa: str) -> None:
    weight = random_weight((40, 320), GroupFormat(4, 64, has_offsets=True))
    bias, x = torch.randn(40), torch.randn(20, 320)
    linear = create_linear(weight, bias)
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
