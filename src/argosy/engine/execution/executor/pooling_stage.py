"""Output stage of models that compute vectors, for decoders with a KV cache and models without one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.output_stage import CompletedStep, LaunchedStep, StepHandle
from argosy.engine.execution.executor.pooler import Pooler
from argosy.engine.execution.kernels.device import Device
from argosy.engine.pooling import PoolingParams
from argosy.engine.scheduling import (
    AdmittedSequence,
    SequenceFailure,
    StepDurations,
    StepPlan,
    StepResult,
)

NON_FINITE_VECTOR = SequenceFailure("the model produced values that are not finite")


class PoolingStage:
    """Pooler of one executor, with the hidden states [L, hidden] in float32 of its rows' earlier chunks.

    A step computes its sequences without padding, and waits for its results. The scheduler plans the shortest sequences
    first and limits a step's tokens, so that a step is a micro-batch of similar lengths.
    """

    def __init__(self, pooler: Pooler, device: Device) -> None:
        self._pooler = pooler
        self._device = device
        self._default_params = PoolingParams(reads_all_tokens=pooler.reads_all_tokens)
        self._params: dict[int, PoolingParams] = {}
        """Row -> parameters of its sequence."""
        self._states: dict[int, list[Tensor]] = {}
        """Row -> hidden states of its sequence's earlier chunks, if all of them are read."""

    def clear(self) -> None:
        self._params.clear()
        self._states.clear()

    def admit(self, admission: AdmittedSequence) -> None:
        self._params[admission.row] = admission.pooling or self._default_params
        self._states[admission.row] = []

    def begin(self, plan: StepPlan) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        return self._read_tokens(plan), self._token_types(plan)

    def finish(self, step: LaunchedStep) -> StepHandle:
        """Pool the sequences that are complete."""
        pooled, failed = self._pool(step.plan, step.outputs)
        done = self._device.record_event()
        done.synchronize()
        return CompletedStep(
            StepResult(
                [-1] * len(step.plan.rows),
                failures=failed,
                corrupt_blocks=step.corrupt_blocks,
                durations=StepDurations(
                    step.launch_s,
                    step.computed.seconds_since(step.ready),
                    done.seconds_since(step.computed),
                ),
                pooled=pooled,
            )
        )

    def _read_tokens(self, plan: StepPlan) -> NDArray[np.int64] | None:
        """Return the flat tokens whose hidden states are read beside the last ones of the sequences."""
        parts, flat = [], 0
        for row, count in zip(plan.rows, plan.counts, strict=True):
            if self._params[row].reads_all_tokens:
                parts.append(np.arange(flat, flat + count))
            flat += count
        return np.concatenate(parts) if parts else None

    def _token_types(self, plan: StepPlan) -> Tensor | None:
        """Return the number of the text of a pair that each flat token belongs to, or None if there are no pairs."""
        starts = [self._params[row].second_text_start for row in plan.rows]
        if all(start is None for start in starts):
            return None
        types = [
            np.arange(first, first + count) >= (first + count if start is None else start)
            for start, first, count in zip(starts, plan.starts, plan.counts, strict=True)
        ]
        return self._device.to_device(torch.from_numpy(np.concatenate(types).astype(np.int64)))

    def _pool(
        self, plan: StepPlan, states: Tensor
    ) -> tuple[dict[int, bytes], dict[int, SequenceFailure]]:
        """Pool the sequences whose last token is in this step, and keep the hidden states of the others.

        Returns:
            Result of each chunk that completes its sequence, as bytes of float32, and the failures.
        """
        complete: list[int] = []
        sequences: list[Tensor] = []
        position = 0
        for chunk, (row, count, is_last) in enumerate(
            zip(plan.rows, plan.counts, plan.sample_flags, strict=True)
        ):
            num_read = count if self._params[row].reads_all_tokens else int(is_last)
            part = states[position : position + num_read]
            position += num_read
            if is_last:
                parts = [*self._states.pop(row), part]
                complete.append(chunk)
                sequences.append(parts[0] if len(parts) == 1 else torch.cat(parts))
            elif num_read:
                self._states[row].append(part)
        params = [self._params[plan.rows[chunk]] for chunk in complete]
        results = self._pooler.pool(sequences, params) if complete else []
        pooled, failed = {}, {}
        for chunk, result in zip(complete, results, strict=True):
            values = result.cpu().contiguous().numpy()
            if np.isfinite(values).all():
                pooled[chunk] = values.tobytes()
            else:
                failed[chunk] = NON_FINITE_VECTOR
        return pooled, failed
