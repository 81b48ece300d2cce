"""Linear layers and experts on the GPU: agreement with torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from argosy.engine.execution.architectures.decoder import MoeArchitecture, RoutingGroups
from argosy.engine.execution.checkpoint_formats.float_formats import FP4_DOUBLED
from argosy.engine.execution.checkpoint_formats.grouped_weight import GROUP_SIZES, GroupFormat
from argosy.engine.execution.kernels.cpu.linear import torch_group_linear
from argosy.engine.execution.kernels.gpu.elementwise import TritonElementwiseOps
from argosy.engine.execution.kernels.gpu.experts import (
    create_gpu_experts,
    create_gpu_head_linears,
    select_experts,
)
from argosy.engine.execution.kernels.gpu.linear import (
    TILES,
    GpuLinear,
    create_gpu_group_linear,
    create_gpu_linear,
    quantize_float8_rows,
)
from argosy.engine.execution.kernels.torch.operations import (
    select_experts as select_experts_by_torch,
)
from tests.engine.gpu.device import DEVICE
from tests.engine.pairwise import pairwise
from tests.engine.test_linear import (
    SIGNED_TABLE,
    assert_batches_give,
    random_linear,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy replaces the GPU here
Format = Literal["plain", "float8"] | GroupFormat
INT4 = GroupFormat(4, 32, has_offsets=True)
FORMATS: tuple[Format, ...] = ("plain", "float8", INT4)


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def create_linear(outs: int, cols: int, weight_format: Format, *, biased: bool = True) -> GpuLinear:
    """Create a layer with random weights of a format."""
    bias = random_tensor(outs) if biased else None
    if isinstance(weight_format, GroupFormat):
        weight, _, _ = random_linear(outs, cols, torch.bfloat16, 1, weight_format)
        assert not isinstance(weight, torch.Tensor)
        return create_gpu_group_linear(weight, bias, DEVICE)
    return create_gpu_linear(random_tensor(outs, cols), bias, float8=weight_format == "float8")


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
    actual = create_gpu_linear(weight, bias, float8=True)(x)
    assert actual.dtype == x.dtype
    assert_close(actual, expected)


def test_float8_rows_use_full_range() -> None:
    x = random_tensor(5, 200) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0], device=DEVICE)[:, None]
    narrow, scales = quantize_float8_rows(x)
    assert narrow.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0]
    torch.testing.assert_close(
        narrow.float() * scales[:, None], x.float(), rtol=1 / 16, atol=float(scales.max()) / 256
    )


@pairwise(
    bits=[4, 8],
    group_size=GROUP_SIZES,
    has_offsets=[False, True],
    table=[SIGNED_TABLE, tuple(range(-8, 8)), FP4_DOUBLED],
    shape=[(40, 96), (33, 70), (1, 16)],
    dtype=[torch.bfloat16, torch.float32, torch.float16],
)
def test_integers_give_bits_of_dequantized_weights(
    bits: int,
    group_size: int,
    has_offsets: bool,
    table: tuple[int, ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    weight, bias, x = random_linear(
        *shape, dtype, 5, GroupFormat(bits, group_size, has_offsets, table)
    )
    assert not isinstance(weight, torch.Tensor)
    on_gpu = bias.to(DEVICE), x.to(DEVICE)
    actual = create_gpu_group_linear(weight, on_gpu[0], DEVICE)(on_gpu[1])
    dense = create_gpu_linear(weight.dequantize().to(DEVICE, dtype), on_gpu[0])
    assert torch.equal(actual, dense(on_gpu[1]))
    on_cpu = torch_group_linear(weight, bias)(x)  # rounds its inputs to 8 bits
    assert relative_error(actual.cpu(), on_cpu.double()) < 0.02


@pytest.mark.parametrize("linear_format", FORMATS, ids=str)
def test_batch_does_not_change_row_bits(linear_format: Format) -> None:
    x = random_tensor(140, 130)
    linear = create_linear(70, 130, linear_format)
    assert_batches_give([linear], x, linear(x), (1, 17, 33, 70))


@pytest.mark.parametrize("linear_format", FORMATS, ids=str)
def test_tile_does_not_change_bits(linear_format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of a wide layer uses other tiles than decode of a narrow layer."""
    x = random_tensor(33, 70)
    linear = create_linear(70, 70, linear_format, biased=False)
    full = linear(x)
    for tile in (*TILES, (32, 16, 4, 8), (16, 128, 4, 4)):
        monkeypatch.setattr(
            "argosy.engine.execution.kernels.gpu.linear._tile", lambda *_, tile=tile: tile
        )
        assert torch.equal(linear(x), full)


def test_strided_rows_give_same_bits() -> None:
    padded, weight = random_tensor(9, 3, 64), random_tensor(40, 64)
    linear = create_gpu_linear(weight, None)
    assert torch.equal(linear(padded[:, 1]), linear(padded[:, 1].contiguous()))
    assert linear(padded[:0, 1]).shape == (0, 40)


@pytest.mark.parametrize("linear_format", FORMATS, ids=str)
def test_non_finite_input_affects_own_row_only(linear_format: Format) -> None:
    x, linear = random_tensor(9, 200), create_linear(40, 200, linear_format, biased=False)
    clean = linear(x)
    x[3, 7], x[5, 0] = torch.nan, torch.inf
    with_value = linear(x)
    for row in range(9):
        if row in {3, 5}:
            assert not with_value[row].isfinite().any()
        else:
            assert torch.equal(with_value[row], clean[row])


@pytest.mark.parametrize(
    ("linear_format", "counts"),
    [
        ("plain", (4, 5, 2)),  # rows, experts, experts of a row
        ("float8", (1, 3, 2)),
        (GroupFormat(4, 32, False, SIGNED_TABLE), (4, 3, 1)),
        pytest.param(INT4, (70, 2, 2), marks=pytest.mark.exhaustive),  # tiles of 64
        pytest.param("plain", (40, 200, 8), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_experts_give_bits_of_their_own_layers(
    linear_format: Format, counts: tuple[int, int, int]
) -> None:
    rows, num_experts, choices = counts
    gate_up = [create_linear(80, 40, linear_format) for _ in range(num_experts)]
    down = [create_linear(40, 40, linear_format, biased=False) for _ in range(num_experts)]
    for number, linear in enumerate(gate_up):
        assert linear.bias is not None
        linear.bias.add_(number)  # experts differ
    activation = TritonElementwiseOps().create_gated_activation("silu")
    x = random_tensor(rows, 40)
    x[0] = torch.nan
    weights, ids = random_tensor(rows, num_experts, dtype=torch.float32).topk(choices)
    actual = create_gpu_experts(gate_up, down, activation)(x, weights, ids)
    for row in range(rows):
        one = x[row : row + 1]
        outputs = [down[i](activation(gate_up[i](one))).float() for i in ids[row].tolist()]
        expected = outputs[0] * weights[row, 0]
        for output, weight in zip(outputs[1:], weights[row, 1:], strict=True):
            expected += output * weight
        assert torch.equal(actual[row], expected[0]) or (row == 0 and actual[0].isnan().all())


def test_heads_give_bits_of_their_own_layers() -> None:
    weights = list(random_tensor(3, 40, 70))
    x = random_tensor(5, 3, 90)[..., 20:]
    actual = create_gpu_head_linears(weights)(x)
    for head, weight in enumerate(weights):
        assert torch.equal(actual[:, head], create_gpu_linear(weight, None)(x[:, head]))
    assert create_gpu_head_linears(weights)(x[:0]).shape == (0, 3, 40)


def test_experts_of_several_formats_are_refused() -> None:
    linears = [create_linear(64, 64, each) for each in FORMATS]
    for experts in (linears, [lambda x: x]):
        with pytest.raises(ValueError, match="experts"):
            create_gpu_experts(experts, experts, torch.relu)


@pytest.mark.parametrize(
    ("experts", "count", "options"),
    [
        (5, 2, {}),
        (70, 4, {"normalize_weights": True, "round_weights": True}),
        (12, 3, {"scoring": "sigmoid", "weight_factor": 2.5, "groups": RoutingGroups(4, 2, 2)}),
        (6, 2, {"normalize_weights": True, "groups": RoutingGroups(3, 1, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_corrected", [False, True])
def test_experts_are_selected_as_by_torch(
    experts: int, count: int, options: dict[str, Any], is_corrected: bool
) -> None:
    fields = {"normalize_weights": False, "round_weights": False} | options
    architecture = MoeArchitecture(experts, count, 8, **fields)
    logits = random_tensor(9, experts, dtype=torch.float32)
    logits[3, 1] = torch.nan
    correction = random_tensor(experts, dtype=torch.float32) / 4 if is_corrected else None
    arguments = correction, architecture, torch.bfloat16
    weights, ids = select_experts(logits, *arguments)
    expected_weights, expected_ids = select_experts_by_torch(logits.clone(), *arguments)
    valid = [row for row in range(9) if row != 3]
    assert torch.equal(ids[valid], expected_ids[valid])
    tolerance = 2**-8 if architecture.round_weights else 1e-6
    torch.testing.assert_close(
        weights[valid], expected_weights[valid], rtol=tolerance, atol=tolerance
    )
    assert int(ids[3].max()) < experts
    alone = select_experts(logits[5:6], *arguments)
    assert torch.equal(alone[0], weights[5:6])
    assert torch.equal(alone[1], ids[5:6])


def test_equal_scores_select_the_first() -> None:
    """Scores of experts are often equal in bfloat16, and torch.topk defines no order of equal ones."""
    logits = random_tensor(9, 70, dtype=torch.float32).round()
    architecture = MoeArchitecture(70, 4, 8, normalize_weights=False, round_weights=False)
    _, ids = select_experts(logits, None, architecture, torch.bfloat16)
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :4])
