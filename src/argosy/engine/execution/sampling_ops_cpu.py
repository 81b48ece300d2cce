"""Draws on the CPU: csrc/sampling.cpp where it can be had, else torch, with the same tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from argosy.engine.execution.native_calls import LogprobCall, SampleCall
from argosy.engine.execution.native_kernels import Kernels, load_kernels
from argosy.engine.execution.sampling_ops import (
    LogprobResult,
    SamplingMetadata,
    SamplingOps,
    TorchSamplingOps,
    log_probability,
)
from argosy.native import NativeUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor


def create_cpu_sampling_ops(
    threads: int, kernels: Callable[[], Kernels] = load_kernels
) -> SamplingOps:
    """The native operations where they can be had, else torch's."""
    try:
        return NativeSamplingOps(kernels(), threads)
    except NativeUnavailableError:
        return TorchSamplingOps()  # the attention's log line says why


@dataclass(frozen=True, slots=True)
class NativeSamplingOps:
    """csrc/sampling.cpp for bfloat16 and float32, torch for other dtypes."""

    kernels: Kernels
    threads: int

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """See `DrawOps`."""
        if logits.dtype not in self.kernels.sample:
            return TorchSamplingOps().sample(logits, metadata)
        logits = _contiguous_rows(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        call = SampleCall(
            logits.data_ptr(),
            metadata.logit_scale.ctypes.data,
            metadata.top_k.ctypes.data,
            metadata.top_p.ctypes.data,
            metadata.log2_min_p.ctypes.data,
            metadata.random_values.ctypes.data,
            tokens.data_ptr(),
            *logits.shape,
            logits.stride(0),
            self.threads,
        )
        self.kernels.sample[logits.dtype](ctypes.addressof(call))
        return tokens

    def compute_logprobs(
        self,
        logits: Tensor,
        logit_rows: NDArray[np.int64],
        tokens: Tensor,
        top_counts: NDArray[np.int64],
    ) -> LogprobResult:
        """See `DrawOps`."""
        if logits.dtype not in self.kernels.logprobs:
            return TorchSamplingOps().compute_logprobs(logits, logit_rows, tokens, top_counts)
        logits, tokens = _contiguous_rows(logits), tokens.contiguous()
        shape = (len(logit_rows), int(top_counts.max(initial=0)))
        ranks, masses = np.zeros((2, len(logit_rows)), np.int64)
        own, largest = np.full((2, len(logit_rows)), np.nan, np.float32)
        ids, likeliest = np.zeros(shape, np.int64), np.full(shape, np.nan, np.float32)
        call = LogprobCall(
            logits.data_ptr(),
            logit_rows.ctypes.data,
            tokens.data_ptr(),
            top_counts.ctypes.data,
            ranks.ctypes.data,
            masses.ctypes.data,
            own.ctypes.data,
            largest.ctypes.data,
            ids.ctypes.data,
            likeliest.ctypes.data,
            len(logit_rows),
            logits.shape[1],
            logits.stride(0),
            shape[1],
            self.threads,
        )
        self.kernels.logprobs[logits.dtype](ctypes.addressof(call))
        return LogprobResult(
            log_probability(own, largest, masses),
            ranks,
            ids,
            log_probability(likeliest, largest[:, None], masses[:, None]),
        )


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
