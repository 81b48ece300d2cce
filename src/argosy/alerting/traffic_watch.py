"""Source of conditions about changes of traffic: feeds a `TrafficMonitor` with what gateways count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec
import structlog

from argosy.deployment import AlertingConfig
from argosy.policy.alerting import AlertCondition, Severity
from argosy.policy.detection import (
    EVENTS,
    AcceptedVersion,
    CellKey,
    CellMinute,
    MonitorState,
    Slice,
    StreamDeviation,
    StreamStatus,
    TrafficMonitor,
)
from argosy.process import run_in_daemon_thread
from argosy.store import FleetDocument, FleetStore, StoreError
from argosy.telemetry import RepeatedWarning

STATE_NAME = "traffic/state"
STATUS_NAME = "traffic/status"
STATE_INTERVAL_S = 900.0
STATUS_INTERVAL_S = 60.0
ACCEPTED_S = 86_400.0
"""Time after a version was accepted in which its traffic may show what it changes."""
MAX_STATUSES = 200
MAX_SHOWN_EVENTS = 4
MIN_SHOWN_EXCESS = 0.3
"""Part of the excess beyond its part of the requests from which a slice is named."""
MIN_SHOWN_WAIT_S = 0.1

DRIFT, DEVIATION = "TrafficDrift", "ReplicaDeviates"
ReadAccepted = Callable[[], Sequence[AcceptedVersion]]
"""Returns the versions whose rollouts have passed their gates lately. Blocks on the store."""
CellReader = Callable[[], Awaitable[Sequence[CellMinute]]]
"""Returns the minutes of all gateways that it has not returned before. Raises nothing for a gateway that is silent."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.alerting")


class TrafficStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic as it is shown to operators."""

    streams: Sequence[StreamStatus] = ()
    """Shares of the last day, first those that differ most from what was expected."""
    learning: Sequence[str] = ()
    """Models whose baseline is not known yet."""
    accepted: Sequence[AcceptedVersion] = ()
    """Versions whose rollouts have passed their gates, with the changes that are expected since."""


def read_traffic_status(store: FleetStore, fleet: str) -> TrafficStatus:
    """Return what was recorded last. Blocks on the store."""
    document = store.read_documents(fleet, STATUS_NAME).get(STATUS_NAME)
    if document is None:
        return TrafficStatus()
    try:
        return msgspec.json.decode(document.content, type=TrafficStatus)
    except msgspec.MsgspecError:  # of another version, until it is replaced
        return TrafficStatus()


class TrafficWatch:
    """Watches the traffic of a fleet. Use it from one event loop.

    Args:
        read_cells: Reads what gateways have counted.
        store: Keeps the baselines; None only keeps them in memory.
        fleet: Name of the fleet; empty for gateways without one.
        read_config: Returns the settings in force.
        read_accepted: Reads the versions whose changes are no drift.
    """

    def __init__(
        self,
        read_cells: CellReader,
        store: FleetStore | None,
        fleet: str,
        read_config: Callable[[], AlertingConfig] = AlertingConfig,
        *,
        read_accepted: ReadAccepted = tuple,
    ) -> None:
        self._read_cells = read_cells
        self._store = store
        self._fleet = fleet
        self._read_config = read_config
        self._read_accepted = read_accepted
        self.monitor = TrafficMonitor()
        self.is_learning = True
        """Whether the baselines learn from the current hour. Nothing is learned from incidents."""
        self._is_loaded = store is None
        self._state_saved_at = self._status_saved_at = 0.0
        self._store_problem = RepeatedWarning(log)

    async def read(self, now: float) -> list[AlertCondition]:
        """Return what deviates."""
        if not self._is_loaded:
            await self._load()
        for minute in await self._read_cells():
            self.monitor.add(minute.start, minute.cells)
        advance = partial(self.monitor.advance, now, is_learning=self.is_learning)
        await run_in_daemon_thread(advance)  # it may take 0.1 s
        if now - self._status_saved_at >= STATUS_INTERVAL_S:
            await self._accept_versions(now)
        await self._save(now)
        return self._describe()

    def deviations_of(self, labels: dict[str, str]) -> list[StreamDeviation]:
        """Return the deviations that an alert of this source is about."""
        key = CellKey(
            model=labels.get("model", ""),
            version=labels.get("version", ""),
            replica=labels.get("replica", ""),
            tenant=labels.get("tenant", ""),
        )
        return [each for of, each in self.monitor.deviations() if of == key]

    def _describe(self) -> list[AlertCondition]:
        grouped: defaultdict[CellKey, list[StreamDeviation]] = defaultdict(list)
        for key, deviation in self.monitor.deviations():
            grouped[key].append(deviation)
        return [self._describe_scope(key, found) for key, found in grouped.items()]

    def _describe_scope(self, key: CellKey, found: list[StreamDeviation]) -> AlertCondition:
        found.sort(key=lambda each: each.onset)
        sentences = [describe_deviation(each) for each in found[:MAX_SHOWN_EVENTS]]
        names = {
            "model": key.model,
            "replica": key.replica,
            "version": key.version,
            "tenant": key.tenant,
        }
        labels = {name: value for name, value in names.items() if value}
        if key.replica:
            summary = f"The replica {key.replica} behaves differently from its siblings"
            return AlertCondition(
                DEVIATION,
                labels,
                self._severity(DEVIATION),
                is_firing=True,
                summary=summary,
                description=" ".join(filter(None, sentences)),
                runbook="replicadeviates",
            )
        slices = self.monitor.slices(key.model, found[0].event, found[0].onset)
        if slices and not key.tenant:
            sentences.append(describe_slice(slices[0]))
        subject = (
            f"tenant {key.tenant} at the model {key.model}" if key.tenant else f"model {key.model}"
        )
        summary = f"The traffic of the {subject} has changed"
        return AlertCondition(
            DRIFT,
            labels,
            self._severity(DRIFT),
            is_firing=True,
            summary=summary,
            description=" ".join(filter(None, sentences)),
            runbook="trafficdrift",
        )

    def _severity(self, name: str) -> Severity:
        return "page" if name in self._read_config().page_for else "ticket"

    async def _accept_versions(self, now: float) -> None:
        try:
            accepted = await run_in_daemon_thread(self._read_accepted)
        except (StoreError, ValueError) as error:
            self._store_problem.report("traffic_versions_unreadable", str(error))
            return
        for each in accepted:
            if each.at > now - ACCEPTED_S:
                self.monitor.accept_version(each.model, each.version, each.at)

    async def _load(self) -> None:
        assert self._store is not None  # noqa: S101 - otherwise nothing is to load
        read = partial(self._store.read_documents, self._fleet, STATE_NAME)
        document = (await run_in_daemon_thread(read)).get(STATE_NAME)
        self._is_loaded = True
        if document is None:
            return
        try:
            state = msgspec.json.decode(document.content, type=MonitorState)
        except msgspec.MsgspecError as error:
            log.warning("traffic_baselines_unreadable", reason=str(error))
            return
        self.monitor = TrafficMonitor(state)

    async def _save(self, now: float) -> None:
        if self._store is None:
            return
        documents: dict[str, bytes] = {}
        if now - self._status_saved_at >= STATUS_INTERVAL_S:
            self._status_saved_at = now
            status = TrafficStatus(
                streams=self.monitor.statuses()[:MAX_STATUSES],
                learning=self.monitor.learning_models(),
                accepted=self.monitor.accepted,
            )
            documents[STATUS_NAME] = msgspec.json.encode(status)
        if now - self._state_saved_at >= STATE_INTERVAL_S:
            if self._state_saved_at:
                documents[STATE_NAME] = msgspec.json.encode(self.monitor.state)
            self._state_saved_at = now
        try:
            for name, content in documents.items():
                await run_in_daemon_thread(self._replace, name, content)
        except StoreError as error:
            self._store_problem.report("traffic_baselines_not_saved", str(error))

    def _replace(self, name: str, content: bytes) -> None:
        assert self._store is not None  # noqa: S101 - checked by the caller
        stored = self._store.read_documents(self._fleet, name).get(name)
        version = 0 if stored is None else stored.version
        self._store.replace_document(
            self._fleet, name, FleetDocument(version + 1, content), after=version
        )


def describe_deviation(deviation: StreamDeviation) -> str:
    """Return a sentence with the numbers of a deviation."""
    since = datetime.fromtimestamp(deviation.onset, UTC).strftime("%H:%M")
    if deviation.kind == "volume":
        return _describe_volume(deviation, since)
    what = next(each.description for each in EVENTS if each.name == deviation.event)
    usual = "of its siblings" if deviation.kind == "sibling" else "are usual at this hour"
    return (
        f"Since {since} UTC {deviation.share:.1%} of the requests {what}; "
        f"{deviation.expected:.1%} {usual}."
    )


def _describe_volume(deviation: StreamDeviation, since: str) -> str:
    """Return a sentence about a tenant that sends far more tokens than before."""
    usual = deviation.usual_tokens_per_s
    before = (
        f", {deviation.tokens_per_s / usual:.1f} times those of its busiest hour" if usual else ""
    )
    waiting = f" Requests of others wait {deviation.others_wait_s:.1f} s."
    return (
        f"Since {since} UTC it sends {deviation.tokens_per_s:.0f} tokens per second{before},"
        f" and takes {deviation.share:.0%} of those of the model."
        f"{waiting if deviation.others_wait_s >= MIN_SHOWN_WAIT_S else ''}"
    )


def describe_slice(found: Slice) -> str:
    """Return a sentence about a slice; empty unless it has clearly more of an excess than of the requests."""
    if found.excess_share - found.request_share < MIN_SHOWN_EXCESS:
        return ""
    subject = f"{found.dimension.capitalize()} {found.value or '-'}"
    return (
        f"{subject} has {min(found.excess_share, 1.0):.0%} of the excess; "
        f"without it the share is {found.share_elsewhere:.1%}."
    )
