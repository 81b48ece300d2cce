"""Norms and gated activations on the CPU: native against torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.cpu.native_kernels import load_kernels
from argosy.engine.execution.kernels.cpu.operations import (
    NativeElementwiseOps,
    create_cpu_elementwise_ops,
)
from argosy.engine.execution.kernels.operations import ElementwiseOps
from argosy.engine.execution.kernels.torch.operations import TorchElementwiseOps
from argosy.native import NativeUnavailableError
from tests.engine.pairwise import pairwise

SIZES = (320, 128, 70, 16, 7)
DTYPES = (torch.float32, torch.bfloat16)
# The last bit of bfloat16 is 2^-8 of the value. float32 results differ by the order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 128}


def native_ops(threads: int = 2) -> NativeElementwiseOps:
    try:
        return NativeElementwiseOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def random_tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pairwise(kind=get_args(NormKind), size=SIZES, dtype=DTYPES)
def test_norm_matches_torch(kind: NormKind, size: int, dtype: torch.dtype) -> None:
    weight, x, delta = (random_tensor(n, size, dtype=dtype) for n in (1, 9, 10))
    delta = delta[:9]
    actual, expected = (
        ops.create_norm(kind, weight[0], 1e-6) for ops in (native_ops(), TorchElementwiseOps())
    )
    assert_close(actual(x), expected(x))
    summed, reference = x.clone(), x.clone()
    assert_close(actual.add_and_norm(summed, delta), expected.add_and_norm(reference, delta))
    assert torch.equal(summed, reference)
    assert torch.equal(actual.add_and_norm(x.clone(), delta), actual(summed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_head_norm_accepts_slice_of_wider_rows(size: int, dtype: torch.dtype) -> None:
    weight, rows = random_tensor(size, dtype=dtype), random_tensor(5, 6, size, dtype=dtype)
    actual, expected = (
        ops.create_norm("narrow", weight, 1e-5) for ops in (native_ops(), TorchElementwiseOps())
    )
    assert_close(actual(rows[:, 1:4]), expected(rows[:, 1:4]))


@pairwise(activation=get_args(Activation), size=SIZES, dtype=DTYPES)
def test_gated_activation_matches_torch(
    activation: Activation, size: int, dtype: torch.dtype
) -> None:
    x = random_tensor(40, 2 * size, dtype=dtype)
    x[0, :size], x[1, :size], x[2, :size] = -1e4, 1e4, 0.0
    actual, expected = (
        ops.create_gated_activation(activation)(x) for ops in (native_ops(), TorchElementwiseOps())
    )
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=TOLERANCE[dtype])
    x[3, 0] = torch.nan
    assert native_ops().create_gated_activation(activation)(x)[3, 0].isnan()


def create_all_ops(
    ops: ElementwiseOps, size: int, dtype: torch.dtype
) -> list[Callable[..., torch.Tensor]]:
    """Return a function of x [T, 2 * size] for each operation."""
    norms = [
        ops.create_norm(kind, random_tensor(size, dtype=dtype), 1e-6) for kind in get_args(NormKind)
    ]
    return [
        *(lambda x, norm=norm: norm(x[:, :size].contiguous()) for norm in norms),
        *(lambda x, act=act: ops.create_gated_activation(act)(x) for act in get_args(Activation)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [320, 70])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batch_does_not_change_row_bits(backend: str, size: int, dtype: torch.dtype) -> None:
    x = random_tensor(1000, 2 * size, dtype=dtype)
    for op in create_all_ops(
        native_ops() if backend == "native" else TorchElementwiseOps(), size, dtype
    ):
        full = op(x)
        for first, last in ((0, 1), (1, 4), (31, 64), (300, 500), (999, 1000)):
            assert torch.equal(op(x[first:last]), full[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_does_not_change_bits(dtype: torch.dtype) -> None:
    x = random_tensor(500, 640, dtype=dtype)
    ops_by_threads = [create_all_ops(native_ops(threads), 320, dtype) for threads in (1, 2, 5)]
    for one_thread, two_threads, five_threads in zip(*ops_by_threads, strict=True):
        assert torch.equal(one_thread(x), two_threads(x))
        assert torch.equal(one_thread(x), five_threads(x))


def test_empty_input_gives_empty_output() -> None:
    ops = native_ops()
    assert ops.create_gated_activation("silu")(torch.empty(0, 64)).shape == (0, 32)
    assert ops.create_norm("narrow", torch.ones(64), 1e-6)(torch.empty(0, 64)).shape == (0, 64)


def test_dtype_without_kernel_uses_torch() -> None:
    ops, x = native_ops(), random_tensor(3, 64, dtype=torch.float64)
    assert torch.equal(
        ops.create_gated_activation("silu")(x),
        TorchElementwiseOps().create_gated_activation("silu")(x),
    )
    weight = torch.ones(64, dtype=torch.float64)
    assert ops.create_norm("wide", weight, 1e-6)(x).dtype == torch.float64


def test_missing_compiler_falls_back_to_torch() -> None:
    def fail_to_load() -> None:
        raise NativeUnavailableError("no compiler")

    assert isinstance(create_cpu_elementwise_ops(2, fail_to_load), TorchElementwiseOps)  # type: ignore[arg-type]
