"""Evidence of a pool's rollout: the gate and what it compares with, which the next controller finds in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from argosy.deployment import (
    ROLLOUT_BASELINE_PREFIX,
    ROLLOUT_GATE_PREFIX,
    FleetRecords,
    ObjectivesConfig,
    decode_kind,
)
from argosy.policy.rollout import (
    EVENTS,
    Baseline,
    BaselineRecorder,
    Comparison,
    GateRecord,
    GateStep,
    GateVerdict,
    OutcomeBatch,
    RequestOutcome,
    RolloutGate,
    RolloutRecord,
    UserHistory,
    UserRates,
)
from argosy.policy.traffic import UserTraffic

MAX_SALT_KEYS = 1000
"""Users or sessions for which the salt is chosen: the heaviest. The choice takes about 0.5 s."""


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
    recorder = BaselineRecorder()
    for outcome in judged:
        recorder.record(outcome)
    baseline = recorder.freeze(*limits)
    users = UserHistory(baseline)
    for outcome in judged:
        users.record(outcome)
    rates = users.freeze()
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
    """Evidence of the rollouts of one pool. Not thread-safe: use it from one event loop.

    Args:
        records: Memory of the controllers, which it reads and updates.
        pool: Name of the pool.
    """

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
