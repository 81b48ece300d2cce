"""Decode steps recorded once and launched as one: a dozen batch sizes, the largest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from argosy.engine.execution.persistent_batch import Inputs
from argosy.engine.scheduling import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from argosy.engine.execution.batch import Batch
    from argosy.engine.execution.device import Device, Graph, Recorder
    from argosy.engine.execution.persistent_batch import Packed, SequenceTable

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""A step of another size is filled up to the next one."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step: what it reads stays where it is, and so does what it writes."""

    size: int
    inputs: Inputs
    data: Tensor
    """The buffer that `inputs` are views of."""
    logits: Tensor
    graph: Graph


class DecodeGraphs:
    """The recordings of one executor: made one at a time, while steps without one run as they are."""

    def __init__(
        self,
        recorder: Recorder | None,
        device: Device,
        table: SequenceTable,
        model: Callable[[Batch], Tensor],
        max_seqs: int,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._table = table
        self._model = model
        self._recorded: dict[int, Recorded] = {}
        self._logits: Tensor | None = None
        """[largest size, V]: what every recording writes; its own would stay allocated for each."""
        sizes = [size for size in SIZES if size < max_seqs]
        self._missing = [] if recorder is None else [*sizes, min(max_seqs, SIZES[-1])]

    @property
    def missing(self) -> int:
        """How many are still to be recorded."""
        return len(self._missing)

    def record(self) -> None:
        """Record the next one. A device that cannot is left without: steps need no graphs."""
        if self._recorder is None or not self._missing or not self._table.uniform(Plan(0)):
            return
        size = self._missing.pop()
        try:
            self._recorded[size] = self._record(self._recorder, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is a way without
            log.warning("graphs.given_up", size=size, error=str(error))
            self._missing = []

    def find(self, plan: Plan) -> Recorded | None:
        """The smallest recording that holds `plan`, if it can be one."""
        sizes = [size for size in self._recorded if size >= len(plan.rows)]
        if not sizes or not self._table.uniform(plan):
            return None
        return self._recorded[min(sizes)]

    def launch(self, recorded: Recorded, packed: Packed) -> Tensor:
        """Hand over the step and launch it: logits [size, V], overwritten by the next launch."""
        self._device.to_device(packed.data, recorded.data)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, recorder: Recorder, size: int) -> Recorded:
        packed = self._table.pack_padded(Plan(0), size)
        data = self._device.to_device(packed.data)
        inputs = Inputs(data, packed.shape)
        first = self._model(self._table.gather(inputs))  # compiles kernels: that cannot be recorded
        if self._logits is None:
            self._logits = torch.empty_like(first)
        logits = self._logits[:size]
        graph = recorder.record(lambda: logits.copy_(self._model(self._table.gather(inputs))))
        return Recorded(size, inputs, data, logits, graph)
