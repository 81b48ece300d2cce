"""Errors of `--device cuda` on machines that cannot use it: each names what to change."""

from __future__ import annotations

import pytest
import torch

from argosy.engine import EngineConfig
from argosy.engine.execution.kernels.gpu import device
from argosy.engine.execution.loading.executor_loader import choose_device


@pytest.mark.parametrize(
    ("driver", "cuda_version", "message"),
    [
        ("libnothing.so.9", None, "no NVIDIA driver.*--device cpu or auto"),
        ("libnothing.so.9", "12.8", "no NVIDIA driver.*--device cpu or auto"),
        ("libc.so.6", None, "built without CUDA; install a CUDA build.*--device cpu"),
        ("libc.so.6", "12.8", "no GPU is visible; check nvidia-smi.*--device cpu"),
    ],
)
def test_unusable_gpu_is_refused_with_the_right_remedy(
    monkeypatch: pytest.MonkeyPatch, driver: str, cuda_version: str | None, message: str
) -> None:
    """The error on a machine without a GPU recommended a CUDA build of torch."""
    monkeypatch.setattr(device, "DRIVER_LIBRARY", driver)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        choose_device(EngineConfig(model="any", device="cuda"))
