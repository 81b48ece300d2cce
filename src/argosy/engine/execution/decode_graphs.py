"""Decode steps recorded once and launched as one: a dozen batch sizes, the largest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from argosy.engine.execution.persistent_batch import DeviceInputs
from argosy.engine.scheduling import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.batch import Batch
    from argosy.engine.execution.device import CapturedGraph, Device, GraphCapturer
    from argosy.engine.execution.persistent_batch import PackedStep, PersistentBatch

GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""A step of another size is filled up to the next one."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A recorded step: what it reads stays where it is, and so does what it writes."""

    size: int
    inputs: DeviceInputs
    input_buffer: Tensor
    """The buffer that `inputs` are views of."""
    logits: Tensor
    graph: CapturedGraph


class DecodeGraphs:
    """The recordings of one executor: made one at a time, while steps without one run as they are."""

    def __init__(
        self,
        graph_capturer: GraphCapturer | None,
        device: Device,
        persistent_batch: PersistentBatch,
        model: Callable[[Batch], Tensor],
        max_seqs: int,
    ) -> None:
        self._graph_capturer = graph_capturer
        self._device = device
        self._persistent_batch = persistent_batch
        self._model = model
        self._captured: dict[int, CapturedStep] = {}
        self._logits: Tensor | None = None
        """[largest size, V]: what every recording writes; its own would stay allocated for each."""
        sizes = [size for size in GRAPH_BATCH_SIZES if size < max_seqs]
        self._pending_sizes = (
            [] if graph_capturer is None else [*sizes, min(max_seqs, GRAPH_BATCH_SIZES[-1])]
        )

    @property
    def num_pending(self) -> int:
        """How many are still to be recorded."""
        return len(self._pending_sizes)

    def capture_next(self) -> None:
        """Record the next one. A device that cannot is left without: steps need no graphs."""
        if (
            self._graph_capturer is None
            or not self._pending_sizes
            or not self._persistent_batch.is_uniform_decode(StepPlan(0))
        ):
            return
        size = self._pending_sizes.pop()
        try:
            self._captured[size] = self._capture(self._graph_capturer, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is a way without
            log.warning("graph_capture_disabled", size=size, error=str(error))
            self._pending_sizes = []

    def find_captured(self, plan: StepPlan) -> CapturedStep | None:
        """The smallest recording that holds `plan`, if it can be one."""
        sizes = [size for size in self._captured if size >= len(plan.rows)]
        if not sizes or not self._persistent_batch.is_uniform_decode(plan):
            return None
        return self._captured[min(sizes)]

    def replay(self, captured: CapturedStep, packed: PackedStep) -> Tensor:
        """Hand over the step and launch it: logits [size, V], overwritten by the next launch."""
        self._device.to_device(packed.buffer, captured.input_buffer)
        captured.graph.replay()
        return captured.logits

    def _capture(self, recorder: GraphCapturer, size: int) -> CapturedStep:
        packed = self._persistent_batch.pack_padded_step(StepPlan(0), size)
        data = self._device.to_device(packed.buffer)
        inputs = DeviceInputs(data, packed.shape)
        first = self._model(
            self._persistent_batch.gather_batch(inputs)
        )  # compiles kernels: that cannot be recorded
        if self._logits is None:
            self._logits = torch.empty_like(first)
        logits = self._logits[:size]
        graph = recorder.capture(
            lambda: logits.copy_(self._model(self._persistent_batch.gather_batch(inputs)))
        )
        return CapturedStep(size, inputs, data, logits, graph)
