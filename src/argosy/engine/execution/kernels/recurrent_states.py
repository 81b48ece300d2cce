"""Recurrent states of a model with gated delta nets.

All states are in one table. Its first slots are those of the rows of the persistent batch, and the others hold
snapshots. A snapshot is a copy of the state that a sequence had after some number of tokens, from which another one
with the same tokens can start.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from argosy.engine.execution.architectures.decoder import ModelArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.huge_pages import huge_zeros
from argosy.engine.scheduling import StepPlan


class RecurrentStates:
    """Table of the states of `num_rows` rows and of `num_snapshots` snapshots of a model with recurrent layers."""

    def __init__(
        self, architecture: ModelArchitecture, num_rows: int, num_snapshots: int, device: Device
    ) -> None:
        if architecture.delta_net is None:
            raise ValueError(f"{architecture.architecture} has no recurrent layers")
        layer_size = architecture.delta_net.state_elements
        sizes = (num_rows + num_snapshots, architecture.num_recurrent_layers * layer_size)
        self._device = device
        self._num_rows = num_rows
        self._states = BatchStates(
            huge_zeros(sizes, torch.float32)
            if device.torch_device.type == "cpu"
            else torch.zeros(sizes, device=device.torch_device),
            layer_size,
        )

    def load_snapshots(self, loads: list[tuple[int, int]]) -> None:
        """Copy snapshots to rows, given as (snapshot, row) pairs."""
        table = self._states.table
        for snapshot, row in loads:
            table[row].copy_(table[self._num_rows + snapshot])

    def save_snapshots(self, plan: StepPlan) -> None:
        """Save the snapshots of a decode step after it, which has left each sequence's state in its row."""
        table = self._states.table
        for chunk, _, snapshot in plan.snapshot_saves:
            table[self._num_rows + snapshot].copy_(table[plan.rows[chunk]])

    def attach(self, batch: Batch, plan: StepPlan | None = None) -> Batch:
        """Return the batch with the states of its sequences, and the snapshots that the plan saves."""
        if plan is None or not plan.snapshot_saves:
            return replace(batch, states=self._states)
        save_slots = torch.full((plan.total_tokens,), -1)
        ends = [0, *accumulate(plan.counts)]
        for chunk, position, snapshot in plan.snapshot_saves:
            flat_token = ends[chunk] + position - 1 - plan.starts[chunk]
            save_slots[flat_token] = self._num_rows + snapshot
        on_device = self._device.to_device(save_slots)
        return replace(batch, states=replace(self._states, save_slots=on_device))
