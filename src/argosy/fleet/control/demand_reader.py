"""Demand for the models of a fleet, from the reports of its gateways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from argosy.gateway import DemandReport, ModelDemand

MAX_FIRST_SECONDS = 5
"""Seconds of a gateway's past that count when it is first seen."""


@dataclass(slots=True)
class FleetDemand:
    """Demand for one model at all gateways, since the last time."""

    arrived: list[float] = field(default_factory=list)
    """Tokens that arrived in each second, oldest first."""
    served_tokens: float = 0.0
    active_requests: int = 0
    """Requests in the queues or at replicas."""
    queued_requests: int = 0
    queued_tokens: float = 0.0
    queue_age_s: float = 0.0


class DemandReader:
    """Reads each second of each gateway once, although gateways count seconds by clocks of their own."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        """Number of the last second that was read of each gateway, by id."""

    def read(self, reports: Mapping[str, DemandReport]) -> dict[str, FleetDemand]:
        """Return the demand in the new seconds, by model.

        It takes the same number of seconds from each gateway, and leaves further ones for the next time.

        Args:
            reports: Latest report of each gateway, by id.
        """
        available: dict[str, int] = {}
        for gateway, report in reports.items():
            reported = min((len(model.arrived) for model in report.models), default=0)
            unread = report.second - self._read.get(gateway, report.second - MAX_FIRST_SECONDS)
            available[gateway] = max(0, min(unread, reported))
        seconds = min(available.values(), default=0)
        demands: dict[str, FleetDemand] = {}
        for gateway, report in reports.items():
            begin = -available[gateway]
            for model in report.models:
                demand = demands.setdefault(model.model, FleetDemand([0.0] * seconds))
                _add(demand, model, begin, seconds)
        self._read = {
            gateway: report.second - available[gateway] + seconds
            for gateway, report in reports.items()
        }
        return demands


def _add(demand: FleetDemand, model: ModelDemand, begin: int, seconds: int) -> None:
    if seconds:
        first = len(model.arrived) + begin
        for index, tokens in enumerate(model.arrived[first : first + seconds]):
            demand.arrived[index] += tokens
        demand.served_tokens += sum(model.served[first : first + seconds])
    demand.active_requests += model.active_requests
    demand.queued_requests += model.queued_requests
    demand.queued_tokens += model.queued_tokens
    demand.queue_age_s = max(demand.queue_age_s, model.queue_age_s)
