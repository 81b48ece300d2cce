"""State that the handlers of both batch APIs share: ids, idempotency keys, and the store behind the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from argosy.gateway.dialects import ResponseState, item_owner
from argosy.gateway.filters import IDEMPOTENCY_KEY_HEADER
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.store import Batch, BatchDetails, BatchLine, BatchStatus, ConflictError

MAX_MODELS = 20
"""Models that the lines of one batch may name."""
RETRY_AFTER_S = 60.0
CREATION_TIMEOUT_S = 60.0
"""Time in which the lines of a large batch are stored."""


class BatchState:
    """Creates and cancels batches. Not thread-safe: use it from one event loop.

    Args:
        state: The store, and limits that requests count against.
        models: The models.
    """

    def __init__(self, state: ResponseState, models: ModelRouter) -> None:
        self.state = state
        self._models = models

    def check_models(self, names: Iterable[str], principal: Principal) -> tuple[str, ...]:
        """Return the models of a batch, each once.

        Raises:
            ApiError: 404 or 403 if one does not exist for the principal. 400 if there are too many.
        """
        models = tuple(dict.fromkeys(names))
        if len(models) > MAX_MODELS:
            message = f"The lines name {len(models)} models. Send at most {MAX_MODELS} per batch."
            raise ApiError(400, "invalid_value", message)
        for name in models:
            self._models.find_target(name, principal, {})
        return models

    async def create(
        self,
        exchange: HttpExchange,
        principal: Principal,
        prefix: str,
        details: BatchDetails,
        *,
        window_s: float,
        request: bytes,
        lines: Sequence[BatchLine] = (),
    ) -> Batch:
        """Store a batch, or find the one that the first request with the same idempotency key has created.

        Args:
            exchange: The request.
            principal: Its sender.
            prefix: Beginning of the batch's id.
            details: Facts about the batch.
            window_s: Its completion window.
            request: Body of the request, by which a repeated one is known.
            lines: Its lines. A batch without any is validated first.

        Raises:
            ApiError: 422 if the key was used with another request. 429 if the owner has too many open batches. Errors
                of `ResponseState.call` besides.
        """
        owner, now = item_owner(principal), time.time()
        key = exchange.headers.get(IDEMPOTENCY_KEY_HEADER)
        unique = secrets.token_bytes(32)
        if key is not None:
            unique = "\0".join((*owner, prefix, key.decode("latin-1"))).encode()
        batch_id = prefix + hashlib.sha256(unique).hexdigest()[:32]
        digest = hashlib.sha256(request).hexdigest()
        batch = Batch(
            id=batch_id,
            **owner._asdict(),
            created_at=now,
            expires_at=now + window_s,
            status="in_progress" if lines else "validating",
            details=msgspec.structs.replace(
                details,
                key=principal.key,
                user=principal.user,
                request_digest=digest,
                in_progress_at=now if lines else None,
            ),
        )
        create = partial(self.state.store.batches.create, batch, lines)
        try:
            with self.state.translate_errors():
                async with asyncio.timeout(CREATION_TIMEOUT_S):
                    stored = await run_in_daemon_thread(create)
        except ConflictError as error:
            raise ApiError(
                429, "too_many_batches", str(error), retry_after_s=RETRY_AFTER_S
            ) from error
        if stored.details.request_digest != digest:
            message = "The idempotency key was used with another request. Use a new key."
            raise ApiError(422, "idempotency_key_reused", message)
        return stored

    async def cancel(self, principal: Principal, batch_id: str) -> Batch:
        """Cancel a batch.

        Raises:
            ApiError: 404 if there is none, 409 if it has ended.
        """
        try:
            return await self.state.call(
                self.state.store.batches.cancel, item_owner(principal), batch_id
            )
        except ConflictError as error:
            raise ApiError(409, "batch_not_cancellable", str(error)) from error


def find_end_status(batch: Batch) -> BatchStatus:
    """Return the status with which a batch ends whose lines have ended."""
    if batch.status == "cancelling":
        return "cancelled"
    return "expired" if batch.closed else "completed"
