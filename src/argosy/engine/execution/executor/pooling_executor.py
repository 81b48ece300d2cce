"""Executor of step plans whose sequences are pooled to vectors, for decoders with a KV cache and models without one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from argosy.engine.execution.executor.executor import CompletedStep, highest_block, move_blocks
from argosy.engine.execution.executor.host_block_store import HostBlockStore
from argosy.engine.execution.executor.persistent_batch import DeviceInputs, PersistentBatch
from argosy.engine.pooling import PoolingParams
from argosy.engine.scheduling import SequenceFailure, StepDurations, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.engine_config import EngineLimits
    from argosy.engine.execution.executor.executor import StepHandle
    from argosy.engine.execution.executor.pooler import Pooler
    from argosy.engine.execution.kernels.batch import Attention, Batch
    from argosy.engine.execution.kernels.device import Device
    from argosy.engine.execution.kernels.recurrent_states import RecurrentStates

NON_FINITE_VECTOR = SequenceFailure("the model produced values that are not finite")


class PoolingExecutor:
    """Executor that computes with torch. `model(batch, attention)` returns hidden states [L, hidden] in float32.

    `recurrent_states` are those of a model with recurrent layers.

    A step computes its sequences without padding, and waits for its results. The scheduler plans the shortest sequences
    first and limits a step's tokens, so that a step is a micro-batch of similar lengths.
    """

    def __init__(
        self,
        model: Callable[[Batch, Attention], Tensor],
        attention: Attention,
        pooler: Pooler,
        *,
        limits: EngineLimits,
        device: Device,
        recurrent_states: RecurrentStates | None = None,
    ) -> None:
        self._recurrent_states = recurrent_states
        self._model = model
        self._attention = attention
        self._pooler = pooler
        self._device = device
        self.host_store = HostBlockStore()
        self._persistent_batch = PersistentBatch(
            limits.max_seqs,
            limits.max_model_len,
            limits.block_size,
            len(limits.kv_windows),
            device.torch_device,
        )
        self._default_params = PoolingParams(reads_all_tokens=pooler.reads_all_tokens)
        self._params: dict[int, PoolingParams] = {}
        """Row -> parameters of its sequence."""
        self._states: dict[int, list[Tensor]] = {}
        """Row -> hidden states of its sequence's earlier chunks, if all of them are read."""

    @property
    def attention_name(self) -> str:
        """Name of the attention backend, for the log."""
        return self._attention.name

    @property
    def pending_preparations(self) -> int:
        return 0

    def prepare_next(self) -> None:
        """Return at once, because nothing is captured."""

    def reset(self) -> None:
        """Free all rows and keep the KV blocks. Raises pending errors of the device."""
        self._device.record_event().synchronize()
        self._persistent_batch.clear()
        self._params.clear()
        self._states.clear()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Move blocks, admit sequences, run the model, and pool the sequences that are complete."""
        started_at = time.perf_counter()
        corrupt = move_blocks(plan, self._attention, self.host_store)
        for admission in plan.admissions:
            self._persistent_batch.admit(admission)
            self._params[admission.row] = admission.pooling or self._default_params
            self._states[admission.row] = []
        if self._recurrent_states is not None:
            self._recurrent_states.load_snapshots(plan.snapshot_loads)
        self._persistent_batch.append_blocks(plan.block_appends)
        if plan.admissions or plan.block_appends:
            self._attention.ensure_block(highest_block(plan))
        if not plan.rows:
            return CompletedStep(StepResult([], corrupt_blocks=corrupt))
        packed = self._persistent_batch.pack_step(plan, self._read_tokens(plan))
        inputs = DeviceInputs(self._device.to_device(packed.buffer), packed.shape)
        batch = self._persistent_batch.gather_batch(inputs, self._token_types(plan))
        if self._recurrent_states is not None:
            batch = self._recurrent_states.attach(batch, plan)
        launched_at, ready = time.perf_counter(), self._device.record_event()
        states = self._model(batch, self._attention)
        computed = self._device.record_event()
        pooled, failed = self._pool(plan, states)
        done = self._device.record_event()
        done.synchronize()
        return CompletedStep(
            StepResult(
                [-1] * len(plan.rows),
                failures=failed,
                corrupt_blocks=corrupt,
                durations=StepDurations(
                    launched_at - started_at,
                    computed.seconds_since(ready),
                    done.seconds_since(computed),
                ),
                pooled=pooled,
            )
        )

    def _read_tokens(self, plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
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
