"""Part of a series at equal steps, which is aggregated over time and merged over gateways by addition."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import msgspec
import numpy as np

from argosy.series.log_histogram import Floats
from argosy.series.schema import Schema


class SeriesFrame(msgspec.Struct):
    """Values of one scope at equal steps."""

    step_s: int
    start: int
    """Time of the first step in seconds since the epoch, a multiple of `step_s`."""
    values: Floats
    """A row per step with the schema's columns. NaN where nothing is known."""
    covered_s: Floats
    """Seconds of each step that the values cover. 0 is a gap."""
    histograms: dict[str, list[bytes]]
    """Encoded histograms by name, one per step."""

    @classmethod
    def empty(cls, schema: Schema, start: int, step_s: int, steps: int) -> SeriesFrame:
        """Return a frame of gaps."""
        return cls(
            step_s,
            start,
            np.full((steps, len(schema.columns)), np.nan),
            np.zeros(steps),
            {name: [b""] * steps for name in schema.histograms},
        )

    def coarsen(self, schema: Schema, step_s: int) -> SeriesFrame:
        """Return the frame at a larger step, a multiple of its own.

        Counters are added, gauges are averaged, and histograms are merged.
        """
        ratio = step_s // self.step_s
        if ratio == 1:
            return self
        counters = len(schema.counters)
        groups = self.values.reshape(-1, ratio, self.values.shape[1])
        values = np.empty((len(groups), groups.shape[2]))
        is_gap = np.isnan(groups[:, :, :counters]).all(axis=1)
        values[:, :counters] = np.where(is_gap, np.nan, np.nansum(groups[:, :, :counters], axis=1))
        values[:, counters:] = mean_of_known(groups[:, :, counters:], axis=1)
        return SeriesFrame(
            step_s,
            self.start,
            values,
            self.covered_s.reshape(-1, ratio).sum(axis=1),
            {
                name: [b"".join(parts[i : i + ratio]) for i in range(0, len(parts), ratio)]
                for name, parts in self.histograms.items()
            },
        )

    def is_known_until(self, end: int) -> bool:
        """Whether no step before the time `end` is a gap."""
        return bool((self.covered_s[: (end - self.start) // self.step_s] > 0).all())

    def cut(self, start: int, steps: int, histograms: Sequence[str]) -> SeriesFrame:
        """Return the `steps` steps from `start` on, with these histograms."""
        first = (start - self.start) // self.step_s
        chosen = slice(first, first + steps)
        return SeriesFrame(
            self.step_s,
            start,
            self.values[chosen],
            self.covered_s[chosen],
            {name: self.histograms[name][chosen] for name in histograms},
        )

    def fill_gaps(
        self, schema: Schema, coarser: SeriesFrame, separate_from: float = math.inf
    ) -> None:
        """Fill the gaps from a frame within this one, whose step is a multiple.

        What the coarser frame has counted beyond the steps that are known is spread evenly over the others, so that
        sums stay exact. Its gauges and histograms are repeated.

        Args:
            schema: Contents of a row.
            coarser: The other frame.
            separate_from: Time from which the coarser frame does not include the steps of this one.
        """
        ratio = coarser.step_s // self.step_s
        first = (coarser.start - self.start) // self.step_s
        groups, counters = len(coarser.values), len(schema.counters)
        same = slice(first, first + groups * ratio)
        values = self.values[same].reshape(groups, ratio, -1)
        covered_s = self.covered_s[same].reshape(groups, ratio)
        gaps = covered_s == 0
        gap_counts = np.maximum(1, gaps.sum(axis=1))
        begins = coarser.start + np.arange(groups) * coarser.step_s
        is_included = (begins < separate_from)[:, None]
        included_s = np.where(is_included[:, 0], covered_s.sum(axis=1), 0.0)
        missing_s = np.maximum(0.0, coarser.covered_s - included_s)
        filled = gaps & (missing_s > 0)[:, None]
        missing = coarser.values.copy()
        missing[:, :counters] -= np.nansum(values[:, :, :counters], axis=1) * is_included
        missing[:, :counters] /= gap_counts[:, None]
        values[filled] = np.broadcast_to(missing[:, None], values.shape)[filled]
        covered_s[filled] = np.broadcast_to((missing_s / gap_counts)[:, None], filled.shape)[filled]
        for name, parts in self.histograms.items():
            for step in np.flatnonzero(filled).tolist():
                parts[first + step] = coarser.histograms[name][step // ratio]

    def use_better(self, other: SeriesFrame) -> None:
        """Replace the steps of which `other` covers more. It has the same step and lies within this frame."""
        first = (other.start - self.start) // self.step_s
        same = slice(first, first + len(other.values))
        better = np.flatnonzero(other.covered_s > self.covered_s[same])
        self.values[first + better] = other.values[better]
        self.covered_s[first + better] = other.covered_s[better]
        for name, parts in self.histograms.items():
            for step in better.tolist():
                parts[first + step] = other.histograms[name][step]

    def count_missing_as_zero(self, present: SeriesFrame) -> None:
        """Set missing values to 0 in the steps that `present` covers, for a scope that is recorded only in use."""
        idle = (self.covered_s == 0) & (present.covered_s > 0)
        self.values[idle] = 0.0
        self.covered_s[idle] = present.covered_s[idle]

    def encode(self, schema: Schema) -> bytes:
        """Return the contents as bytes for another gateway."""
        return msgspec.msgpack.encode(
            _EncodedFrame(
                schema.columns,
                self.values.astype("<f8").tobytes(),
                self.covered_s.astype("<f8").tobytes(),
                self.histograms,
            )
        )

    @classmethod
    def decode(
        cls, encoded: bytes, schema: Schema, like: tuple[int, int, int], histograms: Sequence[str]
    ) -> SeriesFrame:
        """Read what another gateway has encoded.

        Args:
            encoded: Its bytes.
            schema: Contents of a row.
            like: Expected start, step in seconds, and number of steps.
            histograms: Names of the expected histograms.

        Raises:
            ValueError: The frame is another one, for example of another version.
        """
        start, step_s, steps = like
        try:
            frame = msgspec.msgpack.decode(encoded, type=_EncodedFrame)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        sizes = {name: len(parts) for name, parts in frame.histograms.items()}
        if tuple(frame.columns) != schema.columns or sizes != dict.fromkeys(histograms, steps):
            raise ValueError("it keeps other series; update it to the same version")
        return cls(
            step_s,
            start,
            np.frombuffer(frame.values, "<f8").reshape(steps, len(schema.columns)),
            np.frombuffer(frame.covered_s, "<f8").reshape(steps),
            frame.histograms,
        )


class _EncodedFrame(msgspec.Struct, array_like=True):
    columns: Sequence[str]
    values: bytes
    covered_s: bytes
    histograms: dict[str, list[bytes]]


def merge_gateways(frames: Sequence[SeriesFrame], schema: Schema) -> SeriesFrame:
    """Merge the frames of several gateways, which have the same steps."""
    if len(frames) == 1:
        return frames[0]
    stacked = np.stack([frame.values for frame in frames])
    values = np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))
    for column, gauge in enumerate(schema.gauges, start=len(schema.counters)):
        if gauge.merge == "mean":
            values[:, column] = mean_of_known(stacked[:, :, column], axis=0)
    first = frames[0]
    return SeriesFrame(
        first.step_s,
        first.start,
        values,
        np.max([frame.covered_s for frame in frames], axis=0),
        {
            name: [
                b"".join(parts)
                for parts in zip(*(frame.histograms[name] for frame in frames), strict=True)
            ]
            for name in first.histograms
        },
    )


def mean_of_known(values: Floats, axis: int) -> Floats:
    """Return the mean without the NaN values; NaN where there are no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mean: Floats = np.nanmean(values, axis=axis)
    return mean
