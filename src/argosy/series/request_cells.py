"""Counts of the requests of each minute by model, version, replica and tenant, for the detection of changes."""

from __future__ import annotations

from collections import Counter, deque

from argosy.policy.detection import CellKey, CellMinute, RequestSignals, TrafficCell
from argosy.series.log_histogram import LogHistogram
from argosy.series.request_sample import RequestSample

MINUTE_S = 60
KEPT_MINUTES = 15
"""Minutes that are kept for a reader, which asks every few seconds."""
MAX_TENANTS = 50
"""Tenants of a minute that are counted apart, those with most requests."""
MAX_REPLICA_CELLS = 2000
MAX_SAMPLES = 1000
"""Requests that are counted together at most."""
_BUCKET_TOKENS = (64, 512, 4096)
"""Tokens from which a prompt is in the next bucket of those that are compared."""
_NOT_COUNTED = frozenset({"limited", "cancelled"})


class RequestCells:
    """Counts requests by cell. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self.samples: list[RequestSample] = []
        """Requests that have ended and are not counted yet, at most `MAX_SAMPLES`."""
        self._cells: dict[CellKey, TrafficCell] = {}
        self._tenants = Counter[str]()
        self._minutes: deque[CellMinute] = deque(maxlen=KEPT_MINUTES)

    def close_minute(self, start: int) -> None:
        """Close the minute that begins at `start`. Later requests belong to the next one."""
        self.count()
        cells, self._cells = self._cells, {}
        self._tenants.clear()
        if cells:
            self._minutes.append(CellMinute(start, list(cells.items())))

    def read(self, after: int) -> list[CellMinute]:
        """Return the minutes that begin after a time, in seconds since the epoch."""
        return [each for each in self._minutes if each.start > after]

    def add_grade(self, of_replica: CellKey, of_tenant: CellKey, *, has_passed: bool) -> None:
        """Count the grade of an answer in the cell of its replica and in that of its tenant."""
        for cell in self._find_cells(of_replica, of_tenant):
            cell.graded += 1
            cell.failed_grades += not has_passed

    def add_signals(self, of_replica: CellKey, of_tenant: CellKey, signals: RequestSignals) -> None:
        """Count what was recognised of a request in the cell of its replica and in that of its tenant."""
        buckets = {
            "language": () if signals.language is None else (signals.language,),
            "template": () if signals.template is None else (signals.template,),
            "embedding": signals.embedding,
        }
        for cell in self._find_cells(of_replica, of_tenant):
            for name, found in buckets.items():
                counts = cell.histograms.setdefault(name, {}) if found else {}
                for bucket in found:
                    counts[bucket] = counts.get(bucket, 0) + 1
            if signals.has_valid_calls is not None:
                cell.checked_calls += 1
                cell.malformed_calls += not signals.has_valid_calls

    def _find_cells(self, of_replica: CellKey, of_tenant: CellKey) -> list[TrafficCell]:
        """Return the cells of a replica and a tenant, unless there are too many."""
        keys = [of_replica]
        tenant = of_tenant.tenant
        if tenant and (tenant in self._tenants or len(self._tenants) < MAX_TENANTS):
            self._tenants[tenant] += 0
            keys.append(of_tenant)
        return [cell for key in keys if (cell := self._find_cell(key)) is not None]

    def count(self) -> None:
        """Count the samples."""
        samples, self.samples = self.samples, []
        for sample in samples:
            if sample.outcome in _NOT_COUNTED:
                continue
            bucket = sum(sample.input_tokens >= tokens for tokens in _BUCKET_TOKENS)
            values = _measure(sample)
            tenant = sample.tenant
            if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
                tenant = ""
            self._tenants[tenant] += 1
            keys = [CellKey(sample.model, sample.version, sample.replica, bucket)]
            if tenant:
                keys.append(CellKey(sample.model, tenant=tenant))
            for cell in filter(None, map(self._find_cell, keys)):
                _add(cell, sample, values)

    def _find_cell(self, key: CellKey) -> TrafficCell | None:
        """Return the cell with a key; None if there are too many."""
        cell = self._cells.get(key)
        if cell is None and len(self._cells) < MAX_REPLICA_CELLS:
            cell = self._cells[key] = TrafficCell(histograms={})
        return cell


def _measure(sample: RequestSample) -> dict[str, float]:
    """Return the values of an answer, in units that the buckets of latencies suit."""
    if sample.outcome != "completed":
        return {}
    prompt = sample.input_tokens + sample.cached_tokens
    values = {
        "output": sample.total_output_tokens / 1024,
        "prompt": prompt / 1024,
        "cost": sample.cost_nano_dollars / 1e6,
    }
    if sample.ttft_s is not None:
        values["ttft"] = sample.ttft_s
        if sample.total_output_tokens > 1:
            values["tpot"] = (sample.duration_s - sample.ttft_s) / (sample.total_output_tokens - 1)
    return values


def _add(cell: TrafficCell, sample: RequestSample, values: dict[str, float]) -> None:
    cell.requests += 1
    cell.tokens += sample.input_tokens + sample.cached_tokens + sample.total_output_tokens
    cell.queued_ms += round(1000.0 * (sample.queue_s or 0.0))
    cell.failed += sample.outcome == "failed"
    cell.refused += sample.outcome == "refused" or sample.finish_reason == "content_filter"
    if not values:
        return
    cell.answered += 1
    cell.cut_off += sample.finish_reason == "length"
    cell.cache_misses += sample.input_tokens > sample.cached_tokens
    for name, value in values.items():
        histogram = LogHistogram()
        histogram.counts = cell.histograms.setdefault(name, {})
        histogram.add(value)
