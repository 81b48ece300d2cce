"""Executor of step plans, which moves KV blocks, launches the model and its output stage, and returns results later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from argosy.engine.execution.adapters import AdapterTable
from argosy.engine.execution.executor.block_copies import HostBlockStore
from argosy.engine.execution.executor.decode_graphs import DecodeGraphs
from argosy.engine.execution.executor.output_stage import (
    CompletedStep,
    LaunchedStep,
    OutputStage,
    StepHandle,
    find_corrupt_blocks,
)
from argosy.engine.execution.executor.persistent_batch import PersistentBatch
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device, GraphCapture
from argosy.engine.execution.kernels.recurrent_states import RecurrentStates
from argosy.engine.execution.layers.model import Model
from argosy.engine.scheduling import SchedulerLimits, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """Model of an executor, and functions that allocate what it computes with."""

    model: Model
    create_attention: Callable[[], Attention]
    """Allocates the KV cache."""
    create_stage: Callable[[PersistentBatch], OutputStage]
    """Creates the stage that turns outputs of the model into results."""
    create_states: Callable[[], RecurrentStates | None]
    """Allocates the states of a model with recurrent layers."""


class Executor:
    """Executor of step plans, in the order of submission.

    `capture_graph` captures decode steps. Without it, all steps run eagerly.
    """

    _model: Model
    _attention: Attention
    _states: RecurrentStates | None
    _persistent_batch: PersistentBatch
    _stage: OutputStage
    _graphs: DecodeGraphs

    def __init__(
        self,
        parts: ExecutorParts,
        *,
        limits: SchedulerLimits,
        device: Device,
        capture_graph: GraphCapture | None = None,
    ) -> None:
        self._limits = limits
        self.on_computed: Callable[[StepPlan], None] | None = None
        """Called after each step is launched, while the model has its hidden states."""
        self._device = device
        self._capture_graph = capture_graph
        self._adapters = AdapterTable(device, limits.max_seqs)
        self._allocate(parts)
        self.host_store = HostBlockStore(limits.host_blocks, self._attention, device)

    def _allocate(self, parts: ExecutorParts) -> None:
        limits, device = self._limits, self._device
        self._model = parts.model
        self._attention = parts.create_attention()
        self._states = parts.create_states()
        self._persistent_batch = PersistentBatch(
            limits.max_seqs,
            limits.max_model_len,
            limits.block_size,
            len(limits.kv_windows),
            device.torch_device,
        )
        self._adapters.model = parts.model
        self._stage = parts.create_stage(self._persistent_batch)
        self._graphs = DecodeGraphs(
            self._capture_graph, device, self._persistent_batch, self._compute, limits.max_seqs
        )

    def release(self) -> None:
        """Free everything but adapters and the blocks in host memory, while no step is in flight.

        Only `restore` may be called next. The model is freed, too, if nothing else refers to it.
        """
        self.reset()
        self.host_store.detach()
        self._attention.close()
        self._adapters.model = None
        self.on_computed = None
        del self._model, self._attention, self._states
        del self._persistent_batch, self._stage, self._graphs

    def restore(self, parts: ExecutorParts) -> None:
        """Allocate everything again after `release`. All KV blocks are empty, apart from those in host memory."""
        self._allocate(parts)
        self.host_store.attach(self._attention)

    def reset(self) -> None:
        """Discard all rows and steps, and keep the KV blocks. Raises pending errors of the device.

        The scheduler admits every running sequence again.
        """
        self._device.record_event().synchronize()
        self.host_store.drain()
        self._persistent_batch.clear()
        self._stage.clear()

    def keep_rows(self, rows: set[int]) -> None:
        """Release the memory that all other rows still have of sequences that have ended."""
        self._stage.keep_rows(rows)

    def find_forced_tokens(self, row: int) -> list[int]:
        """Return tokens that probably follow, because a row's grammar allows one text only.

        Call it while no step is in flight.
        """
        return self._stage.find_forced_tokens(row)

    def add_adapter(self, slot: int, folder: Path) -> int:
        """Load an adapter (LoRA) into a free slot, from 1 on, and return its bytes.

        May be called from any thread, while steps run. Later steps may admit sequences with the slot.

        Raises:
            AdapterError: The adapter is damaged, does not fit the model, or needs what is not supported. The message
                names field, tensor or module.
        """
        return self._adapters.add(slot, folder)

    def remove_adapter(self, slot: int) -> None:
        """Remove an adapter, whose memory is then free. No sequence of the batch may have the slot."""
        self._adapters.remove(slot)

    @property
    def attention_name(self) -> str:
        """Name of the attention backend, for the log."""
        return self._attention.name

    @property
    def num_graphs(self) -> int:
        """Number of graphs that `capture_graphs` captures."""
        return len(self._graphs.sizes)

    @torch.inference_mode()
    def capture_graphs(self, on_captured: Callable[[int], None] = lambda _number: None) -> None:
        """Capture the graphs of decode steps, before the first step or after a reset.

        `on_captured` is called with the number of graphs so far.
        """
        self._graphs.capture_all(on_captured)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Launch a step, which may happen before the previous one is done.

        If it raises, all results of the step are invalid.
        """
        started_at = time.perf_counter()
        restores = self._apply_changes(plan)
        if not plan.rows:
            return CompletedStep(StepResult([], corrupt_blocks=find_corrupt_blocks(restores)))
        extra_logit_index, token_types = self._stage.begin(plan)
        is_eager = extra_logit_index is not None or self._adapters.has_adapters(plan)
        captured = None if is_eager else self._graphs.find_captured(plan)
        if captured is None:
            packed = self._persistent_batch.pack_step(plan, extra_logit_index)
            buffer = self._device.to_device(packed.buffer)
            batch, sample_index = self._persistent_batch.gather_batch(
                buffer, packed.shape, token_types
            )
            launched_at, ready = time.perf_counter(), self._device.record_event()
            batch = self._adapters.attach(batch, plan, packed.logit_index)
            outputs = self._compute(batch, plan)
            if self.on_computed is not None:
                self.on_computed(plan)
        else:
            packed = self._persistent_batch.pack_padded_step(plan, captured.size)
            sample_index = captured.sample_index
            launched_at, ready = time.perf_counter(), self._device.record_event()
            outputs = self._graphs.replay(captured, packed)
            if self._states is not None:
                self._states.save_snapshots(plan)
        computed = self._device.record_event()
        launch_s = launched_at - started_at
        return self._stage.finish(
            LaunchedStep(plan, packed, sample_index, outputs, restores, launch_s, ready, computed)
        )

    def _apply_changes(self, plan: StepPlan) -> dict[int, Future[bool]]:
        """Move blocks and admit sequences. Returns for each restored block whether its data is intact."""
        restores = self._move_blocks(plan)
        for admission in plan.admissions:
            self._persistent_batch.admit(admission)
            self._adapters.admit(admission)
            self._stage.admit(admission)
        if self._states is not None:
            self._states.load_snapshots(plan.snapshot_loads)
        self._persistent_batch.append_blocks(plan.block_appends)
        if plan.admissions or plan.block_appends:
            self._attention.ensure_block(_highest_block(plan))
        return restores

    def _move_blocks(self, plan: StepPlan) -> dict[int, Future[bool]]:
        """Offload, copy and restore blocks, and return for each restored one whether its data is intact."""
        self.host_store.save(plan.block_offloads)
        if plan.block_copies:
            self._attention.copy_blocks(plan.block_copies)
        return self.host_store.restore(plan.block_restores)

    def _compute(self, batch: Batch, plan: StepPlan | None = None) -> Tensor:
        """Launch the model. Without a plan, it saves no snapshots."""
        if self._states is not None:
            batch = self._states.attach(batch, plan)
        return self._model.forward(batch, self._attention)


def _highest_block(plan: StepPlan) -> int:
    """Return the highest KV block that rows get in this step."""
    admitted = (
        block
        for admission in plan.admissions
        for table in admission.block_tables
        for block in table
    )
    return max(chain(admitted, (block for *_, block in plan.block_appends)), default=0)
