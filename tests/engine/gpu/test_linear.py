"""Linear layers on the GPU: agreement with torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from argosy.engine.execution.kernels.gpu.linear import (
    TILES,
    LinearFormat,
    create_gpu_linear,
    quantize_float8_rows,
)
from tests.engine.gpu.device import DEVICE
from tests.engine.pairwise import pairwise
from tests.engine.test_linear import assert_batches_give

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
FORMATS: tuple[LinearFormat, ...] = ("plain", "float8")


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1 / 128 if actual.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pairwise(
    shape=[(1, 64, 64), (5, 200, 70), (17, 33, 130), (140, 128, 96)],
    biased=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_plain_weights_match_torch(
    shape: tuple[int, int, int], biased: bool, dtype: torch.dtype
) -> None:
    tokens, cols, outs = shape
    x, weight = random_tensor(tokens, cols, dtype=dtype), random_tensor(outs, cols, dtype=dtype)
    bias = random_tensor(outs, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert_close(create_gpu_linear(weight, bias)(x), expected)


@pytest.mark.parametrize(
    ("tokens", "cols", "outs", "biased"),
    [(1, 128, 64, False), (5, 200, 70, True), (17, 33, 130, True), (70, 300, 96, False)],
)
def test_float8_weights_match_product_of_rounded_operands(
    tokens: int, cols: int, outs: int, biased: bool
) -> None:
    x, weight = random_tensor(tokens, cols), random_tensor(outs, cols)
    bias = random_tensor(outs) if biased else None
    (left, left_scales), (right, right_scales) = (
        quantize_float8_rows(x),
        quantize_float8_rows(weight),
    )
    expected = left.double() * left_scales[:, None] @ (right.double() * right_scales[:, None]).T
    expected += 0.0 if bias is None else bias.double()
    actual = create_gpu_linear(weight, bias, "float8")(x)
    assert actual.dtype == x.dtype
    assert_close(actual, expected)


def test_float8_rows_use_full_range() -> None:
    x = random_tensor(5, 200) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0], device=DEVICE)[:, None]
    narrow, scales = quantize_float8_rows(x)
    assert narrow.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0]
    torch.testing.assert_close(
        narrow.float() * scales[:, None], x.float(), rtol=1 / 16, atol=float(scales.max()) / 256
    )


@pytest.mark.parametrize("linear_format", FORMATS)
def test_batch_does_not_change_row_bits(linear_format: LinearFormat) -> None:
    x, weight = random_tensor(140, 330), random_tensor(150, 330)
    linear = create_gpu_linear(weight, random_tensor(150), linear_format)
    assert_batches_give([linear], x, linear(x), (1, 17, 33, 70))


@pytest.mark.parametrize("linear_format", FORMATS)
def test_tile_does_not_change_bits(
    linear_format: LinearFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of a wide layer uses other tiles than decode of a narrow layer."""
    x, weight = random_tensor(130, 130), random_tensor(130, 130)
    linear = create_gpu_linear(weight, None, linear_format)
    full = linear(x)
    for tile in TILES:
        monkeypatch.setattr(
            "argosy.engine.execution.kernels.gpu.linear._tile", lambda *_, tile=tile: tile
        )
        assert torch.equal(linear(x), full)


def test_strided_rows_give_same_bits() -> None:
    padded, weight = random_tensor(9, 3, 64), random_tensor(40, 64)
    linear = create_gpu_linear(weight, None)
    assert torch.equal(linear(padded[:, 1]), linear(padded[:, 1].contiguous()))
    assert linear(padded[:0, 1]).shape == (0, 40)


@pytest.mark.parametrize("linear_format", FORMATS)
def test_non_finite_input_affects_own_row_only(linear_format: LinearFormat) -> None:
    x, weight = random_tensor(9, 200), random_tensor(40, 200)
    linear = create_gpu_linear(weight, None, linear_format)
    clean = linear(x)
    x[3, 7], x[5, 0] = torch.nan, torch.inf
    with_value = linear(x)
    for row in range(9):
        if row in {3, 5}:
            assert not with_value[row].isfinite().any()
        else:
            assert torch.equal(with_value[row], clean[row])
