"""Questions between the gateways of one store: the explanation of a request that another gateway served."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import msgspec
import structlog

from argosy.gateway.http_route import HttpRoute
from argosy.gateway.peer_connection import check_peer_token, send_signed
from argosy.gateway.principal import Principal
from argosy.gateway.upstream import UpstreamError
from argosy.http_server import HttpExchange, TlsConfig, listen_url
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import GatewayRecord, Store, StoreError

PEER_REQUESTS_PREFIX = "/peer/requests/"
HEARTBEAT_INTERVAL_S = 15.0
PEER_TIMEOUT_S = 2.0
"""Time in which another gateway must answer."""
STORE_TIMEOUT_S = 5.0
_REMOTE_ADDRESS = ("192.0.2.1", 9)
"""Address of a documentation network. Looking up its route sends nothing."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

FindTrace = Callable[[str, str | None], dict[str, Any] | None]
"""Returns the explanation that this gateway has of a request, by the id of the request and of the organisation or
project to which it must belong (None for any)."""


class PeerGateways:
    """This gateway's registration in the store, and its questions to the other gateways there."""

    def __init__(self, gateway_id: str, store: Store, url: str, tls: TlsConfig | None) -> None:
        self._gateway_id = gateway_id
        self._store = store
        self._url = url
        self._tls = tls
        self.secret = secrets.token_hex(32)
        """Key with which requests of other processes of the store to this gateway are signed."""
        self._is_failing = False
        """Whether the last heartbeat could not be recorded."""

    async def register(self) -> None:
        """Record a heartbeat in the store. A failure is logged once, and a later heartbeat may succeed."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await run_in_daemon_thread(self._record_heartbeat)
        except (StoreError, OSError, TimeoutError) as error:
            if not self._is_failing:
                reason = str(error) or "the store does not respond"
                log.warning("gateway_registration_failed", reason=reason)
            self._is_failing = True
        else:
            self._is_failing = False

    async def keep_registered(self) -> None:
        """Record heartbeats at regular intervals until cancelled, and then remove the record."""
        try:
            while True:
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
                await self.register()
        finally:
            await self._unregister()

    async def _unregister(self) -> None:
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                await run_in_daemon_thread(self._store.gateways.remove, self._gateway_id)
        except (StoreError, TimeoutError) as error:
            log.info("gateway_registration_left", reason=str(error) or "the store does not respond")

    def _record_heartbeat(self) -> None:
        certificate = "" if self._tls is None else Path(self._tls.certificate).read_text()
        self._store.gateways.record_heartbeat(
            GatewayRecord(
                id=self._gateway_id, url=self._url, secret=self.secret, certificate=certificate
            )
        )

    async def list_others(self) -> list[GatewayRecord]:
        """Return the other gateways that run. Raises StoreError, or TimeoutError if the store does not respond."""
        async with asyncio.timeout(STORE_TIMEOUT_S):
            running = await run_in_daemon_thread(self._store.gateways.list_running)
        return [record for record in running if record.id != self._gateway_id]

    async def ask(
        self, peer: GatewayRecord, identifier: str, owner: str | None
    ) -> dict[str, Any] | None:
        """Ask another gateway for the explanation of a request.

        Returns:
            The explanation. None if the gateway has none, or does not answer.
        """
        query = "" if owner is None else f"?owner={quote(owner, safe='')}"
        path = f"{PEER_REQUESTS_PREFIX}{quote(identifier, safe='')}{query}"
        body = await self.fetch(peer, path, _describe_question(identifier, owner))
        try:
            return None if body is None else msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            log.warning("peer_gateway_unreachable", gateway=peer.id, reason=str(error))
            return None

    async def fetch(
        self, peer: GatewayRecord, path: str, subject: str, method: str = "GET"
    ) -> bytes | None:
        """Send a signed request to another gateway.

        Returns:
            The body of the answer. None if the gateway does not answer, or not with 200.
        """
        try:
            status, body = await send_signed(
                peer, self._tls, method, path, subject=subject, timeout_s=PEER_TIMEOUT_S
            )
        except UpstreamError as error:
            log.warning("peer_gateway_unreachable", gateway=peer.id, reason=str(error))
            return None
        return body if status == 200 else None

    def build_route(self, find_trace: FindTrace) -> HttpRoute:
        """Return the route for signed questions of other gateways. To anyone else the path does not exist."""

        async def explain(exchange: HttpExchange, principal: Principal) -> None:
            del principal  # the signature authenticates the gateway
            identifier = unquote(exchange.path_parameters["id"])
            owner = parse_qs(exchange.query.decode("latin-1")).get("owner", [None])[0]
            check_peer_token(exchange, self.secret, _describe_question(identifier, owner))
            explanation = find_trace(identifier, owner)
            if explanation is None:
                raise ApiError(404, "not_found", "This gateway has no trace of the request.")
            await exchange.send_response(200, msgspec.json.encode(explanation))

        return HttpRoute("GET", PEER_REQUESTS_PREFIX + "{id...}", explain, is_public=True)


def advertised_url(listen_socket: socket.socket, scheme: str, configured: str | None) -> str:
    """Return the address at which other gateways reach this one.

    A socket that listens on all addresses is advertised with the address from which this machine reaches others.
    """
    if configured is not None:
        return configured
    url = listen_url(listen_socket, scheme)
    if listen_socket.family == socket.AF_UNIX:
        return url
    host, port = listen_socket.getsockname()[:2]
    if host not in {"0.0.0.0", "::"}:  # noqa: S104 - compares, does not listen
        return url
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_REMOTE_ADDRESS)
            return f"{scheme}://{probe.getsockname()[0]}:{port}"
        except OSError:
            return f"{scheme}://{socket.gethostname()}:{port}"


def _describe_question(identifier: str, owner: str | None) -> str:
    """Return what the token of a question signs."""
    scope = "all" if owner is None else f"owner {owner}"
    return f"{scope}\n{identifier}"
