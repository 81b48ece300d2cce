"""Recent series of one scope in ring buffers of fixed size, one per resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from argosy.series.frame import SeriesFrame
from argosy.series.log_histogram import merge_encoded
from argosy.series.schema import Schema

Histograms = Sequence[bytes]
"""Encoded histograms in the order of the schema."""


class Step(NamedTuple):
    """Contents of one step of a scope."""

    values: Sequence[float]
    """Values in the order of the schema's columns."""
    histograms: Histograms
    covered_s: float
    """Seconds of the step in which the process ran."""


class Ring:
    """The latest steps of one resolution.

    Args:
        schema: Contents of a row.
        step_s: Seconds per step.
        length: Number of steps that are kept.
    """

    def __init__(self, schema: Schema, step_s: int, length: int) -> None:
        self.step_s, self.length = step_s, length
        self._schema = schema
        self._numbers = np.full(length, -1, np.int64)
        """Number of the step in each slot: its time divided by `step_s`."""
        dtype = np.float32 if schema.is_compact else np.float64
        self._values = np.zeros((length, len(schema.columns)), dtype)
        self._covered_s = np.zeros(length, np.float32)
        self._histograms: list[Histograms | None] = [None] * length

    def write(self, start: int, step: Step) -> None:
        """Write the step that begins at `start`, in place of the oldest one."""
        number = start // self.step_s
        slot = number % self.length
        self._numbers[slot] = number
        self._values[slot] = step.values
        self._covered_s[slot] = step.covered_s
        self._histograms[slot] = step.histograms if any(step.histograms) else None

    def read(self, start: int, steps: int, histograms: Sequence[str]) -> SeriesFrame:
        """Return a copy of the steps from the time `start` on, with these histograms. Missing steps are gaps."""
        numbers = start // self.step_s + np.arange(steps)
        slots = numbers % self.length
        is_known = self._numbers[slots] == numbers
        values = self._values[slots].astype(np.float64)
        values[~is_known] = np.nan
        kept = [
            self._histograms[slot] if known else None
            for slot, known in zip(slots.tolist(), is_known.tolist(), strict=True)
        ]
        return SeriesFrame(
            self.step_s,
            start,
            values,
            np.where(is_known, self._covered_s[slots].astype(np.float64), 0.0),
            {
                name: self._read_histogram(self._schema.histograms.index(name), kept)
                for name in histograms
            },
        )

    @staticmethod
    def _read_histogram(index: int, steps: Sequence[Histograms | None]) -> list[bytes]:
        return [b"" if step is None else step[index] for step in steps]


class ScopeRings:
    """All rings of one scope, from the finest to the coarsest.

    Args:
        schema: Contents of a row.
        sizes: Step in seconds and length of each ring. Each step is a multiple of the one before.
    """

    def __init__(self, schema: Schema, sizes: Sequence[tuple[int, int]]) -> None:
        self.schema = schema
        self.rings = [Ring(schema, step_s, length) for step_s, length in sizes]
        self.written_at = 0
        """Time of the last step written to the finest ring."""

    def write(self, start: int, values: Sequence[float], histograms: Histograms) -> None:
        """Write the step of the finest ring that begins at `start`."""
        self.written_at = start
        finest = self.rings[0]
        finest.write(start, Step(values, histograms, finest.step_s))

    def roll_up(self, level: int, start: int) -> Step | None:
        """Sum up the step of a coarser ring that begins at `start`, and write it. None if nothing is known."""
        ring = self.rings[level]
        step = self.sum_up(level - 1, start, ring.step_s)
        if step is not None:
            ring.write(start, step)
        return step

    def sum_up(self, level: int, start: int, duration_s: int) -> Step | None:
        """Return the sum of a ring's steps from `start` on. None if nothing is known."""
        ring = self.rings[level]
        frame = ring.read(start, duration_s // ring.step_s, self.schema.histograms)
        if not frame.covered_s.any():
            return None
        total = frame.coarsen(self.schema, duration_s)
        histograms = [merge_encoded(total.histograms[name]) for name in self.schema.histograms]
        return Step(total.values[0].tolist(), histograms, float(total.covered_s[0]))
