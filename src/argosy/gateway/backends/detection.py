"""Detection of the kind of server at an address. Most servers reveal it in their model list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.deployment import BackendKind

FetchPath = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Function that sends a GET request and returns status and body. Raises UpstreamError."""

_KIND_BY_OWNER: dict[str, BackendKind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
    "llamacpp": "llama.cpp",
}
"""Backend kinds by the `owned_by` value in their model lists."""


class _ListedModel(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None
    tasks: frozenset[str] | None = None


class _ModelListing(msgspec.Struct):
    data: list[_ListedModel] = []


@dataclass(frozen=True, slots=True)
class DetectedBackend:
    """Kind and models of a server, as it reports them."""

    kind: BackendKind
    models: dict[str, int | None]
    """Context length in tokens by model name; None if the server does not report it."""
    tasks: dict[str, frozenset[str]] = field(default_factory=dict)
    """Tasks by model name, as Argosy's replicas and gateways report them."""


async def detect_backend(fetch: FetchPath) -> DetectedBackend | None:
    """Detect the kind of a server and its models.

    Args:
        fetch: Function that fetches a path of the server.

    Returns:
        The detected backend; None if the server cannot answer yet.
    """
    status, body = await fetch(b"/v1/models")
    if status == 429 or status >= 500:
        return None
    listed = _parse_model_listing(body) if status == 200 else []
    models = {model.id: model.max_model_len or None for model in listed}
    tasks = {model.id: model.tasks for model in listed if model.tasks is not None}
    owners = {model.owned_by for model in listed}
    for owner, kind in _KIND_BY_OWNER.items():
        if owner in owners:
            return DetectedBackend(kind, models)
    if "argosy" in owners and (await fetch(b"/load"))[0] != 404:  # a gateway has no /load
        return DetectedBackend("argosy", models, tasks)
    if await _is_tgi(fetch):
        return DetectedBackend("tgi", models)
    return DetectedBackend("openai", models, tasks)


def _parse_model_listing(body: bytes) -> list[_ListedModel]:
    try:
        return msgspec.json.decode(body, type=_ModelListing).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


async def _is_tgi(fetch: FetchPath) -> bool:
    """Whether the server is TGI. Its model list shows the models' authors, but only TGI has this `/info`."""
    status, body = await fetch(b"/info")
    try:
        info = msgspec.json.decode(body, type=dict[str, Any]) if status == 200 else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return {"model_id", "max_total_tokens", "max_concurrent_requests"} <= info.keys()
