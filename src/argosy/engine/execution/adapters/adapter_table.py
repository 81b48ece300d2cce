"""Table of an executor's adapters, which are loaded beside the steps and found by the slots of a batch's sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from argosy.engine.execution.adapters.adapter_builder import build_adapter, family_prefixes
from argosy.engine.execution.adapters.peft_config import AdapterError
from argosy.engine.execution.adapters.peft_reader import check_tokenizer, read_adapter
from argosy.engine.execution.decoders.decoder import Decoder
from argosy.engine.execution.kernels.batch import Batch, BatchAdapters, RowAdapters
from argosy.engine.execution.kernels.device import Device, DeviceAdapter
from argosy.engine.execution.kernels.torch.lora import TorchRowAdapters
from argosy.engine.execution.layers.model import Model
from argosy.engine.scheduling import AdmittedSequence, StepPlan


class AdapterTable:
    """Adapters by slot, and the slots of the rows of a persistent batch.

    `add` and `remove` may be called from any thread, all other methods from that of the steps. A step that has begun
    keeps the adapters that it uses.
    """

    def __init__(self, device: Device, num_rows: int) -> None:
        self.model: Model | None = None
        """Model of the adapters, or None while its memory is freed."""
        self._device = device
        self._adapters: dict[int, DeviceAdapter] = {}
        self._slots = np.zeros(num_rows + 1, np.int64)
        """Slot of each row, 0 for none."""

    def add(self, slot: int, folder: Path) -> int:
        """Load an adapter from a folder in PEFT's format into a free slot, from 1 on. Returns its bytes.

        Raises:
            AdapterError: The adapter is damaged, does not fit the model, or needs what is not supported.
        """
        if slot < 1 or slot in self._adapters:
            raise ValueError(f"slot {slot} is not free")
        try:
            adapter = self._load(folder)
        except (ValueError, OSError) as error:
            raise AdapterError(f"{folder}: {error}") from error
        self._adapters[slot] = adapter
        return adapter.num_bytes

    def _load(self, folder: Path) -> DeviceAdapter:
        model = self.model
        if model is None:
            raise AdapterError("the model sleeps; wake it up before an adapter is loaded")
        if not isinstance(model, Decoder):
            raise AdapterError(
                f"{model.architecture.architecture} does not run on Argosy's own decoder, so that it cannot have "
                "adapters"
            )
        if model.checkpoint is not None:
            check_tokenizer(folder, model.checkpoint)
        with torch.inference_mode():
            weights = build_adapter(
                read_adapter(folder, family_prefixes(model)), model, self._device
            )
            return self._device.create_adapter(weights, len(model.adaptable), model.dtype)

    def remove(self, slot: int) -> None:
        """Remove an adapter, whose memory is free once no step uses it. No row may have its slot."""
        self._adapters.pop(slot, None)

    def admit(self, admission: AdmittedSequence) -> None:
        """Set the slot of a sequence that joins the batch."""
        if admission.adapter_slot and admission.adapter_slot not in self._adapters:
            raise ValueError(f"no adapter is loaded in slot {admission.adapter_slot}")
        self._slots[admission.row] = admission.adapter_slot

    def has_adapters(self, plan: StepPlan) -> bool:
        """Whether a sequence of a step has an adapter."""
        return bool(self._adapters) and bool(self._slots[plan.rows].any())

    def attach(self, batch: Batch, plan: StepPlan, logit_index: NDArray[np.int64]) -> Batch:
        """Return the batch with the adapters of its sequences, or the batch itself if none has one.

        Args:
            batch: The batch.
            plan: Its step.
            logit_index: Its `logit_index` in host memory.
        """
        if self.model is None or not self.has_adapters(plan):
            return batch
        dtype = self.model.dtype
        token_slots = self._slots[plan.rows].repeat(plan.counts)
        adapters = BatchAdapters(
            self._create_rows(token_slots, dtype),
            self._create_rows(token_slots[logit_index], dtype),
        )
        return replace(batch, adapters=adapters)

    def _create_rows(self, slots: NDArray[np.int64], dtype: torch.dtype) -> RowAdapters:
        """Create the adapters of rows with these slots, of a model with this dtype."""
        rows = slots.argsort(kind="stable")
        rows = rows[np.count_nonzero(slots == 0) :]
        if not len(rows):
            return TorchRowAdapters((), torch.from_numpy(rows), torch.zeros(1, dtype=torch.int64))
        used, starts = np.unique(slots[rows], return_index=True)
        return self._device.create_row_adapters(
            [self._adapters[slot] for slot in used.tolist()],
            torch.from_numpy(rows),
            torch.from_numpy(np.append(starts, len(rows))),
            dtype,
        )
