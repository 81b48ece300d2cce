"""Norms and gated activations on the GPU: agreement with torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from argosy.engine.execution.architectures.decoder import Activation, NormKind
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from tests.engine.gpu.device import DEVICE
from tests.engine.pairwise import pairwise
from tests.engine.test_operations import (
    DTYPES,
    assert_gated_activation_matches_torch,
    assert_norm_matches_torch,
    assert_rows_are_independent,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
SIZES = (2560, 1024, 320, 128, 70, 7)


@pairwise(kind=get_args(NormKind), size=SIZES, dtype=DTYPES)
def test_norm_matches_torch(kind: NormKind, size: int, dtype: torch.dtype) -> None:
    assert_norm_matches_torch(TritonElementwiseOps(), kind, size, dtype, DEVICE)


@pairwise(activation=get_args(Activation), size=SIZES, dtype=DTYPES)
def test_gated_activation_matches_torch(
    activation: Activation, size: int, dtype: torch.dtype
) -> None:
    assert_gated_activation_matches_torch(
        TritonElementwiseOps(), activation, size, dtype, DEVICE, rows=5
    )


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (70, torch.bfloat16),
        pytest.param(320, torch.float32, marks=pytest.mark.exhaustive),
        pytest.param(320, torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(70, torch.float32, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_batch_does_not_change_row_bits(size: int, dtype: torch.dtype) -> None:
    assert_rows_are_independent(TritonElementwiseOps(), size, dtype, 70, DEVICE)
