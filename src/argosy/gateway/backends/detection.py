"""Finds out what kind of server an address has: most say so in their list of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import BackendKind

FetchPath = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Gets a path: status and body. Raises UpstreamError."""

_KIND_BY_OWNER: dict[str, BackendKind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
    "llamacpp": "llama.cpp",
}
"""Who the models of each server's list are said to be owned by."""


class _ListedModel(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None


class _ModelListing(msgspec.Struct):
    data: list[_ListedModel] = []


@dataclass(frozen=True, slots=True)
class DetectedBackend:
    """What a server told of itself."""

    kind: BackendKind
    models: dict[str, int | None]
    """Its models, and the tokens of each one's context where it says."""


async def detect_backend(fetch: FetchPath) -> DetectedBackend | None:
    """What is there. None: it cannot say yet."""
    status, body = await fetch(b"/v1/models")
    if status == 429 or status >= 500:
        return None
    cards = _parse_model_listing(body) if status == 200 else []
    models = {card.id: card.max_model_len or None for card in cards}
    owners = {card.owned_by for card in cards}
    for owner, kind in _KIND_BY_OWNER.items():
        if owner in owners:
            return DetectedBackend(kind, models)
    if "argosy" in owners and (await fetch(b"/load"))[0] != 404:  # else it is another gateway
        return DetectedBackend("argosy", models)
    if await _is_tgi(fetch):
        return DetectedBackend("tgi", models)
    return DetectedBackend("openai", models)


def _parse_model_listing(body: bytes) -> list[_ListedModel]:
    try:
        return msgspec.json.decode(body, type=_ModelListing).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


async def _is_tgi(fetch: FetchPath) -> bool:
    """TGI's list of models names their makers; its `/info` is its own."""
    status, body = await fetch(b"/info")
    try:
        info = msgspec.json.decode(body, type=dict[str, Any]) if status == 200 else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return {"model_id", "max_total_tokens", "max_concurrent_requests"} <= info.keys()
