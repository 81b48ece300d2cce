"""Adapters at replicas: the calls of other engines, and the check that a response is that of the adapter.

A native replica loads an adapter when a request names its digest. vLLM and SGLang are sent a load call before the first
such request, and again after a restart. A replica that lacks the adapter only counts as unsuitable for the request: the
adapter of one tenant must not take a replica away from the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import msgspec
import structlog

from argosy.gateway.backends import parse_error_message
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.proxy.upstream_call import UnsuitableReplicaError, UpstreamRefusedError
from argosy.gateway.upstream import UpstreamError, fetch_response
from argosy.protocol import ADAPTER_HEADER, JSON_MEDIA_TYPE, invalid_request

LOAD_TIMEOUT_S = 60.0
RELOAD_INTERVAL_S = 10.0
"""Time for which a failed load call of a replica is not repeated."""
INVALID_ADAPTER = b'"invalid_adapter"'
"""Error code of a native replica for files that no replica can serve, as its responses contain it."""
ADAPTER_ERRORS = (b'"adapter_load_failed"', INVALID_ADAPTER, b'"model_not_found"')
"""Error codes of a native replica that cannot load an adapter, as its responses contain them."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class AdapterUnavailableError(UnsuitableReplicaError):
    """The replica does not have the adapter. The message says why."""


class InvalidAdapterError(AdapterUnavailableError):
    """The files of the adapter are at fault, so that no replica can load it."""


class AdapterLostError(UpstreamRefusedError):
    """The server has restarted without the adapter. That says nothing about its health."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.outcome = None


def find_replicas_without_adapters(pool: Pool) -> set[str]:
    """Return the names of the replicas that cannot load adapters by name.

    Raises:
        ApiError(400): No replica of the pool can.
    """
    unsuitable = {name for name, replica in pool.replicas.items() if not replica.may_load_adapters}
    if unsuitable and len(unsuitable) == len(pool.replicas):
        message = (
            f"No replica of {pool.model!r} can load adapters. Serve it with the engine argosy, vllm or sglang, "
            "or request the base model."
        )
        raise invalid_request(message, "model", "adapters_not_supported")
    return unsuitable


AdapterLoad = asyncio.Task[str]
"""Load call, which returns why it failed; empty if the adapter is loaded."""


async def load_adapter(replica: ReplicaEndpoint, digest: str) -> AdapterLoad | None:
    """Let a server of another engine load an adapter that it has not loaded yet.

    Concurrent requests share one call, which is returned. A native replica needs none.

    Raises:
        AdapterUnavailableError: It cannot load the adapter.
    """
    if replica.is_native:
        return None
    if not replica.may_load_adapters:
        raise AdapterUnavailableError("its engine loads no adapters")
    load = replica.adapter_loads.get(digest)
    if load is None:
        load = replica.adapter_loads[digest] = asyncio.create_task(_send_load(replica, digest))
        load.add_done_callback(partial(_on_load_ended, replica, digest))
    else:
        replica.adapter_loads[digest] = replica.adapter_loads.pop(digest)
    reason = await asyncio.shield(load)
    if reason:
        raise AdapterUnavailableError(reason)
    return load


def check_adapter(
    replica: ReplicaEndpoint,
    digest: str,
    load: AdapterLoad | None,
    status: int,
    headers: Mapping[bytes, bytes],
    body: bytes = b"",
    *,
    may_reload: bool = False,
) -> None:
    """Check that a response is that of an adapter.

    Raises:
        AdapterUnavailableError: The replica lacks the adapter, or names another one.
        AdapterLostError: It has lost the adapter, and `may_reload` says that it may be sent the load call again.
    """
    if status == 404:
        if load is not None and replica.adapter_loads.get(digest) is load:
            del replica.adapter_loads[digest]
        if load is not None and may_reload:
            raise AdapterLostError(status, "it has lost the adapter")
        raise AdapterUnavailableError(f"it does not know it: {parse_error_message(body)}")
    if replica.is_native and status == 200 and headers.get(ADAPTER_HEADER) != digest.encode():
        raise AdapterUnavailableError("it answered without it")
    if replica.is_native and status != 200 and any(code in body for code in ADAPTER_ERRORS):
        raise AdapterUnavailableError(parse_error_message(body))


async def unload_adapter(replica: ReplicaEndpoint, digest: str) -> None:
    """Let a server of another engine unload an adapter. Responses that have begun end with it.

    Raises:
        AdapterUnavailableError: It does not unload the adapter. The next check repeats the call.
    """
    load = replica.adapter_loads.pop(digest)
    path = replica.adapter.adapter_unload_path
    status, reason = await _call(replica, path, {"lora_name": digest})
    if status not in {200, 404}:
        replica.adapter_loads.setdefault(digest, load)
        raise AdapterUnavailableError(reason)


async def _send_load(replica: ReplicaEndpoint, digest: str) -> str:
    """Send the load call, and return why it failed; empty if the adapter is loaded."""
    call = {"lora_name": digest, "lora_path": replica.adapter_path(digest)}
    status, reason = await _call(replica, replica.adapter.adapter_load_path, call)
    if status == 200 or (status == 400 and "already" in reason):
        log.info("adapter_loaded", replica=replica.name, adapter=digest)
        return ""
    return reason


async def _call(replica: ReplicaEndpoint, path: bytes, call: dict[str, str]) -> tuple[int, str]:
    """Send a call about an adapter. Returns the status, which is 0 without a response, and the server's message."""
    body, headers = msgspec.json.encode(call), ((b"content-type", JSON_MEDIA_TYPE.encode()),)
    request = replica.upstream.build_request(b"POST", path, body, headers)
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            status, answer = await fetch_response(replica.upstream, request)
    except (UpstreamError, TimeoutError) as error:
        return 0, f"{path.decode()} failed: {str(error) or 'it took too long'}"
    return status, f"status {status} of {path.decode()}: {parse_error_message(answer)}"


def _on_load_ended(replica: ReplicaEndpoint, digest: str, load: AdapterLoad) -> None:
    """Let a later request repeat a load call that failed."""
    if load.cancelled() or load.exception() is not None:
        replica.adapter_loads.pop(digest, None)
    elif load.result():
        log.warning(
            "adapter_load_failed", replica=replica.name, adapter=digest, reason=load.result()
        )
        asyncio.get_running_loop().call_later(
            RELOAD_INTERVAL_S, replica.adapter_loads.pop, digest, None
        )
