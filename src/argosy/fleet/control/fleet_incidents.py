"""Incidents of a declared fleet: the traffic at all gateways, and rollbacks of versions that cause them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from argosy.deployment import FleetControl, parse_declaration, read_rollouts
from argosy.fleet.control.gateway_publisher import GatewayPublisher
from argosy.gateway import OtherFleetError, UpstreamError
from argosy.policy.detection import AcceptedVersion, CellMinute
from argosy.policy.incidents import PoolVersions, RollbackAdvice
from argosy.policy.rollout import CommandKind, RolloutState
from argosy.protocol import ApiError
from argosy.store import FleetStore, GatewayRecord

_HAS_PASSED = frozenset({RolloutState.SOAKING, RolloutState.RETIRING, RolloutState.DONE})
_SERVES_CANDIDATE = frozenset({RolloutState.STEP, RolloutState.SOAKING})


class FleetTraffic:
    """Reads what the gateways of a fleet have counted. Use it from one event loop."""

    def __init__(self, publisher: GatewayPublisher) -> None:
        self._publisher = publisher
        self._read_until: dict[str, int] = {}
        """Start of the last minute of each gateway, by id."""

    async def read(self) -> Sequence[CellMinute]:
        """Return the minutes since the last call. A gateway that does not answer is read later."""
        gateways = self._publisher.reachable_gateways
        known = {gateway.id for gateway in gateways}
        self._read_until = {name: at for name, at in self._read_until.items() if name in known}
        answers = await asyncio.gather(*map(self._read_gateway, gateways))
        return [minute for answer in answers for minute in answer]

    async def _read_gateway(self, gateway: GatewayRecord) -> Sequence[CellMinute]:
        after = self._read_until.get(gateway.id, 0)
        try:
            minutes = await self._publisher.client.read_cells(gateway, after)
        except (UpstreamError, ApiError, OtherFleetError):
            return ()
        self._read_until[gateway.id] = max((each.start for each in minutes), default=after)
        return minutes


def read_pool_versions(store: FleetStore, fleet: str) -> list[PoolVersions]:
    """Return the pools with a rollout whose candidate serves users. Blocks on the store."""
    revision = store.latest_revision(fleet)
    if revision is None:
        return []
    models = {each.name: each.model for each in parse_declaration(revision).pools}
    found = []
    for report in read_rollouts(store, fleet):
        current = report.rollouts.current
        if current is None or current.active_state not in _SERVES_CANDIDATE:
            continue
        changes = [each.at for each in current.transitions if each.state in _SERVES_CANDIDATE]
        found.append(
            PoolVersions(
                pool=report.pool,
                model=models.get(report.pool, ""),
                rollout=current.id,
                candidate=current.candidate,
                changed_at=max(changes, default=current.state_since),
                is_warm=current.can_roll_back and not current.plan.replaces_in_place,
            )
        )
    return found


def read_accepted_versions(store: FleetStore, fleet: str) -> list[AcceptedVersion]:
    """Return the versions whose rollouts have passed their gates. Blocks on the store.

    One that had a step with both versions has passed when all users get it, and any other one when the old replicas are
    removed. A rollout that went on in spite of its gate has not.
    """
    revision = store.latest_revision(fleet)
    if revision is None:
        return []
    models = {each.name: each.model for each in parse_declaration(revision).pools}
    found = []
    for report in read_rollouts(store, fleet):
        current = report.rollouts.current
        if current is None or current.is_forced:
            continue
        states = _HAS_PASSED if current.plan.steps else _HAS_PASSED - {RolloutState.SOAKING}
        passed = [each.at for each in current.transitions if each.state in states]
        if current.active_state in states and passed:
            found.append(
                AcceptedVersion(
                    model=models.get(report.pool, ""),
                    version=current.candidate,
                    at=min(passed),
                )
            )
    return found


def roll_back(store: FleetStore, fleet: str, advice: RollbackAdvice, reason: str) -> None:
    """Abort a rollout. Blocks on the store. Raises as `FleetControl.command_rollout`."""
    FleetControl(fleet, store).command_rollout(
        advice.pool,
        CommandKind.ABORT,
        rollout=advice.rollout,
        reason=reason,
        force=False,
        actor="argosy",
    )
