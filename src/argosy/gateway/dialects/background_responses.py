"""Responses that run in the background: without the client's connection, watched by heartbeats in the store.

A repeated request with an idempotency key gets the response of the first one, as it is now.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog

from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER, check_existing_claim, scope_key
from argosy.gateway.http_route import Handler
from argosy.gateway.principal import Principal
from argosy.http_server import (
    JSON_CONTENT_TYPE,
    ClientListener,
    HttpExchange,
    ResponseTransport,
    run_handler,
)
from argosy.policy import MemoryEntry, TenantMemory
from argosy.protocol import EVENT_END, ApiError
from argosy.protocol.dialects import (
    ResponsesRequest,
    parse_error_body,
    render_end_event,
    render_stored_events,
)
from argosy.store import CachedResponse, IdempotencyStore, InFlightClaim, StoredResponse

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

HEARTBEAT_INTERVAL_S = 15.0
COUNTED_BYTES = 64 * 1024
"""Bytes of events that are counted at a time."""
MAX_RUNNING = 256
"""Maximum number of background responses of one gateway."""


class EventLog(ResponseTransport):
    """Connection of a background response, which keeps the events for clients that follow."""

    is_disconnected = False

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.has_ended = False
        self.error: ApiError | None = None
        """Error response, if the response failed before its first event."""
        self._listener: ClientListener | None = None
        self._changed = asyncio.Event()
        self.reserve_bytes: Callable[[int], bool] = lambda _: True
        """Counts more bytes as memory of the tenant. Returns False if they are too many."""
        self._uncounted_bytes = 0

    async def wait_changed(self, count: int) -> None:
        """Wait until there are more than `count` events, or the response has ended."""
        while len(self.events) <= count and not self.has_ended:
            self._changed.clear()
            await self._changed.wait()

    def cancel(self) -> bool:
        """Cancel the request as if the client had disconnected. Returns False if it does not run yet."""
        self.is_disconnected = True
        if self._listener is None:
            return False
        self._listener.on_disconnect()
        return True

    def add_failure(self, response: dict[str, Any]) -> None:
        """Add the events of a response that failed without an event that says so."""
        if self.events:
            self.events.append(render_end_event(response, len(self.events)))
        else:
            self.events += render_stored_events(response)

    def end(self) -> None:
        """Mark the end of the response, also if it failed."""
        self.has_ended = True
        self._changed.set()

    def send_response(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:  # noqa: ARG002 - only errors come whole
        self.error = parse_error_body(status, body)

    def write_nowait(self, data: bytes) -> None:
        if data.startswith(b":") or self.error is not None:
            return
        self._uncounted_bytes += len(data)
        if self._uncounted_bytes >= COUNTED_BYTES:
            if not self.reserve_bytes(self._uncounted_bytes):
                self.fail(out_of_memory_error())
                return
            self._uncounted_bytes = 0
        self.events += [event + EVENT_END for event in data.split(EVENT_END) if event]
        self._changed.set()

    def fail(self, error: ApiError) -> bool:
        """Cancel the request with an error. Returns False if it does not run yet."""
        self.error = error
        return self.cancel()

    def set_listener(self, listener: ClientListener | None) -> None:
        self._listener = listener


class BackgroundResponses:
    """Background responses of this gateway. Not thread-safe: use it from one event loop.

    Args:
        state: The stored responses.
        chat: Handler of chats.
        memory: Memory of tenants, in which requests and events of running responses count.
    """

    def __init__(self, state: ResponseState, chat: Handler, memory: TenantMemory) -> None:
        self._state = state
        self._chat = chat
        self.memory = memory
        self._reservations: dict[str, MemoryEntry] = {}
        """Memory of responses that run or are about to, by id."""
        self._logs: dict[str, EventLog] = {}
        """Events of running responses by id."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def find_log(self, response_id: str) -> EventLog | None:
        """Return the events of a response that runs on this gateway."""
        return self._logs.get(response_id)

    def check_capacity(self) -> None:
        """Raise ApiError (503) if too many responses run."""
        if len(self._tasks) >= MAX_RUNNING:
            message = "Too many background responses are running. Try again later."
            raise ApiError(503, "overloaded", message, retry_after_s=HEARTBEAT_INTERVAL_S)

    def reserve(
        self, response_id: str, principal: Principal, event_log: EventLog, size_bytes: int
    ) -> None:
        """Reserve memory for a response until it has ended, or `release` is called.

        Args:
            response_id: Id of the response.
            principal: Its sender.
            event_log: Receives its events, which count too.
            size_bytes: Size of the request.

        Raises:
            ApiError: 429 if the tenant keeps too much.
        """
        entry = MemoryEntry(principal.tenant, response_id, size_bytes, self._on_evicted)
        if not self.memory.add(entry):
            raise out_of_memory_error()
        self._reservations[response_id] = entry
        event_log.reserve_bytes = lambda count: self.memory.resize(entry, entry.size_bytes + count)

    def release(self, response_id: str) -> None:
        """Release the memory of a response."""
        if response_id in self._reservations:
            self.memory.remove(self._reservations.pop(response_id))

    def _on_evicted(self, response_id: str) -> None:
        event_log, task = self._logs.get(response_id), self._tasks.get(response_id)
        if event_log is not None and not event_log.fail(out_of_memory_error()) and task is not None:
            task.cancel()

    def start(
        self,
        exchange: HttpExchange,
        event_log: EventLog,
        principal: Principal,
        response: StoredResponse,
    ) -> None:
        """Run a stored response.

        Args:
            exchange: The request, detached from its connection, whose response is translated.
            event_log: The connection of `exchange`.
            principal: Sender of the request.
            response: The response as it is stored.
        """
        response_id = response.id
        self._logs[response_id] = event_log
        task = asyncio.create_task(self._run(exchange, event_log, principal, response))
        self._tasks[response_id] = task
        task.add_done_callback(partial(self._on_ended, response_id, event_log))

    async def _run(
        self,
        exchange: HttpExchange,
        event_log: EventLog,
        principal: Principal,
        response: StoredResponse,
    ) -> None:
        try:
            await run_handler(exchange, self._chat(exchange, principal))
        finally:
            del self._logs[response.id]
            if not exchange.response_complete or event_log.error is not None:
                await self._record_failure(exchange, event_log, principal, response)

    def _on_ended(self, response_id: str, event_log: EventLog, _: asyncio.Task[None]) -> None:
        """Forget a response, also one that was cancelled before it began."""
        self._logs.pop(response_id, None)
        del self._tasks[response_id]
        self.release(response_id)
        event_log.end()

    async def _record_failure(
        self,
        exchange: HttpExchange,
        event_log: EventLog,
        principal: Principal,
        response: StoredResponse,
    ) -> None:
        """Store that a response failed, and add it to the events. Has no effect if it was cancelled."""
        error = _describe_failure(exchange, event_log)
        failed = msgspec.structs.replace(
            response, status="failed", body=response.body | {"error": error}
        )
        finish, owner = self._state.store.responses.finish, item_owner(principal)
        try:
            has_failed = await self._state.call(
                finish, owner, failed.id, failed.status, failed.body, []
            )
        except ApiError as store_error:
            log.warning("response_not_stored", response=failed.id, reason=store_error.message)
            has_failed = True
        if has_failed:
            event_log.add_failure(failed.render())

    def cancel(self, response_id: str) -> None:
        """Stop a response if it runs on this gateway."""
        event_log, task = self._logs.get(response_id), self._tasks.get(response_id)
        if event_log is not None and task is not None and not event_log.cancel():
            task.cancel()

    async def wait_until_idle(self) -> None:
        """Wait until no response runs."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Stop all responses and store that they failed."""
        for response_id in self._logs:
            self._tasks[response_id].cancel()
        await self.wait_until_idle()

    async def watch_forever(self) -> None:
        """Record heartbeats, stop responses that were cancelled elsewhere, and fail those of gateways that stopped.

        Runs until it is cancelled.
        """
        responses = self._state.store.responses
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            running = list(self._tasks)
            try:
                if running:
                    kept = await self._state.call(responses.record_heartbeats, running)
                    for response_id in set(running) - kept:
                        self.cancel(response_id)
                failed = await self._state.call(responses.fail_interrupted)
            except ApiError:
                continue  # logged by the state
            if failed:
                log.warning("background_responses_interrupted", count=failed)


def out_of_memory_error() -> ApiError:
    """Return the error of a request whose tenant keeps too much memory."""
    message = (
        "The responses of your project that run in the background take too much memory. Wait until some have ended, or "
        "send smaller requests."
    )
    return ApiError(429, "overloaded", message, retry_after_s=HEARTBEAT_INTERVAL_S)


def _describe_failure(exchange: HttpExchange, event_log: EventLog) -> dict[str, str]:
    code = exchange.error_code or "server_error"
    reason = "" if event_log.error is None else f": {event_log.error.message}"
    message = f"The response could not be completed ({code}){reason or '.'}"
    return {"code": "server_error", "message": message}


class BackgroundClaim(NamedTuple):
    """Claim on a key by the first request that has it, until its response is stored."""

    store: IdempotencyStore
    scoped_key: str
    claim: InFlightClaim

    def settle(self, *, is_started: bool) -> None:
        """Keep the id of the response for repeated requests, or free the key."""
        claim = self.claim
        started = CachedResponse(claim.request_id, claim.request_digest, JSON_CONTENT_TYPE, b"")
        self.store.settle_claim(self.scoped_key, claim, started if is_started else None)


async def claim_background_key(
    store: IdempotencyStore | None,
    exchange: HttpExchange,
    principal: Principal,
    request: ResponsesRequest,
    response_id: str,
) -> BackgroundClaim | str | None:
    """Claim the key of a request for a background response.

    Args:
        store: Keys in use; None to ignore keys.
        exchange: The request.
        principal: Sender of the request.
        request: Its body.
        response_id: Id of the response if the request is the first with its key.

    Returns:
        The claim; the id of the first request's response; or None for a request without a key.

    Raises:
        ApiError: 400 if the key is invalid. 409 while the first request starts its response. 422 if the first request
            was a different one.
    """
    key = exchange.headers.get(IDEMPOTENCY_KEY_HEADER)
    if key is None or store is None:
        return None
    digest = hashlib.sha256(exchange.path.encode() + b"\0" + msgspec.json.encode(request)).digest()
    scoped_key, claim = scope_key(principal, key), InFlightClaim(response_id, digest)
    existing = await store.claim(scoped_key, claim)
    if existing is None:
        return BackgroundClaim(store, scoped_key, claim)
    return check_existing_claim(existing, claim).request_id
