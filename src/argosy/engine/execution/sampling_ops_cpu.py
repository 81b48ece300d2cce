"""Draws on the CPU: csrc/sampling.cpp where it can be had, else torch, with the same tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from argosy.engine.execution.native_calls import DrawCall, TellingCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.sampling_ops import (
    DrawOps,
    Draws,
    Telling,
    TorchDraws,
    log_probability,
)
from argosy.native import NativeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor


def cpu_draws(threads: int, kernels: Callable[[], Kernels] = load_kernels) -> DrawOps:
    """The native operations where they can be had, else torch's."""
    try:
        return NativeDraws(kernels(), threads)
    except NativeUnavailable:
        return TorchDraws()  # the attention's log line says why


@dataclass(frozen=True, slots=True)
class NativeDraws:
    """csrc/sampling.cpp for bfloat16 and float32, torch for other dtypes."""

    kernels: Kernels
    threads: int

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `DrawOps`."""
        if logits.dtype not in self.kernels.draw:
            return TorchDraws().draw(logits, draws)
        logits = _packed(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        call = DrawCall(
            logits.data_ptr(),
            draws.scale.ctypes.data,
            draws.top_k.ctypes.data,
            draws.top_p.ctypes.data,
            draws.least.ctypes.data,
            draws.chance.ctypes.data,
            tokens.data_ptr(),
            *logits.shape,
            logits.stride(0),
            self.threads,
        )
        self.kernels.draw[logits.dtype](ctypes.addressof(call))
        return tokens

    def tell(
        self, logits: Tensor, which: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> Telling:
        """See `DrawOps`."""
        if logits.dtype not in self.kernels.tell:
            return TorchDraws().tell(logits, which, tokens, counts)
        logits, tokens = _packed(logits), tokens.contiguous()
        shape = (len(which), int(counts.max(initial=0)))
        ranks, masses = np.zeros((2, len(which)), np.int64)
        own, largest = np.full((2, len(which)), np.nan, np.float32)
        ids, likeliest = np.zeros(shape, np.int64), np.full(shape, np.nan, np.float32)
        call = TellingCall(
            logits.data_ptr(),
            which.ctypes.data,
            tokens.data_ptr(),
            counts.ctypes.data,
            ranks.ctypes.data,
            masses.ctypes.data,
            own.ctypes.data,
            largest.ctypes.data,
            ids.ctypes.data,
            likeliest.ctypes.data,
            len(which),
            logits.shape[1],
            logits.stride(0),
            shape[1],
            self.threads,
        )
        self.kernels.tell[logits.dtype](ctypes.addressof(call))
        return Telling(
            log_probability(own, largest, masses),
            ranks,
            ids,
            log_probability(likeliest, largest[:, None], masses[:, None]),
        )


def _packed(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
