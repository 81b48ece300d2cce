"""Sampling operations on the CPU, by csrc/sampling.cpp if available and else by torch, with the same tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.cpu.native_kernels import (
    Kernels,
    LogprobCall,
    SampleCall,
    load_kernels,
)
from argosy.engine.execution.kernels.torch.sampling_ops import (
    LogprobResult,
    SamplingMetadata,
    SamplingOps,
    TorchSamplingOps,
    log_probability,
)
from argosy.native import NativeUnavailableError


def create_cpu_sampling_ops(threads: int) -> SamplingOps:
    """Create the native operations if the kernels are available, else torch's."""
    try:
        return NativeSamplingOps(load_kernels(), threads)
    except NativeUnavailableError:
        return TorchSamplingOps()  # `create_cpu_attention` logs the reason


@dataclass(frozen=True, slots=True)
class NativeSamplingOps:
    """Sampling operations by csrc/sampling.cpp for bfloat16 and float32, and by torch for other dtypes."""

    kernels: Kernels
    threads: int

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
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

    def launch_logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int64],
        top_counts: NDArray[np.int64],
    ) -> Callable[[], LogprobResult]:
        if logits.dtype not in self.kernels.logprobs:
            return TorchSamplingOps().launch_logprobs(logits, tokens, rows, top_counts)
        logits = _contiguous_rows(logits)
        row_tokens = tokens.numpy()[rows].clip(min=0)
        shape = (len(rows), int(top_counts.max(initial=0)))
        ranks, total_weights = np.zeros((2, len(rows)), np.int64)
        token_logits, largest = np.full((2, len(rows)), np.nan, np.float32)
        top_ids, top_logits = np.zeros(shape, np.int64), np.full(shape, np.nan, np.float32)
        call = LogprobCall(
            logits.data_ptr(),
            rows.ctypes.data,
            row_tokens.ctypes.data,
            top_counts.ctypes.data,
            ranks.ctypes.data,
            total_weights.ctypes.data,
            token_logits.ctypes.data,
            largest.ctypes.data,
            top_ids.ctypes.data,
            top_logits.ctypes.data,
            len(rows),
            logits.shape[1],
            logits.stride(0),
            shape[1],
            self.threads,
        )
        self.kernels.logprobs[logits.dtype](ctypes.addressof(call))
        result = LogprobResult(
            row_tokens,
            log_probability(token_logits, largest, total_weights),
            ranks,
            top_ids,
            log_probability(top_logits, largest[:, None], total_weights[:, None]),
        )
        return lambda: result


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
