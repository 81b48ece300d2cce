"""Norms and gates of the GPU beside torch's, and each row's bits its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
import torch

from argosy.engine.execution.elementwise_cpu import TorchElementwiseOps
from argosy.engine.execution.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.model_architecture import Activation, NormKind

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy plays the GPU here
SIZES = (2560, 1024, 320, 128, 70, 7)
DTYPES = (torch.float32, torch.bfloat16)
# One unit in the last place of bfloat16 is 2^-8 of the value; float32 differs by its order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 128}


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", get_args(NormKind))
def test_norms_agree_with_torch(
    kind: NormKind, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = drawn(size, dtype=dtype, device=device)
    x, mixed = drawn(2, 9, size, dtype=dtype, device=device)
    ours, theirs = (
        ops.create_norm(kind, weight, 1e-6)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    close(ours(x), theirs(x))
    into, reference = x.clone(), x.clone()
    close(ours.add_and_norm(into, mixed), theirs.add_and_norm(reference, mixed))
    assert torch.equal(into, reference)
    assert torch.equal(ours.add_and_norm(x.clone(), mixed), ours(into))


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_over_heads_takes_a_part_of_wider_rows(size: int, device: torch.device) -> None:
    weight = drawn(size, dtype=torch.bfloat16, device=device)
    wide = drawn(5, 6, size, dtype=torch.bfloat16, device=device)
    ours, theirs = (
        ops.create_norm("narrow", weight, 1e-5)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    close(ours(wide[:, 1:4]), theirs(wide[:, 1:4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_agree_with_torch(
    activation: Activation, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = drawn(5, 2 * size, dtype=dtype, device=device)
    x[0, :size], x[1, :size], x[2, :size] = -1e4, 1e4, 0.0
    ours, theirs = (
        ops.create_gated_activation(activation)(x)
        for ops in (TritonElementwiseOps(), TorchElementwiseOps())
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=TOLERANCE[dtype])
    x[3, 0] = torch.nan
    assert TritonElementwiseOps().create_gated_activation(activation)(x)[3, 0].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [320, 70])
def test_a_row_has_the_same_bits_in_any_batch(
    size: int, dtype: torch.dtype, device: torch.device
) -> None:
    ops, x = TritonElementwiseOps(), drawn(70, 2 * size, dtype=dtype, device=device)
    weight = drawn(2 * size, dtype=dtype, device=device)
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(ops.create_norm(kind, weight, 1e-6) for kind in get_args(NormKind)),
        *(ops.create_gated_activation(activation) for activation in get_args(Activation)),
    ]
    for way in ways:
        whole = way(x)
        for first, last in ((0, 1), (1, 4), (31, 64), (69, 70)):
            assert torch.equal(way(x[first:last]), whole[first:last])


def test_no_rows_give_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert TritonElementwiseOps().create_gated_activation("silu")(empty).shape == (0, 32)
    weight = torch.ones(64, device=device)
    assert TritonElementwiseOps().create_norm("narrow", weight, 1e-6)(empty).shape == (0, 64)
