"""Reads measurements of rollouts from the gateways of a fleet."""

from __future__ import annotations

import asyncio

from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.fleet.control.rollout_evidence import RolloutEvidence
from argosy.gateway import OtherFleetError, OutcomeQuery, OutcomeReport, UpstreamError
from argosy.policy.rollout import RequestOutcome
from argosy.protocol import ApiError
from argosy.store import GatewayRecord

POLL_INTERVAL_S = 1.0


class OutcomePoller:
    """Reads the measurements of the pools with a rollout. Not thread-safe: use it from one event loop.

    Args:
        publisher: Knows the gateways.
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
