"""Explanations of requests, from the gateway that served a request or else from the ledger.

An id made by a gateway ends with 32 hexadecimal digits, of which the first 8 are the gateway's id. The id of a request
without one of the client's own and the id of its response have the same digits.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import structlog

from argosy.gateway.peer_gateways import STORE_TIMEOUT_S, FindTrace, PeerGateways
from argosy.gateway.principal import Principal
from argosy.gateway.request_trace import CostTrace, RequestTrace
from argosy.policy import NO_CHARGE
from argosy.process import run_in_daemon_thread
from argosy.protocol import TokenUsage
from argosy.store import Ledger, StoreError, UsageRecord

MAX_CONCURRENT_SEARCHES = 8
"""Maximum number of requests that are searched outside this gateway at a time. Further searches wait."""
MAX_ASKED_GATEWAYS = 64
"""Maximum number of gateways that are asked about an id that names none of them."""

GATEWAY_ID_DIGITS = 8
RESPONSE_ID_PREFIXES = ("chatcmpl", "cmpl")
_DIALECT_ID = re.compile(r"(?:resp_|msg_)([0-9a-f]{32})")
_OWN_ID = re.compile(r"(?:req_|chatcmpl-|cmpl-)([0-9a-f]{32})")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class RequestExplainer:
    """Finds the explanation of a request in this gateway, another gateway of the store, or the ledger."""

    def __init__(
        self,
        gateway_id: str,
        find_trace: FindTrace,
        peers: PeerGateways | None,
        ledger: Ledger | None,
    ) -> None:
        self._gateway_id = gateway_id
        self._find_trace = find_trace
        self._peers = peers
        self._ledger = ledger
        self._search_slots = asyncio.Semaphore(MAX_CONCURRENT_SEARCHES)

    async def explain(
        self, identifier: str, organisation: str | None, project: str | None
    ) -> dict[str, Any] | None:
        """Return the explanation of a request.

        Args:
            identifier: Id of the request or of its response.
            organisation: Organisation of which requests are looked up. None for all.
            project: Project of which requests are looked up. None for all of the organisation.
        """
        identifier = canonical_id(identifier)
        owner = project or organisation
        found = self._find_trace(identifier, owner)
        if found is not None or self._peers is None or self._ledger is None:
            return found
        try:
            async with self._search_slots:
                return await self._ask_peers(
                    self._peers, identifier, owner
                ) or await self._read_ledger(self._ledger, identifier, organisation)
        except (StoreError, TimeoutError) as error:
            log.warning("explanation_incomplete", reason=str(error) or "the store does not respond")
            return None

    async def _ask_peers(
        self, peers: PeerGateways, identifier: str, owner: str | None
    ) -> dict[str, Any] | None:
        """Ask the gateway that the id names, or all if a client chose the id."""
        gateway = named_gateway(identifier)
        if gateway == self._gateway_id:
            return None
        asked = [
            peer for peer in await peers.list_others() if gateway is None or peer.id == gateway
        ]
        answers = await asyncio.gather(
            *(peers.ask(peer, identifier, owner) for peer in asked[:MAX_ASKED_GATEWAYS])
        )
        found = [answer for answer in answers if answer is not None]
        return max(found, key=_started_at, default=None)

    async def _read_ledger(
        self, ledger: Ledger, identifier: str, organisation: str | None
    ) -> dict[str, Any] | None:
        """Return a reduced explanation from the request's row in the ledger."""
        gateway, ids = named_gateway(identifier), possible_response_ids(identifier)
        if gateway is None:
            return None
        find = ledger.for_organisation(organisation).find_record
        async with asyncio.timeout(STORE_TIMEOUT_S):
            record = await run_in_daemon_thread(find, ids)
        return None if record is None else explain_record(record, gateway)


def explain_record(record: UsageRecord, gateway: str) -> dict[str, Any]:
    """Return what the ledger knows of a request, in the form of an explanation. Unknown values are None."""
    trace = RequestTrace(
        response_id=record.request,
        model=record.model,
        requested_model=record.asked,
        route_name=record.route,
        principal=Principal(record.organisation, record.project, record.key, record.user),
        started_at=record.started_at,
        ended_at=record.ended_at - record.started_at,
        tokens=TokenUsage(record.input_tokens, record.cached_tokens, record.output_tokens),
        cost=CostTrace(record.nano_dollars, NO_CHARGE),
        status=record.status,
    )
    trace.content = [
        {"side": side, "detector": name, "action": action, "count": int(count)}
        for side, name, action, count in map(str.split, filter(None, record.findings.split("; ")))
    ]
    known = trace.to_dict()
    return known | {
        "request_id": None,
        "gateway": gateway,
        "source": "ledger",
        "reason": f"The gateway {gateway} is gone, does not answer, or has no trace of the request any more.",
        "path": None,
        "stream": None,
        "caller": known["caller"] | {"tier": None},
        "ms": known["ms"] | {"read": None},
        "rule": None,
        "replica": record.replica or None,
        "ledger": known["ledger"] | {"rates": None},
    }


def _started_at(explanation: dict[str, Any]) -> float:
    started_at = explanation.get("started_at")
    return started_at if isinstance(started_at, float) else 0.0


def new_gateway_id() -> str:
    """Return a random id for a gateway process."""
    return secrets.token_hex(GATEWAY_ID_DIGITS // 2)


def canonical_id(identifier: str) -> str:
    """Return the id of a chat for the id of a response in another dialect, and other ids unchanged."""
    parsed = _DIALECT_ID.fullmatch(identifier)
    return identifier if parsed is None else f"{RESPONSE_ID_PREFIXES[0]}-{parsed[1]}"


def named_gateway(identifier: str) -> str | None:
    """Return the id of the gateway that made a request or response id, or None if a client chose the id."""
    parsed = _OWN_ID.fullmatch(identifier)
    return None if parsed is None else parsed[1][:GATEWAY_ID_DIGITS]


def possible_response_ids(identifier: str) -> list[str]:
    """Return the response ids that a request or response id may stand for, by which the ledger knows requests."""
    parsed = _OWN_ID.fullmatch(identifier)
    if parsed is None:
        return []
    if not identifier.startswith("req_"):
        return [identifier]
    return [f"{prefix}-{parsed[1]}" for prefix in RESPONSE_ID_PREFIXES]
