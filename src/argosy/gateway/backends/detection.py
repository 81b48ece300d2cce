"""Finds out what kind of server an address has: most say so in their list of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.gateway.backends.backend_adapter import Kind

Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Gets a path: status and body. Raises UpstreamError."""

_OWNERS: dict[str, Kind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
    "llamacpp": "llama.cpp",
}
"""Who the models of each server's list are said to be owned by."""


class _Card(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


@dataclass(frozen=True, slots=True)
class Found:
    """What a server told of itself."""

    kind: Kind
    models: dict[str, int | None]
    """Its models, and the tokens of each one's context where it says."""


async def find(ask: Ask) -> Found | None:
    """What is there. None: it cannot say yet."""
    status, body = await ask(b"/v1/models")
    if status == 429 or status >= 500:
        return None
    cards = _read(body) if status == 200 else []
    models = {card.id: card.max_model_len or None for card in cards}
    owners = {card.owned_by for card in cards}
    for owner, kind in _OWNERS.items():
        if owner in owners:
            return Found(kind, models)
    if "argosy" in owners and (await ask(b"/load"))[0] != 404:  # else it is another gateway
        return Found("argosy", models)
    if await _is_tgi(ask):
        return Found("tgi", models)
    return Found("openai", models)


def _read(body: bytes) -> list[_Card]:
    try:
        return msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


async def _is_tgi(ask: Ask) -> bool:
    """TGI's list of models names their makers; its `/info` is its own."""
    status, body = await ask(b"/info")
    try:
        info = msgspec.json.decode(body, type=dict[str, Any]) if status == 200 else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return {"model_id", "max_total_tokens", "max_concurrent_requests"} <= info.keys()
