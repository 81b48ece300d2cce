"""The CUDA runtime: captured graphs, events, pinned copies and memory, none of which the interpreter has."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.gpu.device import GpuDevice, create_cuda_device
from tests.engine.gpu.device import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="no GPU is visible")


@pytest.fixture(scope="module")
def device() -> Device:
    return create_cuda_device()


def test_graph_computes_with_the_inputs_of_each_replay(device: Device) -> None:
    x = torch.ones(64, 64, device=device.torch_device)
    out = torch.empty_like(x)

    def work() -> None:
        torch.mm(x, x, out=out)

    work()
    assert device.capture_graph is not None
    replay = device.capture_graph(work)
    for value in (2.0, 3.0):
        device.to_device(torch.full((64, 64), value), x)
        replay()
        copy = device.to_host(out)
        device.record_event().synchronize()
        assert bool((copy == 64 * value * value).all())


def test_events_measure_the_work_between_them(device: Device) -> None:
    x = torch.randn(2048, 2048, device=device.torch_device)
    x @ x
    events = [device.record_event()]
    for products in (1, 50):
        for _ in range(products):
            x @ x
        events.append(device.record_event())
    events[-1].synchronize()
    assert 0 < events[1].seconds_since(events[0]) < events[2].seconds_since(events[1])


def test_pinned_copies_keep_all_bytes(device: Device) -> None:
    host = [
        torch.randn(1 << 20) for _ in range(8)
    ]  # pinned memory is reused only when a copy is done
    copies = [device.to_host(each) for each in [device.to_device(each) for each in host]]
    device.record_event().synchronize()
    assert all(map(torch.equal, copies, host))
    assert all(copy.is_pinned() for copy in copies)


def test_free_memory_falls_by_what_is_allocated(device: Device) -> None:
    before = device.free_bytes()
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device.torch_device)
    assert before - device.free_bytes() >= held.nbytes


def test_measured_memory_includes_graphs(device: Device) -> None:
    assert isinstance(device, GpuDevice)
    assert device.capture_graph is not None
    x = torch.ones(4 << 20, device=device.torch_device)

    def work() -> None:
        (x + 1).sum()

    work()
    assert device.measure_peak_bytes(partial(device.capture_graph, work)) >= x.nbytes
    assert device.measure_peak_bytes(lambda: None) < x.nbytes
