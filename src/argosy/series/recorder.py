"""Records what happens at a gateway as series per second, and rolls them up into coarser steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from argosy.policy.detection import CellKey
from argosy.series.frame import SeriesFrame
from argosy.series.log_histogram import LogHistogram, merge_encoded
from argosy.series.request_cells import MAX_SAMPLES, RequestCells
from argosy.series.request_sample import RequestSample
from argosy.series.schema import (
    FLEET_SCOPE,
    GRADE_COUNTERS,
    REQUEST_COUNTERS,
    SCHEMAS,
    Schema,
    ScopeKind,
    scope_kind,
)

Histograms = Sequence[bytes]
"""Encoded histograms in the order of the schema."""
FLEET_RINGS = ((1, 900), (10, 2160), (60, 1440))
"""Step and length of the rings of the fleet, models and replicas: 15 minutes, 6 hours and 24 hours."""
TENANT_RINGS = ((10, 360), (60, 360))
"""The same for tenants: an hour and 6 hours."""
MAX_TENANTS = 1000
"""Tenants beyond this number are only part of the fleet's and the models' series."""
MAX_LATE_S = 5
"""Delay of the event loop up to which seconds that were not closed in time are 0. Beyond it they are a gap."""
MAX_CLOCK_STEP_S = 60
"""The rings start again if the wall clock is set back by more than this. With less, the second is longer."""

_TENANT_STEP_S = TENANT_RINGS[0][0]
MINUTE_S = 60

_SUMMED_COUNTERS = ("input_tokens", "cached_tokens", "output_tokens", "cost_nano_dollars")
"""Counters that are sums of a field of `RequestSample`."""
MAX_UNCOUNTED = 1000
"""Requests of a scope that are counted together at most."""

_Duration = Callable[["RequestSample"], float | None]
_TENANT_DURATIONS: dict[str, _Duration] = {"ttft": attrgetter("ttft_s")}
_MODEL_DURATIONS: dict[str, _Duration] = {
    **_TENANT_DURATIONS,
    "e2e": attrgetter("duration_s"),
    "queue": attrgetter("queue_s"),
}
"""Histograms with a duration of each request, with the function that returns it."""


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
                name: [b"" if step is None else step[index] for step in kept]
                for index, name in enumerate(self._schema.histograms)
                if name in histograms
            },
        )


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


class MinuteRow(NamedTuple):
    """Complete minute of one scope."""

    scope: str
    start: int
    """Seconds since the epoch."""
    step: Step


class _Counts:
    """Counters and histograms of one scope since its step began.

    Requests are counted many at a time, because that costs a tenth of counting each when it ends.
    """

    __slots__ = ("_durations", "_samples", "counters", "histograms")

    def __init__(self, durations: Mapping[str, _Duration] = {}) -> None:
        self._durations = durations
        self._samples: list[RequestSample] = []
        """Requests that are not counted yet."""
        self.counters = dict.fromkeys((*REQUEST_COUNTERS, *GRADE_COUNTERS), 0)
        self.histograms = defaultdict[str, LogHistogram](LogHistogram)

    def add_request(self, sample: RequestSample) -> None:
        self._samples.append(sample)
        if len(self._samples) >= MAX_UNCOUNTED:
            self.count_requests()

    def count_requests(self) -> None:
        """Count the requests so far in the counters and histograms. Call it before these are read."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        counters = self.counters
        counters["requests"] += len(samples)
        for outcome, count in Counter(map(attrgetter("outcome"), samples)).items():
            if outcome in counters:
                counters[outcome] += count
        for name in _SUMMED_COUNTERS:
            counters[name] += sum(map(attrgetter(name), samples))
        for name, duration_of in self._durations.items():
            known = [seconds for seconds in map(duration_of, samples) if seconds is not None]
            if known:
                self.histograms[name].add_sorted(sorted(known))

    def encode(self, names: Sequence[str]) -> Histograms:
        return [
            self.histograms[name].encode() if name in self.histograms else b"" for name in names
        ]


_new_model_counts = partial(_Counts, _MODEL_DURATIONS)
_new_tenant_counts = partial(_Counts, _TENANT_DURATIONS)
_IDLE = _Counts()
"""Counts of a scope without requests. Never changed."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Gauges at the end of a second. Each row has the gauges in the order of the scope's schema."""

    models: Mapping[str, Sequence[float]] = field(default_factory=dict)
    replicas: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tenants: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fleet: Sequence[float] = ()


class SeriesRecorder:
    """Series of a gateway, its models, replicas and tenants. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self.scopes: dict[str, ScopeRings] = {}
        """Rings of each scope in which something was recorded."""
        self._models = defaultdict[str, _Counts](_new_model_counts)
        self._replicas = defaultdict[str, _Counts](_Counts)
        self._tenants = defaultdict[str, _Counts](_new_tenant_counts)
        self.last_second = 0
        """Last complete second, in seconds since the epoch; 0 before the first one."""
        self.cells = RequestCells()
        """Counts of each minute, for the detection of changes."""

    # --- recording ------------------------------------------------------------------------------

    def record_output(self, model: str, tenant: str, replica: str, tokens: int) -> None:
        """Count output tokens of a stream while it runs."""
        self._models[model].counters["output_tokens"] += tokens
        self._tenants[tenant].counters["output_tokens"] += tokens
        self._replicas[replica].counters["output_tokens"] += tokens

    def record_intervals(self, model: str, sorted_intervals_s: Sequence[float]) -> None:
        """Record times between tokens, in ascending order."""
        self._models[model].histograms["itl"].add_sorted(sorted_intervals_s)

    def record_request(self, sample: RequestSample) -> None:
        """Record the end of a request."""
        self._models[sample.model].add_request(sample)
        self._tenants[sample.tenant].add_request(sample)
        if sample.replica:
            self._replicas[sample.replica].add_request(sample)
        samples = self.cells.samples
        samples.append(sample)
        if len(samples) >= MAX_SAMPLES:
            self.cells.count()

    def record_grade(
        self, model: str, *, version: str, replica: str, tenant: str, has_passed: bool
    ) -> None:
        """Record the grade of a sampled answer."""
        self._models[model].counters["passed_grades" if has_passed else "failed_grades"] += 1
        self.cells.add_grade(
            CellKey(model, version, replica), CellKey(model, tenant=tenant), has_passed=has_passed
        )

    # --- steps ----------------------------------------------------------------------------------

    def close_second(self, second: int, readings: Readings) -> Iterator[MinuteRow | None]:
        """Close the second that begins at `second`, in pieces.

        What is recorded after the first piece belongs to the next second. A second that is not later than the last one
        is ignored: its events count in a later one.

        Yields:
            After each piece of work a complete minute, or None.
        """
        if second <= self.last_second:
            if second > self.last_second - MAX_CLOCK_STEP_S:
                return
            self.scopes.clear()
        last, self.last_second = self.last_second or second - 1, second
        models, self._models = self._models, defaultdict(_new_model_counts)
        replicas, self._replicas = self._replicas, defaultdict(_Counts)
        if minutes := _step_ends(last, second, MINUTE_S):
            self.cells.close_minute(minutes[-1] - MINUTE_S)
        yield None
        if second - last <= MAX_LATE_S:  # the event loop was busy, and the process ran
            for missed in range(last + 1, second):
                yield from self._write_second(missed, {}, {}, readings)
        yield from self._write_second(second, models, replicas, readings)
        ends = _step_ends(last, second, _TENANT_STEP_S)
        for end in ends:
            yield from self._write_tenants(end - _TENANT_STEP_S, readings)
        for scope, rings in list(self.scopes.items()) if ends else ():
            yield from self._roll_up(scope, rings, last, second)
            yield None

    def sum_up_open_minute(self) -> list[MinuteRow]:
        """Return what is known of the minute that is not complete, when the process ends."""
        start = (self.last_second + 1) // MINUTE_S * MINUTE_S
        list(self._write_tenants(self.last_second // _TENANT_STEP_S * _TENANT_STEP_S, Readings()))
        steps = ((scope, rings.sum_up(0, start, MINUTE_S)) for scope, rings in self.scopes.items())
        return [MinuteRow(scope, start, step) for scope, step in steps if step is not None]

    def _write_second(
        self,
        second: int,
        models: Mapping[str, _Counts],
        replicas: Mapping[str, _Counts],
        readings: Readings,
    ) -> Iterator[None]:
        """Write replicas, models and their sum. A model without readings was removed, and counts in the sum only."""
        fleet = _Counts()
        for counts in models.values():
            counts.count_requests()
            for name, count in counts.counters.items():
                fleet.counters[name] += count
            for name, histogram in counts.histograms.items():
                total = fleet.histograms[name].counts
                for bucket, count in histogram.counts.items():
                    total[bucket] = total.get(bucket, 0) + count
        for model, gauges in readings.models.items():
            self._write(f"model:{model}", second, models.get(model), gauges)
            yield None
        self._write(FLEET_SCOPE, second, fleet, readings.fleet)
        for replica, gauges in readings.replicas.items():
            self._write(f"replica:{replica}", second, replicas.get(replica), gauges)
            yield None

    def _write_tenants(self, step: int, readings: Readings) -> Iterator[None]:
        """Write the tenants of the 10 seconds from `step` on that had requests, and forget those of 6 hours ago."""
        tenants, self._tenants = self._tenants, defaultdict(_new_tenant_counts)
        known = sum(scope.startswith("tenant:") for scope in self.scopes)
        for tenant in tenants.keys() | readings.tenants.keys():
            scope = f"tenant:{tenant}"
            if scope not in self.scopes:
                if known >= MAX_TENANTS:
                    continue
                known += 1
            gauges = readings.tenants.get(tenant, (0.0, 0.0))
            self._write(scope, step, tenants.get(tenant), gauges)
            yield None

    def _write(
        self, scope: str, second: int, counts: _Counts | None, gauges: Sequence[float]
    ) -> None:
        rings = self.scopes.get(scope)
        if rings is None:
            kind = scope_kind(scope)
            rings = self.scopes[scope] = ScopeRings(SCHEMAS[kind], ring_sizes(kind))
        schema, counts = rings.schema, counts or _IDLE
        counts.count_requests()
        row = [*(counts.counters[name] for name in schema.counters), *gauges]
        rings.write(second, row, counts.encode(schema.histograms))

    def _roll_up(
        self, scope: str, rings: ScopeRings, last: int, second: int
    ) -> Iterator[MinuteRow | None]:
        """Roll up a scope's steps that have ended since `last`, and forget the scope if its rings are empty by then."""
        for level, ring in enumerate(rings.rings[1:], start=1):
            for end in _step_ends(last, second, ring.step_s):
                minute = rings.roll_up(level, end - ring.step_s)
                if minute is not None:
                    is_minute = ring.step_s == MINUTE_S
                    yield MinuteRow(scope, end - MINUTE_S, minute) if is_minute else None
        coarsest = rings.rings[-1]
        if rings.written_at < second - coarsest.step_s * coarsest.length:
            del self.scopes[scope]


def _step_ends(last: int, second: int, step_s: int) -> list[int]:
    """Return the ends of the steps with data that are complete after `second` and were not after `last`.

    Seconds in between may be missing, because the process was suspended or blocked.
    """
    first, latest = ((last + 1) // step_s + 1) * step_s, (second + 1) // step_s * step_s
    if first > latest:
        return []
    return [latest] if first == latest else [first, latest]


def ring_sizes(kind: ScopeKind) -> tuple[tuple[int, int], ...]:
    """Return step and length of the rings of a kind of scope."""
    return TENANT_RINGS if kind == "tenant" else FLEET_RINGS
