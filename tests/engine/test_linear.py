"""Linears on every path: right, and each row's bits its own, whatever the batch, the place and the threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from argosy.engine.execution.device import create_cpu_device

BATCHES = (1, 2, 3, 6, 7, 13, 14, 15, 16, 17, 29, 31, 32, 33, 47, 64, 65, 128, 200, 259)


def made(outs: int, cols: int, dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(outs + cols)
    weight = torch.randn(outs, cols, generator=generator) * cols**-0.5
    bias = torch.randn(outs, generator=generator)
    x = torch.randn(rows, cols, generator=generator)
    return weight.to(dtype), bias.to(dtype), x.to(dtype)


def assert_right(
    out: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor
) -> None:
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)
    assert out.dtype == x.dtype


def assert_own_bits(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> None:
    """Rows are right, and the same in batches of many sizes, at both ends of the whole."""
    linear = create_cpu_device(2).create_linear(weight, bias)
    whole = linear(x)
    assert_right(whole, weight, bias, x)
    for rows in BATCHES:
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[len(x) - rows :]), whole[len(x) - rows :])


# The bundled model's, then those of models of 0.5 and 1.7 billion parameters, then odd ones.
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", LINEARS, ids=[f"{n}x{k}" for n, k in LINEARS])
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_own_bits(*made(*shape, dtype, max(BATCHES)))


@pytest.mark.parametrize("shape", [(320, 896), (97, 70), (64, 1500)], ids=str)
def test_a_row_has_the_same_bits_on_every_path(path: str, shape: tuple[int, int]) -> None:
    assert_own_bits(*made(*shape, torch.bfloat16, max(BATCHES)))


def test_a_cpu_without_avx512_needs_no_compiler() -> None:
    """There oneDNN has no bfloat16."""
    code = f"from {__name__} import *; assert_own_bits(*made(97, 70, torch.bfloat16, 32))"
    cpu = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ARGOSY_CPU_ISA": "torch"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | cpu)


@pytest.mark.parametrize("shape", [(100, 600), (4096, 320)], ids=str)
def test_a_long_batch_has_the_bits_of_its_rows(shape: tuple[int, int]) -> None:
    """Rows are worked on in chunks, blocks and steps by threads: none of their edges may show."""
    weight, bias, x = made(*shape, torch.bfloat16, 800)
    linears = [create_cpu_device(threads).create_linear(weight, bias) for threads in (1, 2, 5)]
    wholes = [linear(x) for linear in linears]
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    for row in (0, 31, 255, 256, 265, 266, 300, 511, 512, 532, 799):
        assert torch.equal(linears[0](x[row : row + 1]), wholes[0][row : row + 1])


def test_threads_do_not_change_a_linear(path: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias, x = made(896, 896, dtype, 40)
        one, three = (create_cpu_device(n).create_linear(weight, bias)(x) for n in (1, 3))
        assert torch.equal(one, three)


def test_a_linear_without_bias_adds_none(path: str) -> None:
    weight, bias, x = made(100, 64, torch.bfloat16, 20)
    without = create_cpu_device(1).create_linear(weight, None)(x)
    assert torch.equal(
        without, create_cpu_device(1).create_linear(weight, torch.zeros_like(bias))(x)
    )


def test_a_linear_of_no_rows_is_empty(path: str) -> None:
    weight, bias, _ = made(64, 32, torch.bfloat16, 1)
    empty = create_cpu_device(1).create_linear(weight, bias)(
        torch.empty(0, 32, dtype=torch.bfloat16)
    )
    assert empty.shape == (0, 64)


def test_a_linear_takes_rows_that_lie_apart(path: str) -> None:
    weight, bias, x = made(64, 96, torch.bfloat16, 20)
    linear = create_cpu_device(2).create_linear(weight, bias)
    wide = torch.zeros(20, 200, dtype=torch.bfloat16)
    wide[:, 50:146] = x
    assert torch.equal(linear(wide[:, 50:146]), linear(x))


@pytest.fixture(autouse=True)
def restored_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
