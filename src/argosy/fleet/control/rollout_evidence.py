"""Evidence of a pool's rollout: measurements of the gateways, the gate that compares them, and the error budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.deployment import (
    ROLLOUT_BASELINE_PREFIX,
    ROLLOUT_GATE_PREFIX,
    FleetRecords,
    ObjectiveReader,
    ObjectivesConfig,
    decode_kind,
)
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.gateway import OtherFleetError, OutcomeQuery, OutcomeReport, UpstreamError
from argosy.policy.rollout import (
    EVENTS,
    Baseline,
    Comparison,
    GateRecord,
    GateStep,
    GateVerdict,
    OutcomeBatch,
    RequestOutcome,
    RolloutGate,
    RolloutRecord,
    UserRates,
    freeze_history,
)
from argosy.policy.traffic import UserTraffic
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import GatewayRecord, Ledger

MAX_SALT_KEYS = 1000
"""Users or sessions for which the salt is chosen: the heaviest. The choice takes about 0.5 s."""
POLL_INTERVAL_S = 1.0
BUDGET_WINDOW_S = 86_400.0
MAX_BUDGET_RECORDS = 50_000
"""Records of the ledger that are read, which bounds the work for busy fleets."""
MIN_BUDGET_REQUESTS = 100
"""Fewer requests of the model say nothing about its budget."""
BUDGET_INTERVAL_S = 60.0
_FAILURES = ("failed", "interrupted")
_SERVED = ("completed", "cancelled", "stopped", *_FAILURES)


class RolloutBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds and rates that the candidate is compared with, frozen before it gets traffic."""

    rollout: str = ""
    baseline: Baseline = Baseline()
    rates: UserRates = UserRates()


class TrafficHistory(NamedTuple):
    """Recent requests of the stable version, summarised."""

    baseline: Baseline
    rates: UserRates
    traffic: tuple[UserTraffic, ...]
    """Heaviest users or sessions first."""


def summarise_history(
    outcomes: Sequence[RequestOutcome], objectives: ObjectivesConfig
) -> TrafficHistory:
    """Summarise recent requests of the stable version at the start of a rollout."""
    limits = objectives.ttft_p95_s, objectives.itl_p95_s
    judged = [each.judge_objective(*limits) for each in outcomes]
    baseline, rates = freeze_history(judged, *limits)
    requests = Counter(each.key for each in judged if each.is_valid)
    by_user = [index for index, event in enumerate(EVENTS) if event.by_user]
    traffic = tuple(
        UserTraffic(
            key=key,
            weights=(float(count), *(count * rates.expected(key, event) for event in by_user)),
        )
        for key, count in requests.most_common(MAX_SALT_KEYS)
    )
    return TrafficHistory(baseline, rates, traffic)


class RolloutEvidence:
    """Evidence of the rollouts of one pool. Not thread-safe: use it from one event loop."""

    def __init__(self, records: FleetRecords, pool: str) -> None:
        self._records = records.rollouts
        self._gate_name = f"{ROLLOUT_GATE_PREFIX}{pool}"
        self._baseline_name = f"{ROLLOUT_BASELINE_PREFIX}{pool}"
        self._frozen = decode_kind(self._records, ROLLOUT_BASELINE_PREFIX, RolloutBaseline).get(
            pool
        )
        record = decode_kind(self._records, ROLLOUT_GATE_PREFIX, GateRecord).get(pool)
        self._gate = None if record is None else RolloutGate(record)
        self._encoded = self._acknowledged = {} if record is None else dict(record.sequences)
        self._has_changed = False

    def start(self, record: RolloutRecord, history: TrafficHistory | None) -> None:
        """Freeze what the candidate of a new rollout is compared with."""
        self._frozen = RolloutBaseline(rollout=record.id)
        if history is not None:
            self._frozen = RolloutBaseline(
                rollout=record.id, baseline=history.baseline, rates=history.rates
            )
        self._records[self._baseline_name] = msgspec.json.encode(self._frozen)
        self._gate = RolloutGate.start(
            record.id,
            record.plan.gate,
            record.plan.num_gate_starts,
            self._frozen.baseline.miss_rate,
        )
        self._has_changed = True
        self.encode()
        self._acknowledged = self._encoded

    def has(self, rollout: str) -> bool:
        """Return whether it is about a rollout."""
        return self._gate is not None and self._gate.record.rollout == rollout

    def verdict(self, now: float) -> GateVerdict | None:
        """Return the verdict; None before the first step."""
        if self._gate is None or self._gate.record.step is None:
            return None
        return self._gate.verdict(now)

    def add(self, batches: Sequence[OutcomeBatch]) -> None:
        """Count batches. Those that are known already are ignored."""
        if self._gate is not None:
            for batch in batches:
                self._has_changed |= self._gate.add(batch)

    def acknowledged(self, gateway: str) -> int:
        """Return the number of the last batch of a gateway that the store has."""
        return self._acknowledged.get(gateway, 0)

    def encode(self) -> None:
        """Put the gate into the records, from which it is saved."""
        if self._gate is not None and self._has_changed:
            self._records[self._gate_name] = msgspec.json.encode(self._gate.record)
            self._encoded, self._has_changed = dict(self._gate.record.sequences), False

    def on_saved(self) -> None:
        """Record that the store has what was encoded last."""
        self._acknowledged = self._encoded

    def open_step(
        self, record: RolloutRecord, step: GateStep, objectives: ObjectivesConfig, now: float
    ) -> Comparison | None:
        """Open a step of the gate, and return what the gateways shall measure for it; None without evidence."""
        gate = self._gate
        if gate is None:
            return None
        if gate.record.step is None or gate.record.step.index != step.step:
            gate.open_step(step.step, step.share, now)
            self._has_changed = True
        assert gate.record.step is not None  # noqa: S101 - it was opened above
        return Comparison(
            rollout=record.id,
            candidate=record.candidate,
            step=step.step,
            share=gate.record.step.share,
            num_gate_starts=gate.record.num_starts,
            settings=gate.record.settings,
            baseline=Baseline() if self._frozen is None else self._frozen.baseline,
            rates=UserRates() if self._frozen is None else self._frozen.rates,
            max_ttft_s=objectives.ttft_p95_s,
            max_time_per_token_s=objectives.itl_p95_s,
        )


class OutcomePoller:
    """Reads the measurements of the pools with a rollout. Not thread-safe: use it from one event loop.

    Args:
        wake: Set after each round with new batches.
    """

    def __init__(self, publisher: GatewayPublisher, wake: asyncio.Event) -> None:
        self._publisher = publisher
        self._wake = wake
        self.sources: dict[str, tuple[str, RolloutEvidence]] = {}
        """Running rollouts by the name of the model, each with its id and its evidence."""
        self._processes: dict[str, str] = {}
        """Id of the process in the last report of each gateway."""
        self._longest: dict[tuple[str, str], float] = {}
        """Longest request by model and gateway."""

    def longest_request_s(self, model: str) -> float:
        """Return the duration of the longest recent request for a model."""
        return max(
            (
                self._longest.get((model, gateway.id), 0.0)
                for gateway in self._publisher.reachable_gateways
            ),
            default=0.0,
        )

    async def read_history(self, model: str) -> list[RequestOutcome]:
        """Return recent requests of the stable version, of all gateways that answer."""
        query = OutcomeQuery(model=model, wants_history=True)
        gateways = self._publisher.reachable_gateways
        reports = await asyncio.gather(*(self._read(gateway, query) for gateway in gateways))
        return [outcome for report in reports if report is not None for outcome in report.history]

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            gateways = self._publisher.reachable_gateways
            self._forget_others({gateway.id for gateway in gateways})
            await asyncio.gather(
                *(
                    self._poll(gateway, model, rollout, evidence)
                    for model, (rollout, evidence) in list(self.sources.items())
                    for gateway in gateways
                )
            )
            await asyncio.sleep(POLL_INTERVAL_S)

    def _forget_others(self, gateways: set[str]) -> None:
        """Forget the gateways that are gone or do not answer."""
        for gateway in self._processes.keys() - gateways:
            del self._processes[gateway]
        for key in [key for key in self._longest if key[1] not in gateways]:
            del self._longest[key]

    async def _poll(
        self, gateway: GatewayRecord, model: str, rollout: str, evidence: RolloutEvidence
    ) -> None:
        process = self._processes.get(gateway.id, "")
        query = OutcomeQuery(
            model=model, rollout=rollout, gateway=process, after=evidence.acknowledged(process)
        )
        report = await self._read(gateway, query)
        if report is None:
            return
        self._processes[gateway.id] = report.gateway
        self._longest[model, gateway.id] = report.longest_request_s
        if report.batches:
            evidence.add(report.batches)
            self._wake.set()

    async def _read(self, gateway: GatewayRecord, query: OutcomeQuery) -> OutcomeReport | None:
        """Return the report of a gateway; None if it has none. Its silence makes the gate inconclusive."""
        try:
            return await self._publisher.client.read_outcomes(gateway, query)
        except (UpstreamError, ApiError, OtherFleetError):
            return None


class ErrorBudgetReader:
    """Reads budgets of models at an interval. Not thread-safe: use it from one event loop.

    They are those of the objectives of a model. A model without any has an estimate from the ledger.
    """

    def __init__(self, ledger: Ledger, objectives: ObjectiveReader) -> None:
        self._ledger = ledger
        self._objectives = objectives
        self._budgets: dict[str, tuple[float, float | None]] = {}
        """Time of reading and remaining budget of each model."""

    async def read(
        self,
        model: str,
        objectives: ObjectivesConfig,
        max_miss_rate: float | None,
        now: float,
    ) -> float | None:
        """Return the remaining part of the error budget, from 1 to below 0; None if it is not known.

        It is the smallest one of the `slos` that name the model. For the estimate from the ledger requests count that
        ended in the last 24 h, at most `MAX_BUDGET_RECORDS` of all models. A request that failed, or ended with its
        gateway, is a miss. The ledger has no latencies, so slow requests do not count.

        `max_miss_rate` is the part of the requests that may miss, for the estimate; None permits none.

        Raises:
            StoreError: The store cannot be used.
        """
        declared = objectives.build_objectives()
        if any(each.model == model for each in declared):
            budgets = await run_in_daemon_thread(self._objectives.read_budgets, declared, now)
            known = [
                each for name, each in budgets.items() if name.model == model and each is not None
            ]
            return min(known, default=None)
        if max_miss_rate is None:
            return None
        read_at, budget = self._budgets.get(model, (float("-inf"), None))
        if now - read_at >= BUDGET_INTERVAL_S:
            counts = await run_in_daemon_thread(
                self._ledger.count_recent, model, now - BUDGET_WINDOW_S, MAX_BUDGET_RECORDS
            )
            requests = sum(counts.get(status, 0) for status in _SERVED)
            misses = sum(counts.get(status, 0) for status in _FAILURES)
            budget = (
                None
                if requests < MIN_BUDGET_REQUESTS
                else 1.0 - misses / (max_miss_rate * requests)
            )
            self._budgets[model] = now, budget
        return budget
