"""Reads series from the rings and the archive at the resolution that a query needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from argosy.series.archive import ArchivedSeries
from argosy.series.frame import SeriesFrame
from argosy.series.recorder import MINUTE_S, SeriesRecorder, ring_sizes
from argosy.series.schema import FLEET_SCOPE, SCHEMAS, Schema, ScopeKind, scope_kind

STEPS_S = (1, 10, 60, 300, 900, 3600, 21600, 86400)
"""Steps that answers have. Each is a multiple of the one before."""
MAX_STEPS = 2000
DEFAULT_STEPS = 900
"""Number of steps of an answer, at most, unless the query wants another step."""

ReadArchive = Callable[[str, int, int], ArchivedSeries]
"""Returns the archived minutes of a scope between two times."""


def choose_step(kind: ScopeKind, start: float, end: float, now: float, wanted_s: int | None) -> int:
    """Return the step of an answer: the wanted one or the next larger one that is possible.

    Args:
        kind: Kind of the scope.
        start: Begin of the range in seconds since the epoch.
        end: End of the range.
        now: Current time.
        wanted_s: Smallest step that the caller wants. None for at most `DEFAULT_STEPS` steps.
    """
    max_steps = DEFAULT_STEPS if wanted_s is None else MAX_STEPS
    finest = next(
        (
            step_s
            for step_s, length in ring_sizes(kind)
            if start >= now - step_s * length - MINUTE_S
        ),
        MINUTE_S,
    )
    least = max(finest, wanted_s or 1)
    return next(
        (step for step in STEPS_S if step >= least and end - start <= step * max_steps), STEPS_S[-1]
    )


def read_series(
    recorder: SeriesRecorder,
    scope: str,
    start: int,
    step_s: int,
    steps: int,
    histograms: Sequence[str],
) -> SeriesFrame:
    """Read a scope from the rings, on the recorder's event loop, with these histograms.

    The frame begins and ends with a minute, so that it may be larger than the range. `cut` it after the archive has
    filled its gaps.
    """
    kind = scope_kind(scope)
    schema, sizes = SCHEMAS[kind], ring_sizes(kind)
    unit = max(step_s, MINUTE_S)
    end = -(-(start + steps * step_s) // unit) * unit
    start = start // unit * unit
    result = SeriesFrame.empty(schema, start, step_s, (end - start) // step_s, histograms)
    # The coarsest ring that is fine enough comes first, and then coarser ones for what it has not kept.
    fine = [size for size in sizes if size[0] <= step_s]
    for ring_step_s, length in [*fine[-1:], *sizes[len(fine) :]]:
        oldest = (recorder.last_second // ring_step_s - length + 1) * ring_step_s
        kept_start = max(start, oldest // unit * unit)
        kept_steps = (end - kept_start) // ring_step_s
        if kept_steps > 0 and (result.covered_s == 0).any():
            part = (ring_step_s, kept_start, kept_steps)
            frame = _read_ring(recorder, scope, part, histograms)
            if kind == "tenant":
                frame.count_missing_as_zero(_read_ring(recorder, FLEET_SCOPE, part, ()))
            _fill(result, schema, frame)
    return result


def _fill(
    frame: SeriesFrame, schema: Schema, other: SeriesFrame, separate_from: float = math.inf
) -> None:
    if other.step_s > frame.step_s:
        frame.fill_gaps(schema, other, separate_from)
    else:
        frame.use_better(other.coarsen(schema, frame.step_s))


def _read_ring(
    recorder: SeriesRecorder, scope: str, part: tuple[int, int, int], histograms: Sequence[str]
) -> SeriesFrame:
    """Read a part of a ring: its step, the start, and the number of steps."""
    step_s, start, steps = part
    rings = recorder.scopes.get(scope)
    for ring in () if rings is None else rings.rings:
        if ring.step_s == step_s:
            return ring.read(start, steps, histograms)
    return SeriesFrame.empty(SCHEMAS[scope_kind(scope)], start, step_s, steps, histograms)


def fill_from_archive(
    frame: SeriesFrame, scope: str, read_archive: ReadArchive, last_second: int
) -> None:
    """Fill the gaps of a frame of `read_series` from the archive. Run it in a thread.

    Args:
        frame: The frame.
        scope: Its scope.
        read_archive: Reads the archive.
        last_second: Last complete second of the recorder. The minute after it was only stored by an earlier process.
    """
    kind = scope_kind(scope)
    schema, unit = SCHEMAS[kind], max(frame.step_s, MINUTE_S)
    end = frame.start + len(frame.values) * frame.step_s
    stored = read_archive(scope, frame.start, end)
    fleet = read_archive(FLEET_SCOPE, frame.start, end) if kind == "tenant" else stored
    first = min(stored.first_minute, fleet.first_minute) * MINUTE_S
    if first >= end:
        return
    start = max(frame.start, int(first) // unit * unit)  # years without minutes take no memory
    minutes = (end - start) // MINUTE_S
    archived = stored.to_frame(schema, start, minutes)
    if kind == "tenant":
        archived.count_missing_as_zero(fleet.to_frame(SCHEMAS["fleet"], start, minutes))
    _fill(frame, schema, archived, (last_second + 1) // MINUTE_S * MINUTE_S)
