"""Keeping of adapters: those that replicas shall have are loaded before a request needs them."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import NamedTuple

import msgspec
import structlog

from argosy.gateway.backends import parse_error_message
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.proxy.adapter_loading import (
    INVALID_ADAPTER,
    LOAD_TIMEOUT_S,
    AdapterUnavailableError,
    InvalidAdapterError,
    load_adapter,
    unload_adapter,
)
from argosy.gateway.upstream import UpstreamError, fetch_response
from argosy.protocol import JSON_MEDIA_TYPE

CHECK_INTERVAL_S = 5.0
RETRY_INTERVAL_S = 60.0
"""Time after which an adapter that a replica has evicted, or could not load, is loaded again."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class AdapterFailure(NamedTuple):
    """Why an adapter could not be loaded."""

    reason: str
    is_final: bool
    """Whether its files are at fault, so that no replica can load it."""


class AdapterKeeper:
    """Loads the adapters that are pinned, frequent or have a minimum of replicas at the replicas that lack them.

    Servers of other engines are also sent an unload call for what no name stands for any more. Native replicas evict
    it when they need the memory.
    """

    def __init__(self, models: ModelRouter) -> None:
        self._models = models
        self._loaded_at: dict[tuple[ReplicaEndpoint, str], float] = {}
        """When a replica was last sent a load for an adapter."""
        self._refused_at: dict[tuple[ReplicaEndpoint, str], float] = {}
        """When a replica last failed to unload one."""
        self._failures: dict[str, AdapterFailure] = {}
        """Last failure by digest, until the adapter is loaded or not wanted any more."""

    def find_failure(self, digest: str) -> AdapterFailure | None:
        """Return why an adapter that replicas shall keep could not be loaded; None if it could, or was not tried."""
        return self._failures.get(digest)

    async def run(self) -> None:
        """Check the replicas often. Runs until it is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Unload what is not wanted, and load what is missing, one adapter after another.

        So requests find room to load theirs.
        """
        now = time.monotonic()
        self._loaded_at, self._refused_at = (
            {key: at for key, at in times.items() if now - at < RETRY_INTERVAL_S}
            for times in (self._loaded_at, self._refused_at)
        )
        for replica, digest in self._models.find_unwanted_adapters():
            if (replica, digest) not in self._refused_at:
                await self._unload(replica, digest, now)
        missing = self._models.find_missing_adapters(now)
        wanted = {digest for _, digest in missing}
        self._failures = {key: each for key, each in self._failures.items() if key in wanted}
        for replica, digest in missing:
            if (replica, digest) not in self._loaded_at:
                self._loaded_at[replica, digest] = now
                try:
                    await _load(replica, digest)
                except (AdapterUnavailableError, UpstreamError, TimeoutError) as error:
                    reason = str(error) or "it took too long"
                    is_final = isinstance(error, InvalidAdapterError)
                    self._failures[digest] = AdapterFailure(reason, is_final)
                    log.warning(
                        "adapter_not_kept", replica=replica.name, adapter=digest, reason=reason
                    )

    async def _unload(self, replica: ReplicaEndpoint, digest: str, now: float) -> None:
        try:
            await unload_adapter(replica, digest)
        except AdapterUnavailableError as error:
            self._refused_at[replica, digest] = now
            log.warning(
                "adapter_not_unloaded", replica=replica.name, adapter=digest, reason=str(error)
            )
        else:
            log.info("adapter_unloaded", replica=replica.name, adapter=digest)


async def _load(replica: ReplicaEndpoint, digest: str) -> None:
    """Let a replica load an adapter. A native one loads it for a request of one token.

    Raises:
        AdapterUnavailableError: It cannot load the adapter.
        UpstreamError: It cannot be reached.
        TimeoutError: It takes too long.
    """
    if not replica.is_native:
        await load_adapter(replica, digest)
        return
    body = msgspec.json.encode({"model": digest, "prompt": "Hi", "max_tokens": 1})
    headers = ((b"content-type", JSON_MEDIA_TYPE.encode()),)
    request = replica.upstream.build_request(b"POST", b"/v1/completions", body, headers)
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        status, answer = await fetch_response(replica.upstream, request)
    if status != HTTPStatus.OK:
        reason = f"status {status}: {parse_error_message(answer)}"
        is_invalid = status == HTTPStatus.BAD_REQUEST and INVALID_ADAPTER in answer
        raise (InvalidAdapterError if is_invalid else AdapterUnavailableError)(reason)
    log.info("adapter_kept", replica=replica.name, adapter=digest)
