"""Detection of an engine's kind from its responses."""

from __future__ import annotations

import json

import pytest

from argosy.gateway.backends import DetectedBackend, detect_backend

INFO = {"model_id": "m", "max_total_tokens": 9, "max_concurrent_requests": 9}


def model_list(*owners: str) -> tuple[int, object]:
    return 200, {"data": [{"id": f"m{at}", "owned_by": owner} for at, owner in enumerate(owners)]}


@pytest.mark.parametrize(
    ("responses", "kind"),
    [
        ({"/v1/models": model_list("vllm")}, "vllm"),
        ({"/v1/models": model_list("someone", "sglang")}, "sglang"),
        ({"/v1/models": model_list("tensorrt_llm")}, "tensorrt-llm"),
        ({"/v1/models": model_list("lmdeploy")}, "lmdeploy"),
        ({"/v1/models": model_list("llamacpp")}, "llama.cpp"),
        ({"/v1/models": model_list("argosy"), "/load": (200, {})}, "argosy"),
        ({"/v1/models": model_list("argosy"), "/load": (503, {})}, "argosy"),
        ({"/v1/models": model_list("argosy")}, "openai"),  # another gateway
        ({"/v1/models": model_list("m"), "/info": (200, INFO)}, "tgi"),
        ({"/v1/models": model_list("m"), "/info": (200, {"model_id": "m"})}, "openai"),
        ({"/v1/models": model_list("m"), "/info": (200, "nothing of the kind")}, "openai"),
        ({"/v1/models": (200, "no list")}, "openai"),
        ({"/v1/models": (200, {"data": [7]})}, "openai"),
        ({"/v1/models": (401, {})}, "openai"),
        ({}, "openai"),
        ({"/v1/models": (503, {})}, None),
        ({"/v1/models": (429, {})}, None),
    ],
)
async def test_backend_kind_is_detected(
    responses: dict[str, tuple[int, object]], kind: str | None
) -> None:
    async def fetch(path: bytes) -> tuple[int, bytes]:
        status, content = responses.get(path.decode(), (404, {}))
        return status, json.dumps(content).encode()

    detected = await detect_backend(fetch)
    assert (None if detected is None else detected.kind) == kind


async def test_context_length_of_models_is_detected() -> None:
    async def fetch(path: bytes) -> tuple[int, bytes]:
        del path
        models = [{"id": "a", "owned_by": "vllm", "max_model_len": 64}, {"id": "b"}]
        models.append({"id": "c", "max_model_len": 0})
        return 200, json.dumps({"data": models}).encode()

    assert await detect_backend(fetch) == DetectedBackend("vllm", {"a": 64, "b": None, "c": None})


@pytest.mark.parametrize("path", [b"/v1/models", b"/info"])
async def test_response_that_is_not_utf8_is_generic_backend(path: bytes) -> None:
    async def fetch(requested: bytes) -> tuple[int, bytes]:
        return 200, b'{"data": [{"id": "\xff"}], "\xff": 1}' if requested == path else b"{}"

    assert await detect_backend(fetch) == DetectedBackend("openai", {})
