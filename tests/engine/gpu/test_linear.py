"""Linears of the GPU: right beside torch, and each row's bits its own."""

from __future__ import annotations

import pytest
import torch

from argosy.engine.execution.gpu.linear import (
    TILES,
    LinearFormat,
    create_gpu_linear,
    quantize_float8_rows,
)
from tests.engine.gpu.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy plays the GPU here
FORMATS: tuple[LinearFormat, ...] = ("plain", "float8")


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1 / 128 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "cols", "outs"), [(1, 64, 64), (5, 200, 70), (17, 33, 130), (140, 128, 96)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_plain_weights_agree_with_torch(
    tokens: int, cols: int, outs: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight = drawn(tokens, cols, dtype=dtype), drawn(outs, cols, dtype=dtype)
    bias = drawn(outs, dtype=dtype) if biased else None
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    close(create_gpu_linear(weight, bias)(x), wanted)


@pytest.mark.parametrize(
    ("tokens", "cols", "outs"), [(1, 128, 64), (5, 200, 70), (17, 33, 130), (70, 300, 96)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_float8_weights_are_the_rounded_product(
    tokens: int, cols: int, outs: int, biased: bool
) -> None:
    x, weight = drawn(tokens, cols), drawn(outs, cols)
    bias = drawn(outs) if biased else None
    (left, left_scales), (right, right_scales) = (
        quantize_float8_rows(x),
        quantize_float8_rows(weight),
    )
    wanted = left.double() * left_scales[:, None] @ (right.double() * right_scales[:, None]).T
    wanted += 0.0 if bias is None else bias.double()
    found = create_gpu_linear(weight, bias, "float8")(x)
    assert found.dtype == x.dtype
    close(found, wanted)


def test_float8_rows_use_their_whole_range() -> None:
    x = drawn(5, 200) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0], device=DEVICE)[:, None]
    narrow, scales = quantize_float8_rows(x)
    assert narrow.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0]
    torch.testing.assert_close(
        narrow.float() * scales[:, None], x.float(), rtol=1 / 16, atol=float(scales.max()) / 256
    )


@pytest.mark.parametrize("linear_format", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch(linear_format: LinearFormat) -> None:
    x, weight = drawn(300, 330), drawn(150, 330)
    linear = create_gpu_linear(weight, drawn(150), linear_format)
    whole = linear(x)
    for first, last in ((0, 1), (3, 20), (31, 64), (100, 170), (299, 300)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


@pytest.mark.parametrize("linear_format", FORMATS)
def test_every_tile_gives_the_same_bits(
    linear_format: LinearFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of a wide layer takes other tiles than decode of a narrow one."""
    x, weight = drawn(130, 200), drawn(140, 200)
    linear = create_gpu_linear(weight, None, linear_format)
    whole = linear(x)
    for tile in TILES:
        monkeypatch.setattr("argosy.engine.execution.gpu.linear._tile", lambda *_, to=tile: to)
        assert torch.equal(linear(x), whole)


def test_rows_that_lie_apart_are_taken_as_they_are() -> None:
    wide, weight = drawn(9, 3, 64), drawn(40, 64)
    linear = create_gpu_linear(weight, None)
    assert torch.equal(linear(wide[:, 1]), linear(wide[:, 1].contiguous()))
    assert linear(wide[:0, 1]).shape == (0, 40)


@pytest.mark.parametrize("linear_format", FORMATS)
def test_a_row_that_is_not_finite_says_so_and_stays_alone(linear_format: LinearFormat) -> None:
    x, weight = drawn(9, 200), drawn(40, 200)
    linear = create_gpu_linear(weight, None, linear_format)
    clean = linear(x)
    x[3, 7], x[5, 0] = torch.nan, torch.inf
    sick = linear(x)
    for row in range(9):
        if row in {3, 5}:
            assert not sick[row].isfinite().any()
        else:
            assert torch.equal(sick[row], clean[row])
