"""Watches the traffic of all models, tenants and replicas for changes, from the cells that gateways count."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from argosy.policy.detection.attribution import Slice, rank_slices
from argosy.policy.detection.baseline import (
    HOUR_S,
    MIN_SHARE,
    SHRINKAGE,
    SeasonalBaseline,
    hour_of_week,
)
from argosy.policy.detection.detector import ChangeDetector
from argosy.policy.detection.stream_state import (
    AcceptedVersion,
    DeviationKind,
    MonitorState,
    StreamDeviation,
    StreamState,
)
from argosy.policy.detection.tenant_volume import STEP_S, VOLUME, TenantVolumes
from argosy.policy.detection.traffic_cell import (
    EVENTS,
    CellKey,
    EventKind,
    Threshold,
    TrafficCell,
)

MINUTE_S = 60
LATE_S = 30
"""Time after the end of a minute at which all gateways have reported it."""
MAX_PENDING_MINUTES = 60
LEARNING_S = 7 * 24 * HOUR_S
"""Time from which a stream has a baseline."""
HISTORY_STEPS = 24 * HOUR_S // STEP_S
MIN_EXCESS = 5.0
"""Events beyond the expected ones from which an excess is divided among models."""
MAX_TENANTS = 50
MAX_CELLS = 5000
"""Cells of one minute. Further ones are left out."""

FAST_TOLERANCE, SLOW_TOLERANCE, RACE_TOLERANCE = 2.0, 1.5, 1.25
"""Ratio up to which a share is as expected: in steps, in hours, and compared with siblings."""
MIN_STREAMS = 60
MONTH_S = 30 * 24 * HOUR_S
RACE_CONCENTRATION = 100.0
RACE_QUANTILE = 0.75
RACE_MEMORY = 0.99
"""Weight of the values of a minute in the next one, for the thresholds of races."""
MIN_RACE_VALUES = 200.0
FAST_WINDOW, SLOW_WINDOW, RACE_WINDOW = 12, 6, 15
"""Last steps, hours and minutes whose share ends a deviation if it is as expected again."""
MIN_END_REQUESTS = 20
SHOWN_HOURS = 24

MIN_ACCEPTED_REQUESTS = 200
"""Requests of an accepted version from which it is known what it changes."""
MAX_ACCEPTED_RATIO = 5.0
MAX_ACCEPTED = 20
_CATEGORIES = frozenset(kind.source for kind in EVENTS if kind.max_usual)
_RACED = frozenset(kind.source for kind in EVENTS if kind.is_of_replica)

Counts = tuple[int, int]
"""Events and opportunities."""


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Share of an event in the last day beside what was expected, with its interval of 95 %."""

    model: str
    tenant: str
    event: str
    description: str
    share: float
    low: float
    high: float
    expected: float
    requests: int


class _Runner:
    """Race of a replica against its siblings."""

    def __init__(self) -> None:
        self.detectors: dict[str, ChangeDetector] = {}
        self.windows: dict[str, deque[tuple[int, int, int, int]]] = {}
        """Own events and requests, and those of the siblings, by event and minute."""
        self.deviations: dict[str, StreamDeviation] = {}


class TrafficMonitor:
    """Finds changes in the traffic of models, tenants and replicas.

    Its outputs may be read while another thread advances it. Its memory is bounded: `MAX_TENANTS` tenants, and 24 h of
    counts by replica, version, tenant and size of prompts.
    """

    def __init__(self, state: MonitorState | None = None) -> None:
        state = state or MonitorState()
        self._streams = {each.key: each for each in state.streams}
        self._accepted = list(state.accepted)
        self._pending: dict[int, dict[CellKey, TrafficCell]] = {}
        self._done_until = 0
        self._step: dict[CellKey, TrafficCell] = {}
        self._step_start = 0
        self._num_minutes = 0
        """Minutes that were counted."""
        self._open_step: tuple[int, int, dict[tuple[str, str, str], array[int]]] | None = None
        """Counts of the open step after that many minutes."""
        self._hour: dict[CellKey, dict[str, Counts]] = {}
        self._hour_start = 0
        self._windows: dict[tuple[CellKey, str], deque[tuple[int, int, float]]] = {}
        self._history: deque[tuple[int, dict[tuple[str, str, str], array[int]]]] = deque(
            maxlen=HISTORY_STEPS
        )
        self._volumes = TenantVolumes()
        self._runners: dict[tuple[str, str, str], _Runner] = {}
        self._race_values: dict[str, dict[str, dict[int, float]]] = {}
        self._race_thresholds: dict[str, dict[str, int | None]] = {}

    # --- input -----------------------------------------------------------------------------------

    def add(self, minute: int, cells: Iterable[tuple[CellKey, TrafficCell]]) -> None:
        """Add what a gateway has counted in the minute that begins at `minute`. Complete minutes are ignored."""
        if minute < self._done_until:
            return
        pending = self._pending.setdefault(minute, {})
        for key, cell in cells:
            known = pending.get(key)
            if known is not None:
                known.add(cell)
            elif len(pending) < MAX_CELLS:
                own = pending[key] = TrafficCell()
                own.histograms = {}
                own.add(cell)
        while len(self._pending) > MAX_PENDING_MINUTES:
            del self._pending[min(self._pending)]

    def advance(self, now: float, *, is_learning: bool = True) -> None:
        """Count the minutes that are complete at `now`, in their order.

        Args:
            now: Seconds since the epoch.
            is_learning: Whether the baselines of the next week may learn from these minutes.
        """
        for minute in sorted(self._pending):
            if minute + MINUTE_S + LATE_S > now:
                break
            cells = self._pending.pop(minute)
            self._done_until = minute + MINUTE_S
            step, hour = minute - minute % STEP_S, minute - minute % HOUR_S
            if step != self._step_start:
                self._close_step()
                self._step_start = step
            if hour != self._hour_start:
                self._close_hour(is_learning=is_learning)
                self._hour_start = hour
            self._race(minute, cells)
            for key, cell in cells.items():
                known = self._step.get(key)
                if known is None:
                    self._step[key] = cell
                else:
                    known.add(cell)
            self._num_minutes += 1

    def accept_version(self, model: str, version: str, at: float) -> bool:
        """Expect from now on what a version changes, because its rollout has passed its gate.

        Shares of the version in the last day are compared with those of the versions beside it. Errors are expected as
        before.

        Args:
            model: Name of the model.
            version: Digest, of which the versions of cells are beginnings.
            at: When the gate had passed, in seconds since the epoch.

        Returns:
            Whether there were enough requests of the version. Call it again later otherwise.
        """
        if any((each.model, each.version) == (model, version) for each in self._accepted):
            return True
        own, others = self._count_versions(model, version)
        if own.get("errors", (0, 0))[1] < MIN_ACCEPTED_REQUESTS:
            return False
        ratios: dict[str, float] = {}
        stream = self._streams.get(CellKey(model=model))
        for kind in EVENTS if stream is not None else ():
            baseline = stream.baselines.get(kind.name) if stream is not None else None
            if kind.name == "errors" or kind.max_usual or baseline is None or not baseline.is_known:
                continue
            own_events, own_total = own[kind.name]
            events, total = others.get(kind.name, (0, 0))
            usual = events / total if total >= MIN_ACCEPTED_REQUESTS else baseline.expected(at)
            usual = max(MIN_SHARE, usual)
            share = (own_events + SHRINKAGE * usual) / (own_total + SHRINKAGE)
            ratio = share / usual
            if not 0.9 < ratio < 1.1:
                ratios[kind.name] = min(MAX_ACCEPTED_RATIO, max(1 / MAX_ACCEPTED_RATIO, ratio))
        for each in self._streams.values():
            for name, ratio in ratios.items() if each.key.model == model else ():
                if name in each.baselines:
                    each.baselines[name].rescale(ratio)
                    self._forget(each, name)
        self._accepted.append(AcceptedVersion(model=model, version=version, at=at, ratios=ratios))
        del self._accepted[:-MAX_ACCEPTED]
        return True

    def _count_versions(
        self, model: str, version: str
    ) -> tuple[dict[str, Counts], dict[str, Counts]]:
        """Return the counts of a version, and of the others in the steps in which it had requests, by event."""
        own, others = (
            defaultdict[str, Counts](lambda: (0, 0)),
            defaultdict[str, Counts](lambda: (0, 0)),
        )
        for _, counts in self._history:
            versions = {
                key[2]: packed for key, packed in counts.items() if key[:2] == (model, "version")
            }
            if not any(value and version.startswith(value) for value in versions):
                continue
            for value, packed in versions.items():
                side = own if value and version.startswith(value) else others
                for index, kind in enumerate(EVENTS):
                    known = side[kind.name]
                    side[kind.name] = (
                        known[0] + packed[2 * index],
                        known[1] + packed[2 * index + 1],
                    )
        return own, others

    def _forget(self, stream: StreamState, event: str) -> None:
        """Forget what was found of an event, whose expected share has changed."""
        for known in (stream.fast, stream.slow, stream.deviations, stream.hours):
            known.pop(event, None)
        self._windows.pop((stream.key, event), None)

    # --- output ----------------------------------------------------------------------------------

    @property
    def state(self) -> MonitorState:
        """Memory for the next controller."""
        return MonitorState(streams=list(self._streams.values()), accepted=self._accepted)

    @property
    def accepted(self) -> Sequence[AcceptedVersion]:
        """Versions whose rollouts have passed their gates, the latest ones."""
        return tuple(self._accepted)

    def deviations(self) -> list[tuple[CellKey, StreamDeviation]]:
        """Return what deviates now, by model, tenant or replica."""
        found = [
            (stream.key, each)
            for stream in list(self._streams.values())
            for each in list(stream.deviations.values())
        ]
        found += [
            (CellKey(model=model, version=version, replica=replica), each)
            for (model, version, replica), runner in list(self._runners.items())
            for each in list(runner.deviations.values())
        ]
        return found

    def statuses(self) -> list[StreamStatus]:
        """Return the shares of the last day, first those that differ most from what was expected."""
        found: list[StreamStatus] = []
        for stream in self._streams.values():
            for kind in EVENTS:
                hours = stream.hours.get(kind.name, [])
                total = sum(each[1] for each in hours)
                baseline = stream.baselines.get(kind.name)
                is_known = baseline is not None and baseline.is_known
                if not total or not is_known or stream.thresholds is None or baseline is None:
                    continue
                share = sum(each[0] for each in hours) / total
                concentration = baseline.concentration
                variance = max(share, 1.0 / total) * (1.0 - min(share, 0.99))
                spread = 1.96 * math.sqrt(
                    variance * (1.0 / total + 1.0 / ((concentration + 1.0) * len(hours)))
                )
                found.append(
                    StreamStatus(
                        model=stream.key.model,
                        tenant=stream.key.tenant,
                        event=kind.name,
                        description=kind.description,
                        share=share,
                        low=max(0.0, share - spread),
                        high=min(1.0, share + spread),
                        expected=sum(each[2] for each in hours) / total,
                        requests=total,
                    )
                )
        found.sort(key=lambda each: (-each.low / each.expected, each.model, each.tenant))
        return found

    def learning_models(self) -> list[str]:
        """Return the models whose baseline is not known yet."""
        return sorted(
            each.key.model
            for each in self._streams.values()
            if each.thresholds is None and not each.key.is_of_tenant
        )

    def count_since(
        self, model: str, onset: float
    ) -> tuple[int, int, dict[tuple[str, str], Counts]]:
        """Return requests and failures since an onset, and both by dimension and value. All models count for ""."""
        total: dict[tuple[str, str], Counts] = {}
        for start, counts in self._list_steps():
            if start + STEP_S <= onset:
                continue
            for (of_model, dimension, value), packed in counts.items():
                if model in {"", of_model}:
                    known = total.get((dimension, value), (0, 0))
                    total[dimension, value] = (known[0] + packed[0], known[1] + packed[1])
        failed, requests = _total(
            [(0, 0), *(each for key, each in total.items() if key[0] == "replica")]
        )
        return requests, failed, total

    def _list_steps(self) -> list[tuple[int, dict[tuple[str, str, str], array[int]]]]:
        """Return the counts of all steps with their starts, the open one included."""
        number = self._num_minutes
        if self._open_step is None or self._open_step[0] != number:
            self._open_step = number, self._step_start, self._count_slices(dict(self._step))
        return [*self._history, self._open_step[1:]]

    def excess_by_model(self, onset: float) -> dict[str, float]:
        """Return the part of each model in the excess of failures since an onset, or else of slow requests.

        It is empty if there is none of either.
        """
        steps = self._list_steps()
        for index, kind in enumerate(EVENTS):
            if not kind.is_of_replica:
                continue
            sides: list[dict[str, Counts]] = [{}, {}]
            for start, counts in steps:
                side = sides[start + STEP_S > onset]
                for (model, dimension, _), packed in counts.items():
                    if dimension == "replica":
                        known = side.get(model, (0, 0))
                        events, total = packed[2 * index], packed[2 * index + 1]
                        side[model] = (known[0] + events, known[1] + total)
            excess = {}
            for model, (events, total) in sides[1].items():
                before = sides[0].get(model, (0, 0))
                excess[model] = events - total * (before[0] / before[1] if before[1] else 0.0)
            total_excess = sum(max(0.0, each) for each in excess.values())
            if total_excess >= MIN_EXCESS:
                return {model: max(0.0, each) / total_excess for model, each in excess.items()}
        return {}

    def slices(self, model: str, event: str, onset: float) -> list[Slice]:
        """Return where the excess of an event since its onset is."""
        index = next(index for index, kind in enumerate(EVENTS) if kind.name == event)
        before: dict[tuple[str, str], Counts] = {}
        after: dict[tuple[str, str], Counts] = {}
        for start, counts in self._list_steps():
            side = before if start + STEP_S <= onset else after
            for (of_model, dimension, value), packed in counts.items():
                if of_model == model:
                    known = side.get((dimension, value), (0, 0))
                    side[dimension, value] = (
                        known[0] + packed[2 * index],
                        known[1] + packed[2 * index + 1],
                    )
        return rank_slices(before, after)

    # --- steps and hours -------------------------------------------------------------------------

    def _close_step(self) -> None:
        cells, self._step = self._step, {}
        at = self._step_start
        merged: dict[CellKey, TrafficCell] = {}
        for key, cell in cells.items():
            whole = CellKey(model=key.model, tenant=key.tenant)
            merged.setdefault(whole, _new_cell()).add(cell)
        for whole, cell in merged.items():
            stream = self._streams.get(whole)
            if stream is None:
                if whole.is_of_tenant and len(self._streams) > 4 * MAX_TENANTS:
                    continue
                stream = self._streams[whole] = StreamState(key=whole, since=at)
            self._count_step(stream, at, cell)
        if cells:
            self._history.append((at, self._count_slices(cells)))
            self._volumes.count(at, merged, self._streams)

    def _count_slices(
        self, cells: Mapping[CellKey, TrafficCell]
    ) -> dict[tuple[str, str, str], array[int]]:
        """Return the counts of all events by model, dimension and value."""
        slices: defaultdict[tuple[str, str, str], TrafficCell] = defaultdict(_new_cell)
        for key, cell in cells.items():
            if key.is_of_tenant:
                slices[key.model, "tenant", key.tenant].add(cell)
                continue
            slices[key.model, "replica", key.replica].add(cell)
            slices[key.model, "version", key.version].add(cell)
            slices[key.model, "prompt", str(key.uncached_bucket)].add(cell)
        return {key: _pack(cell, self._model_thresholds(key[0])) for key, cell in slices.items()}

    def _count_step(self, stream: StreamState, at: float, cell: TrafficCell) -> None:
        stream.requests += cell.requests
        for name, counts in cell.histograms.items():
            if stream.thresholds is None or name in _CATEGORIES:
                own = stream.histograms.setdefault(name, {})
                for bucket, count in counts.items():
                    own[bucket] = own.get(bucket, 0) + count
        thresholds = stream.thresholds or {}
        hour = self._hour.setdefault(stream.key, {})
        known = hour.get(VOLUME, (0, 0))
        hour[VOLUME] = (known[0] + cell.tokens, known[1] + cell.requests)
        for kind in EVENTS:
            events, total = kind.count_events(cell, thresholds.get(kind.name))
            if not total:
                continue
            known = hour.get(kind.name, (0, 0))
            hour[kind.name] = (known[0] + events, known[1] + total)
            baseline = stream.baselines.get(kind.name)
            if stream.thresholds is None or baseline is None or not baseline.is_known:
                continue
            expected = baseline.expected(at)
            window = self._windows.setdefault((stream.key, kind.name), deque(maxlen=FAST_WINDOW))
            window.append((events, total, total * expected))
            deviation = stream.deviations.get(kind.name)
            if deviation is not None:
                if deviation.kind == "fast" and _is_over(deviation, window, FAST_TOLERANCE):
                    del stream.deviations[kind.name]
                continue
            detector = stream.fast.setdefault(kind.name, ChangeDetector(FAST_TOLERANCE))
            detector.update(at, events, total, expected, baseline.concentration)
            if detector.evidence >= self._threshold(STEP_S):
                stream.deviations[kind.name] = _begin("fast", kind, detector, at, window)

    def _close_hour(self, *, is_learning: bool) -> None:
        hours, self._hour = self._hour, {}
        at = self._hour_start
        for key, counts in hours.items():
            stream = self._streams.get(key)
            if stream is None:
                continue
            is_new = stream.thresholds is None and at + HOUR_S - stream.since >= LEARNING_S
            if is_new:
                _set_thresholds(stream)
            week, hour = hour_of_week(at)
            if stream.thresholds is not None and week != stream.week:
                self._update_categories(stream, stream.thresholds)
                stream.week = week
            if key.is_of_tenant:
                known_tokens = stream.tokens.get(hour, 0.0)
                stream.tokens[hour] = max(0.5 * known_tokens, float(counts[VOLUME][0]))
            for kind in EVENTS:
                events, total = counts.get(kind.name, (0, 0))
                baseline = stream.baselines.setdefault(kind.name, SeasonalBaseline())
                if total and baseline.is_known and stream.thresholds is not None and not is_new:
                    self._count_hour(stream, kind, baseline, events, total)
                if is_learning:
                    baseline.learn(at, events, total)
        for stream in self._streams.values():
            stream.requests *= 0.98
        tenants = [each for each in self._streams.values() if each.key.is_of_tenant]
        tenants.sort(key=lambda each: each.requests, reverse=True)
        for stream in tenants[MAX_TENANTS:]:
            del self._streams[stream.key]
        self._windows = {
            each: window for each, window in self._windows.items() if each[0] in self._streams
        }

    def _update_categories(
        self, stream: StreamState, thresholds: dict[str, Threshold | None]
    ) -> None:
        """Look for other usual categories, if many values of the week were not usual."""
        for kind in EVENTS:
            values = stream.histograms.get(kind.source, {}) if kind.max_usual else {}
            if not values:
                continue
            known, usual = thresholds.get(kind.name), kind.find_usual(values)
            cell = TrafficCell(histograms={kind.source: values})
            events, total = kind.count_events(cell, known)
            is_usual = known is not None and events <= 2.0 * (1.0 - kind.quantile) * total
            if usual is not None and not is_usual:
                thresholds[kind.name] = usual
                events, total = kind.count_events(cell, usual)
                baseline = stream.baselines[kind.name] = SeasonalBaseline()
                baseline.share = (events + 1.0) / (total + 2.0)
                self._forget(stream, kind.name)
            halved = {bucket: count // 2 for bucket, count in values.items() if count > 1}
            stream.histograms[kind.source] = halved

    def _count_hour(
        self,
        stream: StreamState,
        kind: EventKind,
        baseline: SeasonalBaseline,
        events: int,
        total: int,
    ) -> None:
        at = self._hour_start
        expected = baseline.expected(at)
        hours = stream.hours.setdefault(kind.name, [])
        hours.append((events, total, total * expected))
        del hours[:-SHOWN_HOURS]
        deviation = stream.deviations.get(kind.name)
        if deviation is not None:
            if deviation.kind == "slow" and _is_over(
                deviation, hours[-SLOW_WINDOW:], SLOW_TOLERANCE
            ):
                del stream.deviations[kind.name]
            return
        detector = stream.slow.setdefault(kind.name, ChangeDetector(SLOW_TOLERANCE))
        detector.update(at, events, total, expected, baseline.concentration)
        if detector.evidence >= self._threshold(HOUR_S):
            stream.deviations[kind.name] = _begin("slow", kind, detector, at, hours[-SLOW_WINDOW:])

    def _threshold(self, step_s: int) -> float:
        """Return the evidence that one of all streams exceeds once a month at most, if none of them changes."""
        streams = max(MIN_STREAMS, len(self._streams) * len(EVENTS))
        return float(streams * MONTH_S // step_s)

    def _model_thresholds(self, model: str) -> Mapping[str, Threshold | None]:
        stream = self._streams.get(CellKey(model=model))
        if stream is not None and stream.thresholds is not None:
            return stream.thresholds
        return self._race_thresholds.get(model, {})

    # --- siblings --------------------------------------------------------------------------------

    def _race(self, minute: int, cells: Mapping[CellKey, TrafficCell]) -> None:
        """Compare the replicas of each version in one minute."""
        groups: defaultdict[tuple[str, str], list[tuple[CellKey, TrafficCell]]] = defaultdict(list)
        for key, cell in cells.items():
            if key.replica:
                groups[key.model, key.version].append((key, cell))
        for (model, version), members in groups.items():
            replicas = sorted({key.replica for key, _ in members})
            if len(replicas) > 1:
                for replica in replicas:
                    runner = self._runners.setdefault((model, version, replica), _Runner())
                    self._run(minute, runner, replica, model, members)
        for model in {key[0] for key in groups}:
            members = [each for key, group in groups.items() if key[0] == model for each in group]
            self._update_race_thresholds(model, members)
        if minute % HOUR_S == 0:
            current = {(key.model, key.version, key.replica) for key in cells}
            self._runners = {key: runner for key, runner in self._runners.items() if key in current}

    def _run(
        self,
        minute: int,
        runner: _Runner,
        replica: str,
        model: str,
        members: Sequence[tuple[CellKey, TrafficCell]],
    ) -> None:
        thresholds = self._race_thresholds.get(model, {})
        for kind in EVENTS:
            if not kind.is_of_replica:
                continue
            own: defaultdict[int, Counts] = defaultdict(lambda: (0, 0))
            others: defaultdict[int, Counts] = defaultdict(lambda: (0, 0))
            for key, cell in members:
                side = own if key.replica == replica else others
                known, new = (
                    side[key.uncached_bucket],
                    kind.count_events(cell, thresholds.get(kind.name)),
                )
                side[key.uncached_bucket] = (known[0] + new[0], known[1] + new[1])
            buckets = [
                (
                    own[each][1] / (own[each][1] + others[each][1]),
                    own[each][0],
                    own[each][0] + others[each][0],
                )
                for each in sorted(own.keys() & others.keys())
                if own[each][1] and others[each][1]
            ]
            if not buckets:
                continue
            window = runner.windows.setdefault(kind.name, deque(maxlen=RACE_WINDOW))
            own_events, own_total = _total(own.values())
            other_events, other_total = _total(others.values())
            window.append((own_events, own_total, other_events, other_total))
            deviation = runner.deviations.get(kind.name)
            if deviation is not None:
                if _is_race_over(deviation, window):
                    del runner.deviations[kind.name]
                continue
            detector = runner.detectors.setdefault(kind.name, ChangeDetector(RACE_TOLERANCE))
            detector.race(minute, buckets, RACE_CONCENTRATION)
            races = max(MIN_STREAMS, 3 * len(self._runners))
            if detector.evidence >= races * MONTH_S // MINUTE_S:
                runner.deviations[kind.name] = StreamDeviation(
                    kind="sibling",
                    event=kind.name,
                    onset=detector.onset or minute,
                    found_at=minute + MINUTE_S,
                )
                _is_race_over(runner.deviations[kind.name], window)
                detector.reset()

    def _update_race_thresholds(
        self, model: str, members: Sequence[tuple[CellKey, TrafficCell]]
    ) -> None:
        values = self._race_values.setdefault(model, {})
        for counts in values.values():
            for bucket in list(counts):
                counts[bucket] *= RACE_MEMORY
                if counts[bucket] < 0.01:
                    del counts[bucket]
        for _, cell in members:
            for name in _RACED & cell.histograms.keys():
                new = cell.histograms[name]
                known = values.setdefault(name, {})
                for bucket, count in new.items():
                    known[bucket] = known.get(bucket, 0.0) + count
        self._race_thresholds[model] = {
            kind.name: kind._replace(quantile=RACE_QUANTILE).find_threshold(values[kind.source])
            for kind in EVENTS
            if kind.is_of_replica
            and kind.per is None
            and sum(values.get(kind.source, {}).values()) >= MIN_RACE_VALUES
        }


def _new_cell() -> TrafficCell:
    return TrafficCell(histograms={})


def _pack(cell: TrafficCell, thresholds: Mapping[str, Threshold | None]) -> array[int]:
    """Return events and opportunities of all events, one after the other."""
    packed = array("I")
    for kind in EVENTS:
        packed.extend(kind.count_events(cell, thresholds.get(kind.name)))
    return packed


def _total(counts: Iterable[Counts]) -> Counts:
    events, total = zip(*counts, strict=True)
    return sum(events), sum(total)


def _set_thresholds(stream: StreamState) -> None:
    """End the first days of a stream: what is beyond the quantiles of its values is an event from now on."""
    stream.thresholds = {}
    for kind in EVENTS:
        if kind.per is not None:
            baseline = stream.baselines.setdefault(kind.name, SeasonalBaseline())
            baseline.set_share([*baseline.open_hours.values(), *baseline.hours.values()])
            continue
        if kind.max_usual:
            continue
        values = stream.histograms.get(kind.source, {})
        threshold = stream.thresholds[kind.name] = kind.find_threshold(values)
        cell = TrafficCell(histograms={kind.source: values})
        events, total = kind.count_events(cell, threshold)
        stream.baselines[kind.name] = SeasonalBaseline(share=(events + 1.0) / (total + 2.0))
    stream.histograms = {
        name: values for name, values in stream.histograms.items() if name in _CATEGORIES
    }


def _begin(
    kind: DeviationKind,
    event: EventKind,
    detector: ChangeDetector,
    at: float,
    window: Iterable[tuple[int, int, float]],
) -> StreamDeviation:
    deviation = StreamDeviation(
        kind=kind, event=event.name, onset=detector.onset or at, found_at=at
    )
    _is_over(deviation, window, 0.0)
    detector.reset()
    return deviation


def _is_over(
    deviation: StreamDeviation, window: Iterable[tuple[int, int, float]], tolerance: float
) -> bool:
    """Update the shares of a deviation, and return whether they are as expected again."""
    steps = list(window)
    total = sum(each[1] for each in steps)
    deviation.share = sum(each[0] for each in steps) / total
    deviation.expected = sum(each[2] for each in steps) / total
    return total >= MIN_END_REQUESTS and deviation.share <= tolerance * deviation.expected


def _is_race_over(deviation: StreamDeviation, window: Iterable[tuple[int, int, int, int]]) -> bool:
    own, own_total, others, other_total = (sum(each) for each in zip(*window, strict=True))
    deviation.share, deviation.expected = own / own_total, others / other_total
    return own_total >= MIN_END_REQUESTS and deviation.share <= RACE_TOLERANCE * deviation.expected
