"""Norms and gated activations on the GPU: agreement with torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.kernels.torch.operations import TorchElementwiseOps
from tests.engine.pairwise import pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
SIZES = (2560, 1024, 320, 128, 70, 7)
DTYPES = (torch.float32, torch.bfloat16)
# The last bit of bfloat16 is 2^-8 of the value. float32 results differ by the order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 128}


def random_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pairwise(kind=get_args(NormKind), size=SIZES, dtype=DTYPES)
def test_norm_matches_torch(
    kind: NormKind, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random_tensor(size, dtype=dtype, device=device)
    x, delta = random_tensor(2, 9, size, dtype=dtype, device=device)
    actual, expected = (
        ops.create_norm(kind, weight, 1e-6)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    assert_close(actual(x), expected(x))
    summed, reference = x.clone(), x.clone()
    assert_close(actual.add_and_norm(summed, delta), expected.add_and_norm(reference, delta))
    assert torch.equal(summed, reference)
    assert torch.equal(actual.add_and_norm(x.clone(), delta), actual(summed))


@pytest.mark.parametrize("size", SIZES)
def test_head_norm_accepts_slice_of_wider_rows(size: int, device: torch.device) -> None:
    weight = random_tensor(size, dtype=torch.bfloat16, device=device)
    rows = random_tensor(5, 6, size, dtype=torch.bfloat16, device=device)
    actual, expected = (
        ops.create_norm("narrow", weight, 1e-5)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    assert_close(actual(rows[:, 1:4]), expected(rows[:, 1:4]))


@pairwise(activation=get_args(Activation), size=SIZES, dtype=DTYPES)
def test_gated_activation_matches_torch(
    activation: Activation, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = random_tensor(5, 2 * size, dtype=dtype, device=device)
    x[0, :size], x[1, :size], x[2, :size] = -1e4, 1e4, 0.0
    actual, expected = (
        ops.create_gated_activation(activation)(x)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=TOLERANCE[dtype])
    x[3, 0] = torch.nan
    assert TritonElementwiseOps().create_gated_activation(activation)(x)[3, 0].isnan()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (320, torch.float32),
        (70, torch.bfloat16),
        pytest.param(320, torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(70, torch.float32, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_batch_does_not_change_row_bits(
    size: int, dtype: torch.dtype, device: torch.device
) -> None:
    ops, x = TritonElementwiseOps(), random_tensor(70, 2 * size, dtype=dtype, device=device)
    weight = random_tensor(2 * size, dtype=dtype, device=device)
    ops_to_check: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(ops.create_norm(kind, weight, 1e-6) for kind in get_args(NormKind)),
        *(ops.create_gated_activation(activation) for activation in get_args(Activation)),
    ]
    for op in ops_to_check:
        full = op(x)
        for first, last in ((0, 1), (1, 4), (31, 64), (69, 70)):
            assert torch.equal(op(x[first:last]), full[first:last])


def test_empty_input_gives_empty_output(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert TritonElementwiseOps().create_gated_activation("silu")(empty).shape == (0, 32)
    weight = torch.ones(64, device=device)
    assert TritonElementwiseOps().create_norm("narrow", weight, 1e-6)(empty).shape == (0, 64)
