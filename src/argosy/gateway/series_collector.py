"""Collects the series of a gateway: reads gauges, closes each second, and writes complete minutes to the file."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from argosy.deployment import GatewayConfig
from argosy.folders import state_folder
from argosy.gateway.event_loop import LoopSlices
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.policy import ReplicaStatus
from argosy.process import run_in_daemon_thread
from argosy.protocol import LoadResponse
from argosy.series import STEP_PHASES, MinuteRow, Readings, SeriesArchive, SeriesRecorder

_NO_GAUGES = (math.nan,) * 3
UNKNOWN_ENGINE = (math.nan,) * (6 + len(STEP_PHASES))
_UNKNOWN_RATES = UNKNOWN_ENGINE[2:]

MAX_UNSAVED_S = 300.0
"""Age up to which minutes are kept until the file can be opened."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

CountByModel = Callable[[], Mapping[str, int]]


class SeriesCollector:
    """Feeds a recorder. Not thread-safe: use it from one event loop."""

    def __init__(self, config: GatewayConfig, models: ModelRouter) -> None:
        self.recorder = SeriesRecorder()
        self.archive: SeriesArchive | None = None
        """None without a file, and until it is open."""
        self._models = models
        self._config = config
        self._engines = EngineGauges()
        self._readings = Readings(fleet=(0.0, 0.0, *_NO_GAUGES))
        """Gauges of the last second."""
        self._minutes: list[MinuteRow] = []
        """Complete minutes that are not written yet."""
        self._is_failing = False
        """Whether the last minute could not be written."""

    async def run(
        self,
        read_queue_depths: CountByModel,
        count_by_tenant: Callable[[], Mapping[str, Sequence[int]]],
        read_desired_replicas: CountByModel,
    ) -> None:
        """Close each second until cancelled."""
        if self.archive is None:
            await self._open_archive()
        while True:
            now = time.time()
            await asyncio.sleep(math.floor(now) + 1 - now)
            second = math.floor(time.time()) - 1
            slices = LoopSlices()
            readings = self._readings = await self._read_gauges(
                slices, read_queue_depths(), count_by_tenant(), read_desired_replicas()
            )
            num_waiting = len(self._minutes)
            for minute in self.recorder.close_second(second, readings):
                if minute is not None:
                    self._minutes.append(minute)
                await slices.pause()
            if len(self._minutes) > num_waiting:
                await self._write_minutes()

    async def close(self) -> None:
        """Write the minute that is not complete, and close the file."""
        closed = self.recorder.close_second(math.floor(time.time()), self._readings)
        self._minutes += [minute for minute in closed if minute is not None]
        self._minutes += self.recorder.sum_up_open_minute()
        await self._write_minutes()
        archive, self.archive = self.archive, None
        if archive is not None:
            await run_in_daemon_thread(archive.close)

    async def _open_archive(self) -> None:
        """Open the file of the settings, if there is one. Without it, series are only in memory."""
        path: Path | None = None
        try:
            path, keep_days = _archive_path(self._config), self._config.series.keep_days
            if path is not None:
                self.archive = await run_in_daemon_thread(SeriesArchive, path, keep_days)
        except (OSError, sqlite3.Error) as error:
            remedy = "set series.file to a file that only this gateway uses, or series.keep_days: 0"
            if not self._is_failing:
                reason = str(error)
                log.warning("series_file_unavailable", path=str(path), reason=reason, remedy=remedy)
            self._is_failing = True
        else:
            self._is_failing = False

    async def _write_minutes(self) -> None:
        """Write the complete minutes to the file. They are dropped without a file, or if that fails.

        While the gateway that this one replaces still uses the file, the latest minutes are kept.
        """
        minutes, self._minutes = self._minutes, []  # written once, also if this task is cancelled
        if not minutes:
            return
        if self.archive is None:
            await self._open_archive()
        if self.archive is None:
            oldest = time.time() - MAX_UNSAVED_S
            self._minutes = [each for each in minutes if self._is_failing and each.start > oldest]
            return
        try:
            await run_in_daemon_thread(self.archive.write, minutes)
        except sqlite3.Error as error:
            if not self._is_failing:
                log.warning("series_not_saved", reason=str(error))
            self._is_failing = True
        else:
            self._is_failing = False

    async def _read_gauges(
        self,
        slices: LoopSlices,
        queue_depths: Mapping[str, int],
        by_tenant: Mapping[str, Sequence[int]],
        desired: Mapping[str, int],
    ) -> Readings:
        """Read the gauges of all scopes, in the order of their schemas."""
        now = time.monotonic()
        models: dict[str, Sequence[float]] = {}
        replicas: dict[str, Sequence[float]] = {}
        self._engines.begin()
        for pool in self._models.pools:
            members = _list_replicas(pool.all_versions)
            for replica in members:
                gauges, same_name = _read_replica(replica), replicas.get(replica.name)
                replicas[replica.name] = (
                    (*gauges, *self._engines.read(replica))
                    if same_name is None
                    else _add(gauges, same_name)
                )
                await slices.pause()
            models[pool.model] = (
                sum(replica.load.in_flight for replica in members),
                queue_depths.get(pool.model, 0),
                _mean_kv_usage(members),
                _count_ready(members, now),
                desired.get(pool.model, math.nan),
            )
            await slices.pause()
        return Readings(
            models,
            replicas,
            by_tenant,
            (
                sum(model[0] for model in models.values()),
                sum(model[1] for model in models.values()),
                _mean_kv_usage(_list_replicas(self._models.all_pools)),
                sum(model[3] for model in models.values()),
                sum(desired.values()) if desired else math.nan,
            ),
        )


def _read_replica(replica: ReplicaEndpoint) -> Sequence[float]:
    load = replica.load
    if not math.isfinite(load.reported_at):
        return load.in_flight, *_NO_GAUGES
    return load.in_flight, load.running, load.waiting, load.kv_usage_ratio


def _add(gauges: Sequence[float], others: Sequence[float]) -> Sequence[float]:
    """Add up the requests of two replicas with one name. The KV usage is that of the fuller one.

    The gauges of the engine are those of the first one.
    """
    count = len(gauges) - 1
    sums = (one + other for one, other in zip(gauges[:count], others, strict=False))
    return *sums, max(gauges[count], others[count]), *others[len(gauges) :]


def _list_replicas(pools: Iterable[Pool]) -> list[ReplicaEndpoint]:
    return [replica for pool in pools for replica in pool.replicas.values()]


def _mean_kv_usage(replicas: Iterable[ReplicaEndpoint]) -> float:
    """Return the mean over the replicas that report it; NaN without any."""
    reported = [
        replica.load.kv_usage_ratio
        for replica in replicas
        if math.isfinite(replica.load.reported_at)
    ]
    return sum(reported) / len(reported) if reported else math.nan


def _count_ready(replicas: Iterable[ReplicaEndpoint], now: float) -> int:
    return sum(replica.health.status(now) is ReplicaStatus.READY for replica in replicas)


def _archive_path(config: GatewayConfig) -> Path | None:
    """Return the file of the settings, or the one of the gateway's address.

    Raises:
        FileNotFoundError: The user has no home folder.
    """
    if config.series.file is not None:
        return Path(config.series.file)
    if config.series.keep_days == 0 or (config.uds is None and config.port == 0):
        return None
    address = f"port-{config.port}" if config.uds is None else config.uds.replace("/", "-")
    return state_folder() / "series" / f"{address.strip('-')}.sqlite"


_Reading = tuple[LoadResponse, float]
"""Report of a replica and its time."""


class EngineGauges:
    """Computes what happened between two reports of a replica, which may be those of several gateways."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}
        self._current: dict[str, _Reading] = {}

    def begin(self) -> None:
        """Begin a round of readings. Replicas that the last round did not read are forgotten."""
        self._last, self._current = self._current, {}

    def read(self, replica: ReplicaEndpoint) -> Sequence[float]:
        """Return used and cached KV blocks, preemptions per second, tokens per step, and more for each step.

        That is the share of drafts that were accepted, the seconds that they saved per second, and the mean seconds of
        each phase. A rate is unknown after a start of the engine core, and what steps do in a round without one.
        """
        report = replica.report
        if report is None or not report.phase_s_total:
            return UNKNOWN_ENGINE
        blocks = (report.kv_blocks_used, report.kv_blocks_cached)
        now = (report, replica.load.reported_at)
        last = self._last.get(replica.name)
        self._current[replica.name] = now
        return (*blocks, *(_UNKNOWN_RATES if last is None else _rates(last, now)))


def _rates(last: _Reading, now: _Reading) -> Sequence[float]:
    (before, reported_before), (report, reported_at) = last, now
    steps, elapsed_s = report.step - before.step, reported_at - reported_before
    preemptions = report.preemptions_total - before.preemptions_total
    if steps < 0 or preemptions < 0:  # another process of the engine core
        return _UNKNOWN_RATES
    phases = [
        (report.phase_s_total.get(phase, math.nan) - before.phase_s_total.get(phase, 0.0)) / steps
        if steps
        else math.nan
        for phase in STEP_PHASES
    ]
    tokens = report.generation_tokens_total - before.generation_tokens_total
    drafts = report.draft_tokens_total - before.draft_tokens_total
    accepted = report.accepted_draft_tokens_total - before.accepted_draft_tokens_total
    return (
        preemptions / elapsed_s if elapsed_s > 0 else math.nan,
        tokens / (tokens - accepted) if tokens > accepted else math.nan,
        accepted / drafts if drafts else math.nan,
        (report.draft_saved_s_total - before.draft_saved_s_total) / elapsed_s
        if drafts and elapsed_s > 0
        else math.nan,
        *phases,
    )
