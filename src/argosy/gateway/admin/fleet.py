"""Endpoints for the declared fleet that a gateway belongs to: its event log."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.process import run_in_daemon_thread
from argosy.store import FleetEvent

POLL_INTERVAL_S = 0.5

endpoints = AdminEndpoints()


class FleetEventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the event log."""

    after: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of the last event that the caller has. 0 returns the latest events."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    replica: Annotated[str, Meta(max_length=200)] | None = None
    """Only events of this replica."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """How long to wait for an event if there is none after `after`."""


class FleetEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Events of controllers, oldest first."""

    fleet: str
    data: list[FleetEvent]
    last: int
    """Value for `after` of the next request."""


@endpoints.register(
    "GET",
    "/admin/events",
    "viewer",
    "gateway",
    query_type=FleetEventsQuery,
    is_nonblocking=True,
    is_long_poll=True,
)
async def list_fleet_events(scope: AdminScope, request: AdminRequest) -> FleetEvents:
    """List or await what the controllers of the gateway's fleet did, and why."""
    query, (fleet, store) = request.query, scope.fleet
    read_events = partial(
        store.list_events, fleet, after=query.after, limit=query.limit, replica=query.replica
    )
    deadline = time.monotonic() + query.wait_s
    while True:
        async with scope.limiter.slot(request.principal):
            events = await run_in_daemon_thread(read_events)
        if events or time.monotonic() >= deadline:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    last = events[-1].number if events else query.after
    return FleetEvents(fleet=fleet, data=events, last=last)
