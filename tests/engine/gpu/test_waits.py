"""Launches, copies and waits of the host: what the recorder counts, and what sampling does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from argosy.engine.execution.executor.sampler import Sampler
from argosy.engine.scheduling import AdmittedSequence
from argosy.protocol import SamplingParams
from tests.engine.gpu.host_device import TORCH_DEVICE, HostDevice, record_work

Call = Callable[[HostDevice, Tensor], object]
"""Work on a device and a tensor [3] of it."""


def host_array(dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.array([1, 0, 1], dtype))


WORK: dict[str, tuple[Call, int, int, int]] = {
    "compute": (lambda _gpu, x: (x[1:] + 1).cumsum(0), 2, 0, 0),
    "allocate and view": (lambda _gpu, x: torch.empty_like(x)[None].expand(2, -1), 0, 0, 0),
    "host work": (lambda _gpu, _x: host_array().add(1).tolist(), 0, 0, 0),
    "to device": (lambda gpu, _x: gpu.to_device(host_array()).add_(1), 1, 1, 0),
    "to device, into a tensor": (lambda gpu, x: gpu.to_device(host_array(), x), 0, 1, 0),
    "to host": (lambda gpu, x: gpu.to_host(x).tolist(), 0, 1, 0),
    "to device's device": (lambda gpu, x: gpu.to_device(host_array()).to(x.device), 0, 1, 0),
    "event": (lambda gpu, _x: gpu.record_event().synchronize(), 0, 0, 1),
    "pageable": (lambda _gpu, x: host_array().to(x.device, non_blocking=True), 0, 1, 1),
    "pageable, into a tensor": (lambda _gpu, x: x.copy_(host_array(), non_blocking=True), 0, 1, 1),
    "blocking": (lambda gpu, x: gpu.empty_pinned_like(x).copy_(x), 0, 1, 1),
    "create": (lambda _gpu, _x: torch.tensor([1], device=TORCH_DEVICE), 0, 1, 1),
    "create and compute": (lambda _gpu, x: torch.tensor([1], device=x.device) + 1, 1, 1, 1),
    "list": (lambda _gpu, x: x.tolist(), 0, 1, 1),
    "array": (lambda _gpu, x: x.numpy(), 0, 1, 1),
    "cpu": (lambda _gpu, x: x.cpu().add(1).tolist(), 0, 1, 1),
    "to cpu": (lambda _gpu, x: x.to("cpu").tolist(), 0, 1, 1),
    "number": (lambda _gpu, x: int(x[0]) + x[1].item() + bool(x[2]), 0, 0, 3),
    "select": (lambda _gpu, x: x[x > 0], 2, 0, 1),
    "replace": (lambda gpu, x: x.index_put_((x > 0,), gpu.to_device(host_array()[0])), 2, 1, 1),
    "select by index": (lambda gpu, x: x[gpu.to_device(host_array())], 1, 1, 0),
    "select by host index": (lambda _gpu, x: x[host_array()], 1, 1, 1),
    "find": (lambda _gpu, x: x.nonzero(), 1, 0, 1),
    "distinct": (lambda _gpu, x: x.unique(), 1, 0, 1),
    "bins": (lambda _gpu, x: x.bincount(), 1, 0, 1),
    "repeat": (lambda _gpu, x: x.repeat_interleave(x), 2, 0, 1),
}
"""Launches, copies and waits of each work."""


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WORK)
def test_recorder_counts_launches_copies_and_waits(name: str, inference: bool) -> None:
    work, *counts = WORK[name]
    x = torch.tensor([1, 0, 1], device=TORCH_DEVICE)
    with torch.inference_mode(inference):
        recorder = record_work(lambda: work(HostDevice(), x))
    counted = (recorder.launches, recorder.copies, recorder.waits)
    assert [*map(len, counted)] == counts, counted


PENALTIES: dict[str, object] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
PAIRS: dict[str, object] = {"logit_bias": {3: 1.0}, "banned_token_ids": (4,), "min_tokens": 9}
SAMPLING: dict[str, tuple[dict[str, object], int, int]] = {
    "greedy": ({"temperature": 0.0}, 3, 1),
    "temperature and min-p": ({"min_p": 0.1}, 3, 1),
    "top-k": ({"top_k": 5}, 8, 1),
    "top-p": ({"top_p": 0.5}, 8, 1),
    "top-k and top-p": ({"top_k": 5, "top_p": 0.5}, 11, 1),
    "bias, bans and min_tokens": (PAIRS, 4, 1),
    "allowed tokens": ({"allowed_token_ids": (4, 5)}, 4, 1),
    "penalties": (PENALTIES, 5, 1),
    "log-probabilities": ({"logprobs": 2}, 8, 3),
    "all": ({"top_k": 5, "top_p": 0.5, **PENALTIES, **PAIRS, "logprobs": 2}, 22, 3),
}
"""Launches and copies of each set of parameters."""


@pytest.mark.parametrize("kind", SAMPLING)
def test_sampling_never_waits(kind: str) -> None:
    """Greedy rows beside the others cost no launches."""
    options, *counts = SAMPLING[kind]
    device, size = HostDevice(), (3, 40)
    sampler = Sampler(*size, device.create_logit_sampler(*size))
    logits, rows = torch.randn(*size, device=TORCH_DEVICE), np.arange(3)

    def admit() -> None:
        for row in range(3):
            params = msgspec.convert(options if row else {"temperature": 0.0}, SamplingParams)
            sampler.admit(AdmittedSequence(row, [1, 2, 3], 2, params, []), [0])

    assert record_work(admit).waits == []
    with torch.inference_mode():
        work = record_work(lambda: sampler(logits, rows, np.full(3, 3)))
    assert work.waits == []
    assert [len(work.launches), len(work.copies)] == counts, (work.launches, work.copies)
