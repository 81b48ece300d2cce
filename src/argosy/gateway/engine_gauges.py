"""Gauges of the engines of native replicas, from the totals in their load reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from argosy.gateway.pool import ReplicaEndpoint
from argosy.protocol import LoadResponse
from argosy.series import STEP_PHASES

UNKNOWN_ENGINE = (math.nan,) * (3 + len(STEP_PHASES))
_UNKNOWN_RATES = UNKNOWN_ENGINE[2:]


class _Reading(msgspec.Struct, frozen=True):
    report: LoadResponse
    reported_at: float


class EngineGauges:
    """Computes what happened between two reports of a replica, which may be those of several gateways."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}
        self._current: dict[str, _Reading] = {}

    def begin(self) -> None:
        """Begin a round of readings. Replicas that the last round did not read are forgotten."""
        self._last, self._current = self._current, {}

    def read(self, replica: ReplicaEndpoint) -> Sequence[float]:
        """Return used and cached KV blocks, preemptions per second, and the mean seconds of each phase of a step.

        A rate is unknown after a start of the engine core, and the phases in a round without a step.
        """
        report = replica.report
        if report is None or not report.phase_s_total:
            return UNKNOWN_ENGINE
        blocks = (report.kv_blocks_used, report.kv_blocks_cached)
        now = _Reading(report, replica.load.reported_at)
        last = self._last.get(replica.name)
        self._current[replica.name] = now
        return (*blocks, *(_UNKNOWN_RATES if last is None else _rates(last, now)))


def _rates(last: _Reading, now: _Reading) -> Sequence[float]:
    steps = now.report.step - last.report.step
    preemptions = now.report.preemptions_total - last.report.preemptions_total
    elapsed_s = now.reported_at - last.reported_at
    if steps < 0 or preemptions < 0:  # another process of the engine core
        return _UNKNOWN_RATES
    phases = [
        (seconds - last.report.phase_s_total.get(phase, 0.0)) / steps if steps else math.nan
        for phase, seconds in (
            (phase, now.report.phase_s_total.get(phase, math.nan)) for phase in STEP_PHASES
        )
    ]
    return (preemptions / elapsed_s if elapsed_s > 0 else math.nan, *phases)
