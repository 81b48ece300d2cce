"""Norms and gates: native beside torch, and each row's bits its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
import torch

from argosy.engine.execution.elementwise_cpu import (
    ElementwiseOps,
    NativeElementwiseOps,
    TorchElementwiseOps,
    create_cpu_elementwise_ops,
)
from argosy.engine.execution.model_architecture import Activation, NormKind
from argosy.engine.execution.native_kernels import load_kernels
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (320, 128, 70, 16, 7)
DTYPES = (torch.float32, torch.bfloat16)
# One unit in the last place of bfloat16 is 2^-8 of the value; float32 differs by its order of sums.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 128}


def native(threads: int = 2) -> NativeElementwiseOps:
    try:
        return NativeElementwiseOps(load_kernels(), threads)
    except NativeUnavailableError:
        pytest.skip("no compiler")


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", get_args(NormKind))
def test_norms_agree_with_torch(kind: NormKind, size: int, dtype: torch.dtype) -> None:
    weight, x, mixed = (drawn(n, size, dtype=dtype) for n in (1, 9, 10))
    mixed = mixed[:9]
    ours, theirs = (
        ops.create_norm(kind, weight[0], 1e-6) for ops in (native(), TorchElementwiseOps())
    )
    close(ours(x), theirs(x))
    into, reference = x.clone(), x.clone()
    close(ours.add_and_norm(into, mixed), theirs.add_and_norm(reference, mixed))
    assert torch.equal(into, reference)
    assert torch.equal(ours.add_and_norm(x.clone(), mixed), ours(into))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_over_heads_takes_a_part_of_wider_rows(size: int, dtype: torch.dtype) -> None:
    weight, wide = drawn(size, dtype=dtype), drawn(5, 6, size, dtype=dtype)
    ours, theirs = (
        ops.create_norm("narrow", weight, 1e-5) for ops in (native(), TorchElementwiseOps())
    )
    close(ours(wide[:, 1:4]), theirs(wide[:, 1:4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_agree_with_torch(activation: Activation, size: int, dtype: torch.dtype) -> None:
    x = drawn(40, 2 * size, dtype=dtype)
    x[0, :size], x[1, :size], x[2, :size] = -1e4, 1e4, 0.0
    ours, theirs = (
        ops.create_gated_activation(activation)(x) for ops in (native(), TorchElementwiseOps())
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=TOLERANCE[dtype])
    x[3, 0] = torch.nan
    assert native().create_gated_activation(activation)(x)[3, 0].isnan()


def every_op(
    ops: ElementwiseOps, size: int, dtype: torch.dtype
) -> list[Callable[..., torch.Tensor]]:
    """Functions of (x [T, 2 * size], first row) for each operation."""
    norms = [ops.create_norm(kind, drawn(size, dtype=dtype), 1e-6) for kind in get_args(NormKind)]
    return [
        *(lambda x, _, norm=norm: norm(x[:, :size].contiguous()) for norm in norms),
        *(
            lambda x, _, act=act: ops.create_gated_activation(act)(x)
            for act in get_args(Activation)
        ),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [320, 70])
@pytest.mark.parametrize("path", ["native", "torch"])
def test_a_row_has_the_same_bits_in_any_batch(path: str, size: int, dtype: torch.dtype) -> None:
    x = drawn(1000, 2 * size, dtype=dtype)
    for op in every_op(native() if path == "native" else TorchElementwiseOps(), size, dtype):
        whole = op(x, 0)
        for first, last in ((0, 1), (1, 4), (31, 64), (300, 500), (999, 1000)):
            assert torch.equal(op(x[first:last], first), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_a_row(dtype: torch.dtype) -> None:
    x = drawn(500, 640, dtype=dtype)
    ways = zip(*(every_op(native(threads), 320, dtype) for threads in (1, 2, 5)), strict=True)
    for one, two, five in ways:
        assert torch.equal(one(x, 0), two(x, 0))
        assert torch.equal(one(x, 0), five(x, 0))


def test_no_rows_give_no_rows() -> None:
    ops = native()
    assert ops.create_gated_activation("silu")(torch.empty(0, 64)).shape == (0, 32)
    assert ops.create_norm("narrow", torch.ones(64), 1e-6)(torch.empty(0, 64)).shape == (0, 64)


def test_a_dtype_without_a_kernel_takes_torch() -> None:
    ops, x = native(), drawn(3, 64, dtype=torch.float64)
    assert torch.equal(
        ops.create_gated_activation("silu")(x),
        TorchElementwiseOps().create_gated_activation("silu")(x),
    )
    weight = torch.ones(64, dtype=torch.float64)
    assert ops.create_norm("wide", weight, 1e-6)(x).dtype == torch.float64


def test_without_a_compiler_torch_does_it() -> None:
    def refuse() -> None:
        raise NativeUnavailableError("no compiler")

    assert isinstance(create_cpu_elementwise_ops(2, refuse), TorchElementwiseOps)  # type: ignore[arg-type]
