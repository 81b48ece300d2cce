"""Adapters of linear layers on the GPU: agreement with torch, and bits of a row that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.engine.execution.kernels.gpu.lora import GpuRowAdapters, create_gpu_adapter
from argosy.engine.execution.kernels.torch.lora import AdapterWeights, TorchRowAdapters
from tests.engine.adapter_updates import draw_updates
from tests.engine.gpu.device import DEVICE, INTERPRETED
from tests.engine.gpu.host_device import HostDevice

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy replaces the GPU here
    pytest.mark.skipif(not INTERPRETED, reason="the host device needs interpreted kernels"),
]
ROWS, OUTS = 40, 160
CASES = [
    # dtype, ranks of each module, columns, outputs of each run
    (torch.bfloat16, (1,), 33, ((0, 50),)),
    (torch.bfloat16, (8, 17), 64, ((0, 7), (7, 70))),
    (torch.float32, (5, 33), 31, ((0, 16), (40, 3), (43, 20))),
]


@pytest.mark.parametrize(("dtype", "ranks", "cols", "splits"), CASES, ids=str)
def test_rows_equal_those_of_torch_and_do_not_depend_on_others(
    dtype: torch.dtype, ranks: tuple[int, ...], cols: int, splits: tuple[tuple[int, int], ...]
) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    updates = draw_updates(generator, dtype, ranks, cols, splits, OUTS)
    adapters = [AdapterWeights({2: update}) for update in updates]
    x, before = draw(ROWS, 2 * cols).to(dtype)[:, ::2], draw(ROWS, OUTS).to(dtype)
    before[:, ::3] = -0.0  # to which a base row must not add 0
    rows, starts = torch.randperm(ROWS, generator=generator)[:23], torch.tensor([0, 18, 23])
    expected, actual = before.clone(), before.clone().to(DEVICE)
    TorchRowAdapters(adapters, rows, starts).update_linear(2, x, expected)
    device = HostDevice()
    packed = [create_gpu_adapter(adapter, 4, DEVICE) for adapter in adapters]
    row_adapters = GpuRowAdapters(device, packed, rows, starts)
    for number in (2, 3):  # the latter is changed by no adapter
        row_adapters.update_linear(number, x.to(DEVICE), actual)
    untouched = torch.ones(ROWS, OUTS, dtype=torch.bool)
    for number, segment in enumerate((rows[:18], rows[18:])):
        for run in updates[number].runs:
            untouched[segment, run.first : run.first + len(run.b)] = False
    assert actual[untouched].equal(before[untouched])
    assert actual[untouched].signbit().equal(before[untouched].signbit())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)
    for position in (0, 17, 20):  # the tile of one row is narrower
        alone, row = before.clone(), rows[position : position + 1]
        one = GpuRowAdapters(device, [packed[position >= 18]], row, torch.tensor([0, 1]))
        one.update_linear(2, x, alone)
        assert alone[row].equal(actual[row])
