"""Device graphs of decode steps, captured once per batch size and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from argosy.engine.execution.executor.persistent_batch import PackedStep, PersistentBatch
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.device import Device, GraphCapture
from argosy.engine.scheduling import StepPlan

GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Captured batch sizes. A step of another size is padded to the next larger one."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Captured decode step, whose inputs and outputs stay at fixed addresses."""

    size: int
    input_buffer: Tensor
    sample_index: Tensor
    """[C], view of the input buffer, see `PersistentBatch.gather_batch`."""
    logits: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """Captured graphs of one executor. Steps without a graph run eagerly."""

    def __init__(
        self,
        capture_graph: GraphCapture | None,
        device: Device,
        persistent_batch: PersistentBatch,
        model: Callable[[Batch], Tensor],
        max_seqs: int,
    ) -> None:
        self._capture_graph = capture_graph
        self._device = device
        self._persistent_batch = persistent_batch
        self._model = model
        self._captured: dict[int, CapturedStep] = {}
        self._logits: Tensor | None = None
        """[largest size, V], output shared by all graphs, since separate outputs would stay allocated."""
        smaller = [size for size in GRAPH_BATCH_SIZES if size < max_seqs]
        self.sizes = (
            [] if capture_graph is None else [*smaller, min(max_seqs, GRAPH_BATCH_SIZES[-1])]
        )
        """Batch sizes that `capture_all` captures, ascending."""

    def capture_all(self, on_captured: Callable[[int], None]) -> None:
        """Capture a graph for each size, the largest first. If the device fails, the smaller ones have no graphs.

        `on_captured` is called with the number of graphs so far.
        """
        if self._capture_graph is None:
            return
        for size in reversed(self.sizes):
            try:
                self._captured[size] = self._capture(self._capture_graph, size)
            except Exception as error:  # noqa: BLE001 - steps run without graphs too
                log.warning("graph_capture_disabled", size=size, error=str(error))
                return
            on_captured(len(self._captured))

    def find_captured(self, plan: StepPlan) -> CapturedStep | None:
        """Return the smallest captured step that fits `plan`, or None."""
        sizes = [size for size in self._captured if size >= len(plan.rows)]
        if not sizes or not self._persistent_batch.is_uniform_decode(plan):
            return None
        return self._captured[min(sizes)]

    def replay(self, captured: CapturedStep, packed: PackedStep) -> Tensor:
        """Copy the inputs and launch the graph. The next replay overwrites the returned logits [size, V]."""
        self._device.to_device(packed.buffer, captured.input_buffer)
        captured.replay()
        return captured.logits

    def _capture(self, capture_graph: GraphCapture, size: int) -> CapturedStep:
        packed = self._persistent_batch.pack_padded_step(StepPlan(0), size)
        buffer = self._device.to_device(packed.buffer)

        # Kernels are compiled in this first run, because a capture cannot include compilation.
        batch, sample_index = self._persistent_batch.gather_batch(buffer, packed.shape)
        first_logits = self._model(batch)
        if self._logits is None:
            self._logits = torch.empty_like(first_logits)
        logits = self._logits[:size]

        def work() -> None:
            batch, _ = self._persistent_batch.gather_batch(buffer, packed.shape)
            logits.copy_(self._model(batch))

        return CapturedStep(size, buffer, sample_index, logits, capture_graph(work))
